"""The worker of the recovery benchmark and of the soak: does an all-reduce every few milliseconds.

It writes a line of JSON to the named pipe BENCHMARK_REPORTS after its first all-reduce, and then once in every
BENCHMARK_EVERY seconds (0: never again). All times are from the monotonic clock, which all processes of a machine
share.
"""

import time

BEGAN = time.monotonic()

import json  # noqa: E402 - the imports are measured
import os  # noqa: E402
from datetime import timedelta  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

IMPORTED = time.monotonic()
STEP = 0.005
"""Seconds between all-reduces; the pauses leave the processors to the recovery."""


def main() -> None:
    """Initialize the process group, and do all-reduces until killed."""
    pipe = os.open(os.environ["BENCHMARK_REPORTS"], os.O_WRONLY)
    every = float(os.environ["BENCHMARK_EVERY"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["BENCHMARK_TIMEOUT"])))
    met = time.monotonic()
    dist.all_reduce(torch.ones(1))
    reduced = now = time.monotonic()
    facts = {
        "node": os.environ["BENCHMARK_NODE"],
        "pid": os.getpid(),
        "round": int(os.environ.get("TORCHELASTIC_ROUND", "0")),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "began": BEGAN,
        "imported": IMPORTED,
        "met": met,
        "reduced": reduced,
    }
    reported_at = 0.0
    while True:
        if not reported_at or (every and now - reported_at >= every):
            os.write(pipe, json.dumps({**facts, "at": now}).encode() + b"\n")
            reported_at = now
        time.sleep(STEP)
        dist.all_reduce(torch.ones(1))
        now = time.monotonic()


main()
