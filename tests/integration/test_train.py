"""Training that survives changes of its world, in plain processes that find each other in an etcd."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import uuid
from typing import TYPE_CHECKING, TypeAlias

import pytest

from tests.support.agents import AgentProcess
from tests.support.etcd import until_keys
from tests.support.launchers import Launcher
from tests.support.workers import poll_until
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.protocol.keys import RunKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

PROGRAM = '''
"""Adds the numbers 11 to 30, one in each step: the world's ranks take turns to contribute the number."""

import os
import resource
import signal
import sys
import time

import torch
import torch.distributed as dist

import torchelastic
import torchelastic.distributed as edist
from torchelastic.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager
from torchelastic import metrics
from torchelastic.p2p import CoordinatorP2P
from torchelastic.train_loop import run_train

etcd_endpoint, run_id, min_workers, max_workers, folder, fault = sys.argv[1:7]
numbers = list(range(11, 31))


class MyState(torchelastic.State):
    def __init__(self):
        self.index = self.total = 0

    def sync(self, world_size, rank):
        if "rollback" in fault and once("sync"):
            raise RuntimeError("the sync failed")
        assert "torch._dynamo" in sys.modules  # imported before the other ranks waited for this one
        newest, self.index = edist.all_gather_return_max_long(self.index)
        self.total = edist.broadcast_long(self.total, newest)
        self.world_size, self.rank = world_size, rank
        os.write(1, f"world of {world_size}, rank {rank}, index {self.index}\\n".encode())

    if fault != "without rollback":

        def capture_snapshot(self):
            return self.index, self.total

        def apply_snapshot(self, snapshot):
            self.index, self.total = snapshot

    def load(self, stream):
        super().load(stream)
        if fault == "killed in load" and once("load"):
            os.kill(os.getpid(), signal.SIGKILL)

    def should_save_checkpoint(self, rank):
        return True


def once(name):
    """Whether this call is the first one of all processes with this name."""
    try:
        open(f"{folder}/{name}", "x")
    except FileExistsError:
        return False
    return True


def train_step(state: torchelastic.State):
    if state.index == len(numbers):
        raise StopIteration
    if state.index == 10:
        half = torch.tensor(int(os.path.exists(f"{folder}/half")))
        dist.all_reduce(half, op=dist.ReduceOp.MIN)
        if os.path.exists(f"{folder}/raise {os.getpid()}") and once("raised"):
            raise RuntimeError("a retryable error")
        if not half.item():  # until the test has done its part
            if once(f"waits {os.getpid()}"):
                os.write(1, b"waits\\n")
            time.sleep(0.01)
            return None
    if "rollback" in fault and state.index in {3, 7} and once(f"failure {state.index}"):
        raise RuntimeError("a retryable error")
    if fault == "wrong":
        return "ab"
    if fault == "always":
        raise RuntimeError("always fails")
    if fault == "other" and state.index == 5:
        raise ValueError("not retryable")
    if fault == "stuck" and state.index == 5 and once("stuck"):
        os.write(1, b"stuck\\n")
        while not os.path.exists(f"{folder}/continue"):
            time.sleep(0.01)
    number = torch.tensor(numbers[state.index] if state.index % state.world_size == state.rank else 0)
    dist.all_reduce(number)
    state.total += number.item()
    state.index += 1
    return state, torchelastic.SimpleWorkerStats(1.0)


def steps_of_world(state):
    while state.index < len(numbers):
        yield train_step(state)


if fault == "none":
    metrics.configure(metrics.ConsoleMetricHandler())
if fault == "lost":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if fault == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
set_checkpoint_manager(FileSystemCheckpointManager(f"{folder}/checkpoints"))
coordinator = CoordinatorP2P(
    c10d_backend="gloo",
    init_method=f"etcd://{etcd_endpoint}/{run_id}?min_workers={min_workers}&max_workers={max_workers}&last_call_timeout=0&lease=1",
    max_num_trainers=int(max_workers),
    process_group_timeout=2000 if fault == "stuck" else 3_600_000,
)
if "generator" in fault:
    state = run_train(coordinator, steps_of_world, MyState())
