"""Trains until it is stopped, and causes a fault in one process: see :mod:`benchmarks.inprocess`.

``program.py FOLDER LAUNCHER FAULT WHERE [ETCD RANKS LEASE]``: LAUNCHER is "torchelastic" for ``torchelastic.train``
without an agent, or "torchrun" for a plain program. Each process writes the file FOLDER/PID, with one line for each
step: ``step TIME ROUND WORLD_SIZE``, with the time of the monotonic clock. If FOLDER/PID.fault exists, the process
writes ``fault TIME`` and causes the fault.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

folder, launcher, fault, where = sys.argv[1:5]
report = open(f"{folder}/{os.getpid()}", "w", buffering=1)  # noqa: PTH123, SIM115 - open until the process ends
trigger = f"{folder}/{os.getpid()}.fault"
values = torch.ones(1 << 10)
raises = threading.Event()
LATE = (1, 2)  # inside a collective, the other ranks wait for these; at least one of them does not have the fault
caused = False


def cause() -> None:
    """Cause the fault."""
    print("fault", time.monotonic(), file=report)
    if fault == "raising":
        raises.set()
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "leaving": signal.SIGTERM}[fault])


def leave(*_: object) -> None:
    """End the process in order."""
    raise SystemExit(0)


if fault == "leaving":
    signal.signal(signal.SIGTERM, leave)


def step() -> None:
    """Train for one step."""
    global caused  # noqa: PLW0603
    if not caused and os.path.exists(trigger):  # noqa: PTH110 - in each step
        caused = True
        if where == "inside":
            threading.Timer(0.002, cause).start()
        else:
            cause()
    elif where == "outside" or dist.get_rank() in LATE:
        time.sleep(0.005)
    if raises.is_set():
        raises.clear()
        raise RuntimeError("the fault")
    dist.all_reduce(values)
    if raises.is_set():
        raises.clear()
        raise RuntimeError("the fault")
    values.fill_(1.0)
    round = os.environ["TORCHELASTIC_ROUND" if launcher == "torchelastic" else "TORCHELASTIC_RESTART_COUNT"]
    print("step", time.monotonic(), round, dist.get_world_size(), file=report)


if launcher == "torchrun":
    dist.init_process_group("gloo")
    while True:
        step()

import torchelastic  # noqa: E402 - torchrun's program does not need it
from torchelastic.inprocess.p2p import CoordinatorP2P  # noqa: E402

etcd, ranks, lease = sys.argv[5:8]


class State(torchelastic.State):
    """A state that every rank has."""

    def sync(self, world_size: int, rank: int) -> None:
        """Do nothing."""


def train_step(state: State) -> None:  # noqa: ARG001 - the interface
    """Train for one step."""
    step()


coordinator = CoordinatorP2P(
    "gloo",
    f"etcd://{etcd}/benchmark?min_workers=2&max_workers={ranks}&lease={lease}",
    max_num_trainers=int(ranks) + 1,
    process_group_timeout=60_000,
)
torchelastic.train(coordinator, train_step, State())
