"""Measures one cost of the training API: ``costs.py COST FILE REPEAT GIGABYTES``; see :mod:`benchmarks.training`.

Rank 0 writes the lists of samples to the file, as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

COMMITS = 20_000
SIDE = 4096
"""Each tensor of the large state has SIDE x SIDE values of 4 bytes: 64 MiB."""

cost, file = sys.argv[1], Path(sys.argv[2])
repeat, gigabytes = int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def large_model() -> torch.nn.Module:
    """Return a module with the parameters of the large state."""
    layers = max(round(gigabytes * 1e9 / (SIDE * SIDE * 4)), 1)
    return torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))


def broadcast() -> dict[str, list[float]]:
    """Bring rank 1 to the state of rank 0, and broadcast as many bytes in one tensor, by turns."""
    dist.init_process_group("gloo")
    model = large_model()
    state = torchelastic.TorchState(model=model)
    plain = torch.ones(sum(each.numel() for each in model.parameters()))
    samples: dict[str, list[float]] = {"restore": [], "plain": [], "bytes": [plain.numel() * 4]}

    def together(work: Callable[[], object]) -> float:
        dist.barrier()
        return seconds(lambda: (work(), dist.barrier()))

    for _ in range(repeat):
        if dist.get_rank() == 0:
            state.commit()  # rank 0 is ahead
        samples["restore"].append(together(state.restore))
        samples["plain"].append(together(lambda: dist.broadcast(plain, 0)))
    dist.destroy_process_group()
    return samples


def checkpoint() -> dict[str, list[float]]:
    """Save the large state with a Checkpointer, copy it in memory, and save it with torch.save(), by turns."""
    dist.init_process_group("gloo")
    state = large_model().state_dict()
    samples: dict[str, list[float]] = {"save": [], "clone": [], "torch.save": [], "write": []}
    checkpointer = torchelastic.Checkpointer(file.parent / "checkpoints", keep=1)
    checkpointer.load()
    for number in range(repeat):
        samples["clone"].append(seconds(lambda: [each.clone() for each in state.values()]))
        began = time.monotonic()
        samples["save"].append(seconds(lambda: checkpointer.save(number + 1, state, force=True)))  # noqa: B023 - at once
        checkpointer.wait()
        samples["write"].append(time.monotonic() - began)
        samples["torch.save"].append(seconds(lambda: torch.save(state, file.parent / "checkpoints" / "plain.pt")))
    dist.destroy_process_group()
    return samples


def commit() -> dict[str, list[float]]:
    """Commit steps of a small state, with nothing else to do."""
    features = torch.zeros(COMMITS * 10, 1)
    model = torch.nn.Linear(8, 8)
    sampler = torchelastic.ElasticSampler(features, batch_size=1)
    state = torchelastic.TorchState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        data=DataLoader(TensorDataset(features), batch_sampler=sampler),
    )

    @torchelastic.elastic
    def train(state: torchelastic.TorchState) -> list[float]:
        samples = []
        for _ in range(repeat):
            began = time.monotonic()
            for _ in range(COMMITS):
                state.commit()
            samples.append((time.monotonic() - began) / COMMITS * 1e6)
        return samples

    return {"commit": train(state)}


found = {"broadcast": broadcast, "checkpoint": checkpoint, "commit": commit}[cost]()
if os.environ["RANK"] == "0":
    file.with_suffix(".part").write_text(json.dumps(found))
    file.with_suffix(".part").rename(file)
