"""Processes that stay although they use NCCL. A stand-in for a GPU and NCCL runs the collectives.

As NCCL does, it runs what the program starts in the background, waits without end for a rank that is lost, and leaves
wrong numbers and no error, also on other ranks, when a collective is aborted. It has not been compared with a real GPU.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

STAND_IN = """
import math
import queue
import threading
import time

import torch
import torch.distributed as dist

commands = queue.Queue()


class Nccl(dist.ProcessGroupGloo):
    def __init__(self, store, rank, size, timeout):
        super().__init__(dist.PrefixStore("gloo", store), rank, size, timeout)
        self.store, self.own_rank, self.of_size, self.count = store, rank, size, 0
        self.aborted = threading.Event()

    def abort(self):
        self.aborted.set()

    def all_reduce(self, tensor):
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        self.count += 1
        commands.put(lambda prefix=f"sum {self.count} of": self.run(prefix, tensor))

    def run(self, prefix, tensor):
        keys = [f"{prefix} {rank}" for rank in range(self.of_size)]
        try:
            self.store.set(keys[self.own_rank], f"{tensor.item()}")
            while not self.store.check(keys):
                if self.aborted.is_set():  # then other ranks get wrong numbers, too
                    for key in keys:
                        self.store.set(key, "nan")
                    self.store.set("aborted", "")
                time.sleep(0.001)
            tensor.fill_(sum(float(self.store.get(key)) for key in keys))
        except RuntimeError:  # the store has ended
            self.aborted.wait()
            tensor.fill_(math.nan)


def create(*arguments):
    global nccl
    nccl = Nccl(*arguments)
    return nccl


def all_reduce(tensor):
    nccl.all_reduce(tensor)


def run_commands():
    while True:
        commands.get()()


def synchronize():
    done = threading.Event()
    commands.put(done.set)
    done.wait()


threading.Thread(target=run_commands, daemon=True).start()
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.synchronize = synchronize
dist.Backend.register_backend("nccl", create, devices=["cuda"])
"""

PROGRAM = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchelastic

folder, fault, interval = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


@torchelastic.elastic
def train(state):
    import gpu

    rank, size = dist.get_rank(), dist.get_world_size()
    line = f"{os.getpid()}: rank {rank} of {size}, commits {state.commits}, weight {state.weight.item()}\\n"
    os.write(1, line.encode())
    while state.commits < 60 or (size < 3 and state.commits < 5000):
        is_fault = state.commits == 20 and os.environ["TORCHELASTIC_ROUND"] == "1"
        if is_fault and rank == 1 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while is_fault and rank != 1 and fault == "raises" and not gpu.nccl.store.check(["aborted"]):
            time.sleep(0.001)
        gradient = torch.ones(1)
        gpu.all_reduce(gradient)
        if is_fault and fault == "raises":
            assert rank != 1
        gpu.commands.put(lambda: state.weight.add_(gradient / size))
        state.commit()
    os.write(1, f"{os.getpid()} ends: commits {state.commits}, weight {state.weight.item()}\\n".encode())


if "WORLD_SIZE" in os.environ:  # not in the fork server, where threads must not start
    import gpu
checkpointer = torchelastic.Checkpointer(folder / "none", every=5000, memory_every=interval) if interval else None
train(torchelastic.TorchState(weight=torch.zeros(1), checkpointer=checkpointer))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "gpu.py").write_text(STAND_IN)
    (program := tmp_path / "program.py").write_text(PROGRAM)
    return program


@pytest.mark.parametrize(("fault", "interval"), [("killed", 1), ("killed", 1000), ("raises", 1)])
async def test_survivors_stay_and_go_back_to_the_newest_copy(
    fault: str, interval: int, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_NCCL_IN_PLACE", "1")
    arguments = ("--standalone", "--nproc-per-node=3", "--max-restarts=1", program, tmp_path, fault, str(interval))
    async with AgentProcess(*arguments) as agent:
        assert await agent.code() == 0, agent.output
    worlds = re.findall(r"(\d+): rank \d of (\d), commits (\d+), weight (\S+)", agent.output)
    ends = re.findall(r"(\d+) ends: commits (\d+), weight (\S+)", agent.output)
    assert all(float(weight) == int(commits) for *_, commits, weight in worlds + ends), agent.output
    before = {pid for pid, *_ in worlds[:3]}
    after = {pid for pid, *_ in ends}
    assert len(before) == len(after) == 3
    assert len(before & after) == 2, agent.output
    assert [size for _, size, *_ in worlds] == ["3", "3", "3", "2", "2", "3", "3", "3"]
    begins = {int(commits) for _, size, commits, _ in worlds if size == "2"}
    assert len(begins) == 1
    assert begins <= ({*range(1, 21)} if interval == 1 else {0}), agent.output


async def test_a_state_without_a_checkpointer_is_refused(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_NCCL_IN_PLACE", "1")
    async with AgentProcess("--standalone", "--nproc-per-node=3", program, tmp_path, "killed", "0") as agent:
        assert await agent.code() != 0
    assert "TORCHELASTIC_NCCL_IN_PLACE=1 needs a TorchState with a checkpointer" in agent.output