else:
    state = torchelastic.train(coordinator, train_step, MyState())
os.write(1, f"the sum is {state.total}\\n".encode())
'''


Start: TypeAlias = "Callable[..., Awaitable[Launcher]]"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The file for which the program waits after ten steps."""
    return tmp_path / "half"


@pytest.fixture
def run_id() -> str:
    return str(uuid.uuid4().int)


@pytest.fixture
async def start(etcd: EtcdServer, run_id: str, tmp_path: Path) -> AsyncIterator[Start]:
    """A function that starts processes of one run."""
    (program := tmp_path / "main.py").write_text(PROGRAM)
    async with contextlib.AsyncExitStack() as stack:

        async def start_one(fault: str = "none", least: int = 1, most: int = 4) -> Launcher:
            arguments = (program, etcd.endpoint, run_id, str(least), str(most), tmp_path, fault)
            return await stack.enter_async_context(Launcher(*arguments, env={"PYTHONWARNINGS": "default"}))

        yield start_one


async def ends_with_the_sum(*trainers: Launcher) -> None:
    for each in trainers:
        assert await each.code() == 0, each.output
        assert "the sum is 410" in each.lines, each.output


@pytest.mark.parametrize("fault", ["with rollback", "without rollback", "a generator with rollback"])
async def test_each_number_counts_once(start: Start, fault: str, half: Path) -> None:
    half.touch()
    await ends_with_the_sum(*[await start(fault, least=2) for _ in range(2)])


async def test_ranks_join_leave_and_die_while_the_others_continue(start: Start, half: Path) -> None:
    first = await start()
    await first.wait_for_line("world of 1, rank 0, index 0")
    second, third = await start(), await start()
    await first.wait_for_line("world of 3, rank 0, index 10")
    await second.wait_for_line("world of 3")
    third.kill()
    await first.wait_for_line("world of 2, rank 0, index 10")
    first.kill(signal.SIGTERM)
    await second.wait_for_line("world of 1, rank 0, index 10")
    last = await start()
    await last.wait_for_line("world of 2, rank 1, index 10")
    half.touch()
    await ends_with_the_sum(second, last)
    shown = {line.rpartition(": ")[2].partition("=")[0] for line in second.lines if "][torchelastic]: " in line}
    operations = "init_process_group should_rendezvous should_stop_training signal_training_done monitor_progress "
    operations += "report_progress should_save_checkpoint load_checkpoint save_checkpoint rendezvous_barrier"
    assert {f"{name}.{what}" for name in operations.split() for what in ("success", "duration.ms")} <= shown
    durations = {f"{name}.duration.ms" for name in ("state_sync", "train_step", "inner_train_loop", "outer_train_loop")}
    assert {"checkpoint.write_latency_ms", "on_error.success", *durations} <= shown


async def test_under_an_agent_the_worlds_are_those_of_the_agent(half: Path, run_id: str, tmp_path: Path) -> None:
    (program := tmp_path / "main.py").write_text(PROGRAM)
    run = ("--standalone", "--nproc-per-node=3", "--max-restarts=1")
    async with AgentProcess(*run, program, "no-etcd:2379", run_id, "1", "4", tmp_path, "agent") as agent:
        await poll_until(lambda: len([*tmp_path.glob("waits *")]) == 3)
        os.kill(max(int(each.name.split()[1]) for each in tmp_path.glob("waits *")), signal.SIGKILL)
        await agent.wait_for_line("world of 3, rank 0, index 10")
        half.touch()
        assert await agent.code() == 0, agent.output
    assert agent.output.count("the sum is 410") == 3
    assert agent.output.count("index 0") == 3, "a rank that is left has begun again"


async def test_a_process_that_was_not_needed_does_not_return_an_untrained_state(
    start: Start, half: Path, etcd: EtcdServer, run_id: str
) -> None:
    trainers = [await start(least=2, most=2) for _ in range(3)]
    keys = RunKeys(f"torchelastic-p2p-{run_id}")
    await until_keys(etcd.settings, keys.nodes, lambda nodes: len(nodes) == 3)
    half.touch()
    ends = sorted([(await each.code(), each.lines[-1]) for each in trainers])
    assert [code for code, _ in ends] == [0, 0, 1]
    assert [line for _, line in ends[:2]] == ["the sum is 410"] * 2
    assert "NonRetryableException: This process was not a rank when the run ended" in ends[2][1]


async def test_no_survivor_waits_for_the_time_out_of_a_collective(start: Start, half: Path) -> None:
    """The time-out of collectives is an hour: only the end of the world's connections ends a collective sooner."""
    trainers = [await start("lost", least=2, most=7) for _ in range(6)]

    async def meet(size: int, *, times: int = 1) -> None:
        """Wait until the ranks that are left have been in a world of this size."""
        for each in trainers:
            position = 0
            for _ in range(times):
                found = await each.wait_for_line(rf"^world of {size}, rank \d, index", since=position)
                position = each.lines.index(found.string, position) + 1
            await each.wait_for_line("^waits")

    await meet(6)
    (half.parent / f"raise {trainers[0].pid}").touch()
    await meet(6, times=2)
    trainers.pop().kill()
    await meet(5)
    trainers[0].kill(signal.SIGSTOP)  # the others now wait in a collective
    trainers.pop().kill()
    trainers[0].kill(signal.SIGCONT)
    await meet(4)
    stopped = trainers.pop()
    stopped.kill(signal.SIGSTOP)
    await meet(3)
    stopped.kill()
    trainers.pop().kill(signal.SIGTERM)
    await meet(2)
    half.touch()
    await ends_with_the_sum(*trainers)


async def test_a_rank_that_is_stuck_is_left_out_and_comes_back(start: Start, half: Path) -> None:
    trainers = [await start("stuck", least=2, most=3) for _ in range(3)]
    waits = {asyncio.create_task(each.wait_for_line("^stuck")): each for each in trainers}
    done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    stuck = waits[done.pop()]
    for each in trainers:
        if each is not stuck:
            await each.wait_for_line("world of 2, rank ., index 5")
    (half.parent / "continue").touch()
    await stuck.wait_for_line("world of 3, rank 2")
    half.touch()
    await ends_with_the_sum(*trainers)


async def test_after_the_loss_of_all_ranks_training_continues_from_the_checkpoint(start: Start, half: Path) -> None:
    trainers = [await start(least=2) for _ in range(2)]
    for each in trainers:
        await each.wait_for_line("world of 2")
        await each.wait_for_line("^waits")
    for each in trainers:
        each.kill()
    half.touch()
    trainers = [await start(least=2) for _ in range(2)]
    await trainers[0].wait_for_line("world of 2, rank ., index 10")
    await ends_with_the_sum(*trainers)


def write_checkpoints(folder: Path, *, torn: int, whole: int = 0) -> None:
    """Write checkpoints of the state after ten steps, the torn ones last."""
    import torch

    manager = FileSystemCheckpointManager(folder / "checkpoints")
    for number in range(whole + torn):
        torch.save((10, sum(range(11, 21))), stream := io.BytesIO())
        checkpoint = manager.create_checkpoint()
        with checkpoint.open_output_stream("state") as file:
            file.write(stream.getvalue() if number < whole else stream.getvalue()[:-100])
        checkpoint.commit()


async def test_survivors_of_the_rank_that_loads_continue_from_the_newest_good_checkpoint(
    start: Start, half: Path, tmp_path: Path
) -> None:
    write_checkpoints(tmp_path, whole=1, torn=1)
    half.touch()
    trainers = [await start("killed in load", least=2) for _ in range(3)]
    codes = [await each.code() for each in trainers]
    assert sorted(codes) == [-signal.SIGKILL, 0, 0]
    survivors = [each for each, code in zip(trainers, codes, strict=True) if code == 0]
    assert any("checkpoint 2 cannot be loaded" in line for each in survivors for line in each.lines)
    for each in survivors:
        assert "world of 2, rank ., index 0" not in each.output
        await each.wait_for_line("world of 2, rank ., index 10")
    await ends_with_the_sum(*survivors)


async def test_if_no_checkpoint_can_be_loaded_no_rank_trains(start: Start, half: Path, tmp_path: Path) -> None:
    write_checkpoints(tmp_path, torn=2)
    half.touch()
    trainers = [await start("none", least=2) for _ in range(2)]
    assert [await each.code() for each in trainers] == [1, 1]
    ends = sorted(each.lines[-1].partition("NonRetryableException: ")[2] for each in trainers)
    assert ends[0].startswith("None of the checkpoints can be loaded, the newest (2) because of RuntimeError")
    assert ends[1] == "Rank 0 cannot load any of the checkpoints."
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


async def test_a_full_disk_is_logged_and_training_continues(start: Start, half: Path) -> None:
    half.touch()
    trainer = await start("full")
    await ends_with_the_sum(trainer)
    assert any("The checkpoint was not written, and training continues" in line for line in trainer.lines)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("always", "RuntimeError: The training has failed 100 times without a complete step."),
        ("other", "ValueError: not retryable"),
        (
            "wrong",
            "TypeError: train_step returned 'ab': it must return None, or the state and its WorkerStats or None.",
        ),
    ],
)
async def test_a_failure_that_stays_ends_the_program(start: Start, fault: str, message: str) -> None:
    trainer = await start(fault)
    assert await trainer.code() == 1
    assert trainer.lines[-1] == f"[rank0]: {message}", trainer.output


COLLECTIVES = """
import os
import sys

rank = 0 if (child := os.fork()) else 1  # the parent waits for the child below

import numpy as np
import torch
import torch.distributed as dist

import torchelastic.distributed as edist

if sys.argv[1] == "alone":
    assert edist.all_gather_return_max_long(rank + 7) == (0, rank + 7)
    src = rank
else:
    # A backend that the program registers is known to the coordinator.
    from torchelastic.p2p import CoordinatorP2P

    dist.Backend.register_backend("mine", lambda *args: None, devices=["cpu"])
    CoordinatorP2P("mine", "etcd://localhost:2379/1234?min_workers=1&max_workers=2", 2)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    assert edist.all_gather_return_max_long(rank + 7) == (1, 8)
    src = 1

model = torch.nn.BatchNorm1d(2)
with torch.no_grad():
    model.weight.fill_(rank)
edist.broadcast_model(1, model)
assert model.weight.tolist() == [src, src]
assert edist.broadcast_long(rank + 3, 1) == src + 3
assert edist.broadcast_bool(rank == 1, 1) is (src == 1)
assert edist.broadcast_float_list([rank + 0.5] * 2, 1) == [src + 0.5] * 2
mine = (bytes([rank]), np.array([[rank, 2]], dtype=np.float32), np.zeros(9_000_000 * rank, np.uint8))
for data, wanted in zip(mine, (bytes([src]), np.array([[src, 2]], np.float32), np.zeros(9_000_000 * src, np.uint8))):
    for sent in (data, data if rank == src else None):
        found = edist.broadcast_binary(sent, 1)
        assert type(found) is type(wanted)
        assert np.array_equal(found, wanted)
assert edist.broadcast_binary(b"", 1) == b""
if dist.is_initialized():
    dist.destroy_process_group()  # torch may abort the process at its exit otherwise
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("world", ["alone", "together"])
async def test_collectives_return_the_value_of_a_rank_or_without_a_group_their_own(world: str, tmp_path: Path) -> None:
    (program := tmp_path / "main.py").write_text(COLLECTIVES)
    async with Launcher(program, world, tmp_path / "store") as both:
        assert await both.code() == 0, both.output
