"""Trains steps of 50 ms until it is stopped: ``program.py FOLDER HOW``; see :mod:`benchmarks.storm`.

HOW is "in-place" for a program with ``@torchelastic.elastic``, and "restarts" for the same program with
``init_process_group()``. Each process creates the file FOLDER/NODE.LOCAL_RANK.PID. Rank 0 writes one line for each step
that is complete: ``TIME STEP WORLD_SIZE``, with the time of the monotonic clock.
"""

import os
import sys
import time

import slow_imports  # type: ignore[import-not-found] # noqa: F401 - beside this program
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchelastic

STEP = 0.05
"""Seconds of a step, including its computation."""

LATE = 0.005
"""Seconds by which a step may be late without a delay of the next one, because the machine has other work."""

CHECKPOINT_EVERY = 10
"""Steps between two checkpoints."""

folder, how = sys.argv[1:3]
torch.set_num_threads(1)
slot = f"{os.environ['BENCHMARK_NODE']}.{os.environ['LOCAL_RANK']}"
report = os.open(f"{folder}/{slot}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
own_state = torchelastic.TorchState(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.001),
    checkpointer=torchelastic.Checkpointer(f"{folder}/checkpoints", every=CHECKPOINT_EVERY),
)


def train(state: torchelastic.TorchState) -> None:
    """Train in one world."""
    parallel = DistributedDataParallel(state.model)
    inputs = torch.randn(16, 64)
    end = time.monotonic()
    while True:
        end = max(end, time.monotonic() - LATE) + STEP
        state.optimizer.zero_grad()
        parallel(inputs).square().mean().backward()
        state.optimizer.step()
        time.sleep(max(end - time.monotonic(), 0))
        if dist.get_rank() == 0:
            os.write(report, f"{time.monotonic()} {state.commits + 1} {dist.get_world_size()}\n".encode())
        state.commit()


if how == "in-place":
    torchelastic.elastic(train)(own_state)
else:
    dist.init_process_group("gloo")
    own_state.restore()
    train(own_state)
