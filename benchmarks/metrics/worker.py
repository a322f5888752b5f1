"""The worker of the metrics benchmark.

With the arguments ``names NUMBER``, it creates this number of gauges and waits. With ``cost FILE STEPS``, it measures
and writes the results to the file as JSON.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torchelastic
from torchelastic import metrics
from torchelastic.metrics.api import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP: Final = "my_app"
KINDS: Final = ("loss", "samples", "step.ms")
"""The names of a gauge, a counter and a histogram."""

CALLS: Final = 20_000
FLOOD: Final = 100_000


def main() -> None:
    """Run the program."""
    metrics.declare(GROUP, counters=["samples", "flood"], histograms={"step.ms": (0.001, 0.01, 0.1, 1.0, 10.0)})
    if sys.argv[1] == "names":
        for number in range(int(sys.argv[2])):
            metrics.put_metric(f"layer.{number}.norm", number, GROUP)
        signal.pause()
    path, steps = Path(sys.argv[2]), int(sys.argv[3])
    [handler] = REGISTRY.attached
    stream = metrics.getStream(GROUP)
    found: dict[str, Any] = {"calls": {name: calls(partial(stream.add_value, name, 0.5)) for name in KINDS}}
    found["calls"]["step"] = calls(torchelastic.step)
    found["flood"] = flood()
    REGISTRY.detach(handler)
    found["calls"]["no handler"] = calls(partial(stream.add_value, "loss", 0.5))
    found["on"], found["off"] = train(steps, on=lambda: REGISTRY.attach(handler), off=lambda: REGISTRY.detach(handler))
    path.write_text(json.dumps(found))


def calls(call: Callable[[], None]) -> dict[str, float]:
    """Return the median and the 99th percentile of the seconds of a call, which include reading the clock."""
    clock = time.perf_counter_ns
    took = []
    for _ in range(CALLS):
        began = clock()
        call()
        took.append(clock() - began)
    took.sort()
    return {"median": statistics.median(took) / 1e9, "p99": took[int(0.99 * len(took))] / 1e9}


def flood() -> float:
    """Return the seconds for FLOOD values of a counter."""
    stream = metrics.getStream(GROUP)
    began = time.perf_counter()
    for _ in range(FLOOD):
        stream.add_value("flood", 1)
    return time.perf_counter() - began


def train(steps: int, *, on: Callable[[], None], off: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Return the seconds of each step with metrics and of each step without; the two kinds alternate."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pictures, labels = torch.randn(64, 784), torch.randint(10, (64,))
    stream = metrics.getStream(GROUP)
    took: tuple[list[float], list[float]] = ([], [])

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()  # type: ignore[no-untyped-call] # torch's
        optimizer.step()
        stream.add_value("loss", loss.item())
        stream.add_value("learning.rate", 0.1)
        stream.add_value("samples", len(labels))
        stream.add_value("step.ms", (time.perf_counter() - began) * 1000)
        return time.perf_counter() - began

    for _ in range(50):
        step()
    for number in range(2 * steps):
        (off if number % 2 else on)()
        took[number % 2].append(step())
    return took


if __name__ == "__main__":
    main()
