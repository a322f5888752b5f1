"""Trains until it is stopped, and causes a fault in one process: see :mod:`benchmarks.training`.

``program.py FOLDER HOW WHERE``: HOW is "in-place" for a program with ``@torchelastic.elastic``, "restarts" for the same
program with ``init_process_group()`` and a Checkpointer, "torchft", and "torch-alone" for WORLD_SIZE ranks that only
reduce a number; this process forks them, and has a TCPStore at MASTER_PORT. Each process that trains writes the file
FOLDER/NODE.LOCAL_RANK.PID with one line for each event: ``EVENT TIME STEP WORLD_SIZE RANK``. The time is that of the
monotonic clock. The events are

- ready: the modules are imported, and the state exists
- world: a world begins
- reduced: the first all-reduce of a world is done
- begin, step: a training step begins; its optimizer's step is done
- fault: this process causes the fault, because FOLDER/PID.fault exists with the number of the signal
"""

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

CHECKPOINT_EVERY = 20
"""Steps between two checkpoints of the program that restarts."""

STEP = 0.01
"""Seconds of sleep in a step."""

LATE = (1, 2)
"""The ranks for which the others wait inside a collective; at least one of them does not have the fault."""


def fork_ranks() -> None:
    """Return in each of the forked ranks only; this process tells them which rank has died."""
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if not (pid := os.fork()):
            os.environ["LOCAL_RANK"] = f"{rank}"
            return
        ranks[pid] = rank
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    store.set("lost", f"{ranks[os.wait()[0]]}")
    signal.pause()  # this process serves the store


folder, how, where = sys.argv[1:4]
torch.set_num_threads(1)
features = torch.randn(6400, 64, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(features, features.sum(dim=1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
if how == "torch-alone":
    fork_ranks()
slot = f"{os.environ.get('BENCHMARK_NODE', 'a')}.{os.environ.get('LOCAL_RANK', '0')}"
report = os.open(f"{folder}/{slot}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
trigger = Path(folder, f"{os.getpid()}.fault")


def write(event: str, step: int, size: int = 0, rank: int = -1) -> None:
    """Report an event."""
    os.write(report, f"{event} {time.monotonic()} {step} {size} {rank}\n".encode())


def delay(step: int, rank: int) -> None:
    """Spend the time of a step, or cause the fault."""
    if trigger.exists():
        number = signal.Signals(int(trigger.read_text()))
        trigger.unlink()

        def cause() -> None:
            write("fault", step)
            os.kill(os.getpid(), number)

        if where == "inside":
            threading.Timer(0.002, cause).start()
        else:
            cause()
    elif where == "outside" or rank in LATE:
        time.sleep(STEP)


def train(state: torchelastic.TorchState) -> None:
    """Train in one world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    write("world", state.commits, size, rank)
    dist.all_reduce(torch.ones(1))
    write("reduced", state.commits, size, rank)
    parallel = DistributedDataParallel(state.model)
    sampler = state.data.batch_sampler
    while True:
        for inputs, targets in state.data:
            step = state.commits + 1
            write("begin", step, size, rank)
            delay(step, rank)
            state.optimizer.zero_grad()
            sampler.mean((parallel(inputs) - targets).square()).backward()
            state.optimizer.step()
            write("step", step, size, rank)
            state.commit()


def train_with_torchft() -> None:
    """Train in a replica group of one process, which torchft adds to the others."""
    import torchft  # type: ignore[import-not-found] # only the processes of torchft have it

    # The store of this replica group. The lighthouse finds the other groups.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=lambda saved: (model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["adam"])),
        state_dict=lambda: {"model": model.state_dict(), "adam": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"{slot}.{os.getpid()}",
    )
    managed = torchft.Optimizer(manager, optimizer)
    batches = itertools.cycle(DataLoader(dataset, batch_size=64, shuffle=True))
    size_before, replica = 0, int(os.environ["LOCAL_RANK"])
    for inputs, targets in batches:
        before = manager.current_step()
        if size_before:  # a new process learns the number of its first step in it
            write("begin", before + 1, size_before, replica)
        delay(before + 1, replica)
        managed.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        # With torch 2.15, torchft's DistributedDataParallel raises AssertionError when an all-reduce has failed.
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        reduced = torch.nn.utils.parameters_to_vector(gradients)
        manager.allreduce(reduced).wait()
        torch.nn.utils.vector_to_parameters(reduced, gradients)
        managed.step()
        if manager.current_step() > before:
            size = manager.num_participants()
            if size != size_before:
                write("world", before, size, replica)
                write("reduced", before, size, replica)
                size_before = size
            write("step", before + 1, size, replica)


def reduce_with_torch() -> None:
    """Reduce a number in each step until a rank is lost, and then once in the world without it."""
    own, ranks = int(os.environ["LOCAL_RANK"]), [*range(int(os.environ["WORLD_SIZE"]))]
    store, watched = (TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])) for _ in range(2))
    dist.init_process_group("gloo", store=store, rank=own, world_size=len(ranks), enable_reconfigure=True)
    connections: set[Path] = set()
    interrupted = threading.Event()

    def sockets() -> set[Path]:
        return {path for path in Path("/proc/self/fd").iterdir() if path.is_socket()}

    def begin() -> tuple[int, int]:
        """Form the group of these ranks, and reduce a number; return the rank in it and its size."""
        rank, size = ranks.index(own), len(ranks)
        before = sockets()
        store.set(f"{size}/{own}", dist.distributed_c10d._get_reconfigure_handle())  # noqa: SLF001 - its only name
        handles = [handle.decode() for handle in store.multi_get([f"{size}/{each}" for each in ranks])]
        dist.distributed_c10d._reconfigure(uuid=size, handles=handles).wait()  # noqa: SLF001 - its only name
        connections.update(sockets() - before)
        write("world", 0, size, rank)
        dist.all_reduce(torch.ones(1))
        write("reduced", 0, size, rank)
        return rank, size

    def interrupt() -> None:
        """End gloo's connections when a rank is lost: gloo wakes only the ranks that exchange data with that one."""
        ranks.remove(int(watched.get("lost")))
        for each in connections:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as connection:
                connection.shutdown(socket.SHUT_RD)
        interrupted.set()

    rank, size = begin()
    threading.Thread(target=interrupt, daemon=True).start()
    with contextlib.suppress(RuntimeError):
        for step in itertools.count(1):
            delay(step, rank)
            dist.all_reduce(torch.ones(1))
            write("step", step, size, rank)
    interrupted.wait()
    begin()
    signal.pause()  # a rank that ends would disturb the others


if how == "torch-alone":
    reduce_with_torch()
if how == "torchft":
    write("ready", 0)
    train_with_torchft()
own_state = torchelastic.TorchState(
    model=model,
    optimizer=optimizer,
    data=DataLoader(dataset, batch_sampler=torchelastic.ElasticSampler(dataset, batch_size=64)),
    checkpointer=(
        torchelastic.Checkpointer(f"{folder}/checkpoints", every=CHECKPOINT_EVERY) if how == "restarts" else None
    ),
)
write("ready", 0)
if how == "in-place":
    torchelastic.elastic(train)(own_state)
else:
    dist.init_process_group("gloo")
    own_state.restore()
    train(own_state)
