"""Programs with ``@torchelastic.elastic``: processes that continue when the world changes, and exact results."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import uuid
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import ANY

import pytest
import pytest_asyncio

from testbed.availability import EXHAUSTIVE
from tests.support.agents import AgentProcess, WithoutSettings, until_gone
from tests.support.seeds import SEED_VARIABLE, seeds
from tests.support.workers import poll_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

PROGRAM = '''
"""Trains for 60 steps; after 30 steps, or the numbers of steps in the arguments, the ranks wait for a file of the test.

The world can change until the file exists. While it contains "hold", it cannot. If it contains the id of a process and
a point in the step, the process kills itself there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

folder, fault, *pauses = sys.argv[1:]
torch.set_num_threads(1)
features = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(features, features.sum(dim=1, keepdim=True), torch.arange(100))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
if "RANK" not in os.environ or os.environ["RANK"] == "0":  # the other ranks take the parameters of rank 0
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = torchelastic.ElasticSampler(dataset, batch_size=7)
state = torchelastic.TorchState(
    model=model,
    optimizer=optimizer,
    scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9),
    data=DataLoader(dataset, batch_sampler=sampler),
    seen=0,
    uses=torch.zeros(4, 100),  # of each sample in each epoch
    curve=[],
    checkpointer=torchelastic.Checkpointer(f"{folder}/checkpoints", every=10) if "checkpoints" in fault else None,
)
waiting = torchelastic.TorchState()
print(f"ready in {os.getpid()}")


def once(name):
    try:
        return open(f"{folder}/{name}", "x").close() is None
    except FileExistsError:
        return False


def order():
    """Return what the test has written for the current step; None if it has written nothing."""
    file = Path(f"{folder}/after {state.commits}")
    return file.read_text() if f"{state.commits}" in (pauses or ["30"]) and file.exists() else None


def die_if_ordered(point):
    if order() == f"{os.getpid()} {point}":
        os.kill(os.getpid(), signal.SIGKILL)


def form_world(*args, form=dist.init_process_group, **kwargs):
    if "forms" in fault and state.commits == 17 and kwargs["rank"] == 0 and once("killed while the next world forms"):
        os.kill(os.getpid(), signal.SIGKILL)
    return form(*args, **kwargs)


dist.init_process_group = form_world


@torchelastic.elastic
def train(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    os.write(1, f"world of {size}, rank {rank}, commits {state.commits}, pid {os.getpid()}\\n".encode())
    parallel = DistributedDataParallel(state.model)
    while state.commits < 60:
        for inputs, targets, samples in state.data:
            told = torch.ones(1)
            if f"{state.commits}" in (pauses or ["30"]):
                print(f"waits after {state.commits} steps in a world of {size}, pid {os.getpid()}")
                told[0] = 0
            while not told.item():
                told[0] = order() is not None
                dist.all_reduce(told, op=dist.ReduceOp.MIN)
                waiting.commit()  # changes of the world take effect here
                time.sleep(0.005)
            while order() == "hold":
                time.sleep(0.005)
            die_if_ordered("before the reduction")
            if fault == "wrong" and state.commits == 5:
                torch.zeros(2) + torch.zeros(3)
            dies = state.commits == 17 and rank == size - 1
            if dies and "before" in fault and once("killed"):
                os.kill(os.getpid(), signal.SIGSTOP if "stopped" in fault else signal.SIGKILL)
            losses = (parallel(inputs) - targets).square()
            state.optimizer.zero_grad()
            loss = sampler.mean(losses)
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            uses = torch.zeros(4, 100)
            uses[sampler.epoch, samples] = (sampler.mean(torch.ones(len(samples))) > 0).float()
            dist.all_reduce(uses)
            loss.backward()
            die_if_ordered("after the reduction")
            if dies and "after" in fault and once("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.step()
            state.scheduler.step()
            die_if_ordered("after the optimizer's step")
            state.seen += 7
            state.uses = state.uses + uses
            state.curve = [*state.curve, mean.item()]
            state.commit()
            if state.commits == 60:
                break


if "first world" in fault and os.environ["RANK"] == "0" and once("killed"):
    os.kill(os.getpid(), signal.SIGKILL)
train(state)
parameters = [number for each in model.parameters() for number in each.flatten().tolist()]
rate = optimizer.param_groups[0]["lr"]
uses = [state.uses.min().item(), state.uses.max().item()]
result = [state.commits, state.seen, sampler.epoch, sampler.position, rate, *uses, *state.curve, *parameters]
os.write(1, f"end {json.dumps(result)}\\n".encode())
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (path := tmp_path / "program.py").write_text(PROGRAM)
    return path


async def result_of(process: AgentProcess) -> list[float]:
    """Return what the first process of a program has printed at its end."""
    assert await process.code() == 0, process.output
    found = [json.loads(line.partition("end ")[2]) for line in process.lines if "end [" in line]
    assert found, process.output
    for each in found:
        assert each == pytest.approx(found[0], rel=1e-4, abs=1e-6), "the ranks have different parameters"
    return list(found[0])


async def workers_that_print(pattern: str, agent: AgentProcess, number: int, since: int = 0) -> set[str]:
    """Wait until this number of an agent's workers have printed a line with their process id; return the ids."""
    found: set[str] = set()
    while len(found) < number:
        match = await agent.wait_for_line(pattern, since=since)
        since = agent.lines.index(match.string, since) + 1
        found.add(match[1])
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The result of the program without a launcher, in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "after 30").touch()
    (program := folder / "program.py").write_text(PROGRAM)

    class Alone(AgentProcess):
        program = ()

    async with Alone(program, folder, "none") as process:
        return await result_of(process)


async def test_the_processes_that_are_left_continue_at_the_same_step_with_the_same_result(
    etcd: EtcdServer, program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    run = ("--nnodes=1:3", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--nproc-per-node=2", "--rdzv-conf=last_call_timeout=0,lease=1", program, tmp_path, "none")
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> AgentProcess:
            return await stack.enter_async_context(AgentProcess(*arguments))

        async def pids(agent: AgentProcess, size: int, since: int = 0) -> set[str]:
            """Wait until both workers of an agent are in a world of this size after 30 steps; return their ids."""
            pattern = rf"world of {size}, rank \d, commits 30, pid (\d+)"
            return await workers_that_print(pattern, agent, 2, since)

        first = await start()
        await first.wait_for_line(r"commits 0")
        second = await start()
        before, others = await pids(first, 4), await pids(second, 4)
        mark, here = len(second.lines), len(first.lines)
        os.kill(int(min(others)), signal.SIGKILL)
        assert await pids(first, 4, here) == before
        assert max(others) in await pids(second, 4, mark)
        here = len(first.lines)
        third = await start()
        await pids(third, 6)
        assert await pids(first, 6, here) == before
        here = len(first.lines)
        third.kill()
        assert await pids(first, 4, here) == before
        here = len(first.lines)
        second.kill(signal.SIGTERM)
        assert await pids(first, 2, here) == before
        (tmp_path / "after 30").touch()
        assert await result_of(first) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)


ENDED_ITSELF = "A collective did not end after its world was broken"
"""What a process says that ends itself: rarely, gloo does not end a collective of a rank that was killed."""

POINTS = ("before the reduction", "after the reduction", "after the optimizer's step")
"""The points in a step at which the program can kill one of its processes."""


class Event(NamedTuple):
    """What happens to an agent when all ranks have made a number of steps; agents are numbered as they start."""

    after: int
    agent: int
    what: str
    worker: int = 0

    def __str__(self) -> str:
        worker = f"worker {self.worker} " if self.what in POINTS else ""
        return f"after {self.after} steps: agent {self.agent}: {worker}{self.what}"


class Schedule(NamedTuple):
    """The agents of a run and what happens to them: never do all ranks end, and never are there more than 3 agents.

    Attributes:
        workers: the number of workers of each agent, in the order in which the agents start.
        begin: how many agents there are at the beginning.
        events: what happens.
        last: the number of steps after which the ranks wait for the last time, so that each event has its effect.
    """

    workers: list[int]
    begin: int
    events: list[Event]
    last: int

    def __str__(self) -> str:
        begin = f"agents 0 to {self.begin - 1} begin; the numbers of workers of all agents: {self.workers}"
        return "\n".join([begin, *map(str, self.events), f"after {self.last} steps: all ranks have met"])


def schedule(seed: int) -> Schedule:
    """Return 6 to 8 events that depend only on the seed."""
    source = random.Random(seed)
    workers = [source.randint(1, 2) for _ in range(3)]
    present = [*range(source.randint(1, 3))]
    begin, events = len(present), []
    del workers[begin:]
    *steps, last = sorted(source.sample(range(1, 60), source.randint(7, 9)))
    for step in steps:
        kinds = ["joins"] * (len(present) < 3) + ["leaves", "is killed"] * (len(present) > 1)
        kinds += [source.choice(POINTS)] * (sum(workers[agent] for agent in present) > 1)
        if (what := source.choice(kinds)) == "joins":
            present.append(len(workers))
            workers.append(source.randint(1, 2))
            events.append(Event(step, present[-1], what))
            continue
        agent = source.choice(present)
        events.append(Event(step, agent, what, source.randrange(workers[agent])))
        if what not in POINTS:
            present.remove(agent)
    return Schedule(workers, begin, events, last)


class ScheduledRun:
    """The agents of a schedule, and the program's files.

    Args:
        plan: the schedule.
        arguments: the arguments of all agents.
        folder: the folder of the program.
        stack: ends the agents.

    Attributes:
        agents: the agents, in the order of their start.
        present: the numbers of those that were not told to leave, and not killed.
    """

    def __init__(
        self, plan: Schedule, arguments: Sequence[str | Path], folder: Path, stack: contextlib.AsyncExitStack
    ) -> None:
        self._plan, self._arguments, self._folder, self._stack = plan, arguments, folder, stack
        self.agents: list[AgentProcess] = []
        self.present: list[int] = []

    async def play(self) -> None:
        """Let each event happen when all ranks wait for it, and let them train on; then to the end."""
        for _ in range(self._plan.begin):
            await self._start()
        for event in self._plan.events:
            processes = await self._all_ranks(event.after)
            if event.what == "joins":
                self._tell(event.after, "hold")  # so that the change takes effect within a later step
                await self._start()
                await self._workers(event.agent, r"ready in (\d+)")
            elif event.what not in POINTS:
                self.agents[event.agent].kill(signal.SIGTERM if event.what == "leaves" else signal.SIGKILL)
                self.present.remove(event.agent)
            dies = f"{processes[event.agent][event.worker]} {event.what}" if event.what in POINTS else ""
            self._tell(event.after, dies)
        await self._all_ranks(self._plan.last)
        self._tell(self._plan.last, "")

    async def _start(self) -> None:
        number = len(self.agents)
        agent = AgentProcess(f"--nproc-per-node={self._plan.workers[number]}", *self._arguments)
        self.agents.append(await self._stack.enter_async_context(agent))
        self.present.append(number)

    async def _workers(self, number: int, pattern: str) -> list[str]:
        """Wait until all workers of an agent have printed a line with their id; return the ids."""
        return sorted(await workers_that_print(pattern, self.agents[number], self._plan.workers[number]))

    async def _all_ranks(self, step: int) -> dict[int, list[str]]:
        """Wait until all ranks wait in one world after a number of steps; return each agent's process ids."""
        size = sum(self._plan.workers[number] for number in self.present)
        pattern = rf"waits after {step} steps in a world of {size}, pid (\d+)"
        return {number: await self._workers(number, pattern) for number in self.present}

    def _tell(self, step: int, order: str) -> None:
        """Write an order for the ranks that wait after a number of steps."""
        (partial := self._folder / "partial").write_text(order)
        partial.rename(self._folder / f"after {step}")


@pytest.mark.parametrize("seed", seeds(usual=1, exhaustive=10))
async def test_a_random_schedule_of_faults_and_changes_does_not_change_the_result(
    seed: int, etcd: EtcdServer, program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    steps, samples, epochs, position, rate, fewest_uses, most_uses = undisturbed[:7]
    assert (steps, samples, epochs, position, fewest_uses, most_uses) == (60, 60 * 7, 4, 0, 1, 1)
    assert rate == pytest.approx(0.01 * 0.9**6)
    plan = schedule(seed)
    run = ("--nnodes=1:3", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    conf = "--rdzv-conf=last_call_timeout=0,lease=1,crash_loop_limit=100"
    pauses = [f"{step}" for step in (*(event.after for event in plan.events), plan.last)]
    async with contextlib.AsyncExitStack() as stack:
        play = ScheduledRun(plan, (*run, conf, program, tmp_path, "none", *pauses), tmp_path, stack)
        try:
            await play.play()
            for number in play.present:
                # Gradients are sums over the ranks, whose number determines the order: the last digits differ.
                assert await result_of(play.agents[number]) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)
            for agent in play.agents:
                await agent.code()
            if not any(ENDED_ITSELF in agent.output for agent in play.agents):
                for agent in play.agents:
                    begun = [int(commits) for commits in re.findall(r"commits (\d+), pid", agent.output)]
                    assert begun == sorted(begun), "steps were lost"
        except Exception as error:
            outputs = (f"agent {number}:\n{agent.output}" for number, agent in enumerate(play.agents))
            error.add_note("\n".join([f"{SEED_VARIABLE}={seed} repeats this schedule:", f"{plan}", *outputs]))
            raise


@pytest.mark.parametrize(
    ("launcher", "fault", "again"),
    [
        ("torchelastic", "killed before the reduction", 17),
        ("torchelastic", "killed after the reduction", 18),
        ("torchelastic", "killed before the reduction, with checkpoints", 17),
        ("torchelastic", "stopped before the reduction", 17),
        ("torchrun", "killed before the reduction, with checkpoints", 10),
    ],
)
async def test_a_worker_that_is_killed_costs_at_most_the_step_under_way(
    launcher: str, fault: str, again: int, program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    (tmp_path / "after 30").touch()
    flags = ("--heartbeat-timeout=5",) if "stopped" in fault else ()
    ranks = 4 if launcher == "torchelastic" else 2  # torchrun starts a new interpreter for each
    arguments = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3", *flags, program, tmp_path, fault)
    process = (
        AgentProcess(*arguments)
        if launcher == "torchelastic"
        else WithoutSettings(
            "torch.distributed.run",
            *("--monitor-interval=0.1", *arguments),
            within=("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),  # else, a restart finds keys of its predecessors
        )
    )
    async with process:
        assert await result_of(process) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)
    worlds = [re.findall(r"world of (\d), rank (\d), commits (\d+), pid (\d+)", line) for line in process.lines]
    found = [(int(size), int(rank), int(commits), pid) for size, rank, commits, pid in itertools.chain(*worlds)]
    # The ranks that are left train on, until the successor joins them; under torchrun, all ranks start again.
    size = ranks - 1 if launcher == "torchelastic" else ranks
    assert sorted(found)[:size] == [(size, rank, again, ANY) for rank in range(size)] or size == ranks, process.output
    (last,) = {commits for _, _, commits, _ in found[-ranks:]}
    assert {*range(ranks)} == {rank for size, rank, _, _ in found[-ranks:] if size == ranks}, process.output
    assert last >= again if launcher == "torchelastic" else last == again, process.output
    processes = len({pid for *_, pid in found})
    assert processes == (5 if launcher == "torchelastic" else 2 * ranks) or ENDED_ITSELF in process.output


@pytest.mark.parametrize(
    "fault",
    ["killed before the reduction, and while the next world forms", "killed before its first world"],
)
async def test_faults_before_a_world_is_complete_change_no_result(
    fault: str, program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    (tmp_path / "after 30").touch()
    arguments = ("--standalone", "--nproc-per-node=4", "--max-restarts=3", program, tmp_path, fault)
    async with AgentProcess(*arguments) as agent:
        assert await result_of(agent) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)
    assert agent.output.count("killed by SIGKILL") >= (2 if "forms" in fault else 1)


async def test_the_state_outlives_a_time_with_too_few_nodes(
    etcd: EtcdServer, program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    run = ("--nnodes=2", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--rdzv-conf=last_call_timeout=0,lease=1", program, tmp_path, "none")
    async with AgentProcess(*arguments) as first:
        async with AgentProcess(*arguments) as second:
            before = await first.wait_for_line(r"world of 2, rank \d, commits (\d+), pid (\d+)")
            await first.wait_for_line(r"waits after 30")
            second.kill()
        await first.wait_for_line(r"1 node .* of at least 2 is present")
        async with AgentProcess(*arguments) as third:
            after = await first.wait_for_line(r"world of 2, rank \d, commits 30, pid (\d+)")
            assert after[1] == before[2]
            (tmp_path / "after 30").touch()
            assert await result_of(third) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)


async def test_a_spare_node_that_stands_by_takes_the_place_of_a_lost_one_with_its_process(
    etcd: EtcdServer, program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    run = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--rdzv-conf=last_call_timeout=0,lease=1", "--warm-spare", program, tmp_path, "none")
    async with AgentProcess(*arguments) as first:
        await first.wait_for_line(r"commits 0")
        async with contextlib.AsyncExitStack() as stack:
            second = await stack.enter_async_context(AgentProcess(*arguments))
            await first.wait_for_line(r"world of 2, rank \d, commits 30")
            spare = await stack.enter_async_context(AgentProcess(*arguments))
            pid = (await spare.wait_for_line(r"ready in (\d+)"))[1]
            await spare.wait_for_line(r"round 2: standing by")
            mark = len(second.lines)
            worker = await second.wait_for_line(r"world of 2, rank 1, commits 30, pid (\d+)")
            os.kill(int(worker[1]), signal.SIGKILL)  # the spare is not needed in the next round
            await second.wait_for_line(r"world of 2, rank 1, commits 30", since=mark)
            second.kill()
            taken = await spare.wait_for_line(r"world of 2, rank (\d), commits 30, pid (\d+)")
            assert taken[2] == pid
            (tmp_path / "after 30").touch()
            assert await result_of(spare) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)
            assert "round 4: started no rank of a world of 2; rank 1 stays" in spare.output


STEPS = """
import os
import sys
import time

import torch
import torch.distributed as dist

import torchelastic

torch.set_num_threads(1)
folder = sys.argv[1]


@torchelastic.elastic
def train(state):
    while True:
        os.write(1, f"begins step {state.commits + 1} of {dist.get_world_size()}\\n".encode())
        time.sleep(0.1)
        end = torch.tensor(float(os.path.exists(f"{folder}/end")))
        dist.all_reduce(end, dist.ReduceOp.MAX)
        if end.item():
            return
        time.sleep(0.1 * dist.get_rank())  # a change becomes known to some ranks before this commit, to others after it
        state.commit()


saves = torchelastic.Checkpointer(f"{folder}/checkpoints", every=10**6) if "saves" in sys.argv else None
train(torchelastic.TorchState(checkpointer=saves))
"""


def steps(agent: AgentProcess) -> dict[str, list[int]]:
    """Return the steps that each rank of an agent has begun, in their order."""
    found: dict[str, list[int]] = {}
    for line in agent.lines:
        if match := re.search(r"(\[rank \d\]) begins step (\d+)", line):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


async def test_no_step_is_repeated_when_nodes_join_and_leave(etcd: EtcdServer, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(STEPS)
    run = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--nproc-per-node=2", "--rdzv-conf=last_call_timeout=0.1", program, tmp_path)
    async with AgentProcess(*arguments) as first:
        await first.wait_for_line("begins step 3 of 2")
        for _ in range(2):
            async with AgentProcess(*arguments) as second:
                here = len(first.lines)
                await first.wait_for_line(r"begins step \d+ of 4", since=here)
                second.kill(signal.SIGTERM)
                await second.code()
        (tmp_path / "end").touch()
        assert await first.code() == 0, first.output
    assert all(found == [*range(1, len(found) + 1)] for found in steps(first).values()), first.output


async def test_an_agent_that_gets_sigterm_saves_the_last_step_first(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(STEPS)
    arguments = ("--standalone", "--nproc-per-node=4", program, tmp_path, "saves")
    last = -1
    for preemption in range(100 if EXHAUSTIVE else 1):
        async with AgentProcess(*arguments) as agent:
            begun = int((await agent.wait_for_line(r"begins step (\d+) of 4"))[1])
            # A rank may begin a step while it is stopped.
            assert last == -1 or last - 1 <= begun <= last + 1, f"preemption {preemption}: {agent.output}"
            await agent.wait_for_line(f"begins step {begun + 2} of 4")
            agent.kill(signal.SIGTERM)
            await agent.code()
        last = max(found[-1] for found in steps(agent).values())
    (tmp_path / "end").touch()
    async with AgentProcess(*arguments) as again:
        assert await again.code() == 0, again.output
    ((begun,),) = {tuple(found) for found in steps(again).values()}
    assert last - 1 <= begun <= last + 1, f"{agent.output}\n{again.output}"


STARTS_SLOWLY = """
import os
import sys
import time

import torch
import torch.distributed as dist

import torchelastic

torch.set_num_threads(1)
folder = sys.argv[1]
if os.path.exists(f"{folder}/slow"):
    print("starts slowly in", os.getpid())
while os.path.exists(f"{folder}/slow"):
    time.sleep(0.01)


@torchelastic.elastic
def train(state):
    os.write(1, f"process {os.getpid()} in a world of {dist.get_world_size()}\\n".encode())
    while True:
        end = torch.tensor(float(os.path.exists(f"{folder}/end")))
        dist.all_reduce(end, dist.ReduceOp.MAX)
        if end.item():
            return
        time.sleep(0.01)
        state.commit()


train(torchelastic.TorchState(step=0))
"""


async def test_a_worker_that_still_starts_ends_when_another_one_gets_its_rank(etcd: EtcdServer, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(STARTS_SLOWLY)
    run = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--max-restarts=3", "--rdzv-conf=lease=1", program, tmp_path)
    async with AgentProcess("--nproc-per-node=1", *arguments) as first:
        await first.wait_for_line("in a world of 1")
        async with AgentProcess("--nproc-per-node=2", *arguments) as second:
            worlds = [await second.wait_for_line(rf"rank {rank}\] process (\d+) in a world of 3") for rank in (1, 2)]
            (tmp_path / "slow").touch()
            os.kill(int(worlds[0][1]), signal.SIGKILL)
            starting = await second.wait_for_line(r"starts slowly in (\d+)")
            here = len(second.lines)
            first.kill()
            await until_gone(int(starting[1]))
            (tmp_path / "slow").unlink()
            await second.wait_for_line(rf"process {worlds[1][1]} in a world of 2", since=here)
            (tmp_path / "end").touch()
            assert await second.code() == 0, second.output


COPIES = """
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchelastic

torch.set_num_threads(1)


def report_copy():
    folder = Path(os.environ["TORCHELASTIC_WORKER_SOCKET"]).with_name("memory").resolve() / "checkpoints"
    while not (found := [*folder.glob("checkpoint-*.json")]):
        time.sleep(0.01)
    print("has a copy of step", int(found[0].name.split("-")[2]))


@torchelastic.elastic
def train(state):
    os.write(1, f"{state.weight.tolist()} in a world of {dist.get_world_size()}\\n".encode())
    while True:
        mean = torch.tensor([1.0, 1.0, os.path.exists(sys.argv[1])])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if mean[2] > 0:  # all ranks end after the same step
            return
        state.weight += mean[:2]
        state.commit()
        time.sleep(0.01)


threading.Thread(target=report_copy, daemon=True).start()
train(torchelastic.TorchState(weight=torch.zeros(2), checkpointer=torchelastic.Checkpointer(memory_every=1)))
"""


async def test_a_spare_node_has_a_copy_of_the_state_and_goes_on_when_no_other_node_is_left(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    (program := tmp_path / "program.py").write_text(COPIES)
    run = ("--nnodes=1", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--nproc-per-node=2", "--rdzv-conf=lease=1", "--warm-spare", program, tmp_path / "end")
    async with contextlib.AsyncExitStack() as stack:
        member = await stack.enter_async_context(AgentProcess(*arguments))
        await member.wait_for_line(r"\[0\.0, 0\.0\] in a world of 2")
        spare = await stack.enter_async_context(AgentProcess(*arguments))
        first = await spare.wait_for_line(r"has a copy of step (\d+)")
        member.kill()
        begun = await spare.wait_for_line(r"\[(\d+)\.0, (\d+)\.0\] in a world of 2")
        assert begun[1] == begun[2]
        assert int(begun[1]) >= int(first[1]) > 0
        (tmp_path / "end").touch()
        assert await spare.code() == 0, spare.output


async def test_a_worker_that_is_stuck_is_replaced_although_the_world_keeps_changing(
    program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    flags = ("--max-restarts=1000", "--rdzv-conf=crash_loop_limit=1000", "--rejoin-timeout=3")
    async with AgentProcess("--standalone", "--nproc-per-node=3", *flags, program, tmp_path, "none") as agent:
        stuck = await agent.wait_for_line(r"world of 3, rank 0, commits \d+, pid (\d+)")
        killed = await agent.wait_for_line(r"world of 3, rank 2, commits \d+, pid (\d+)", since=0)
        os.kill(int(stuck[1]), signal.SIGSTOP)
        for _ in range(200):
            mark = len(agent.lines)
            os.kill(int(killed[1]), signal.SIGKILL)
            killed = await agent.wait_for_line(r"ready in (\d+)|process (\d+), is killed: it did not", since=mark)
            if killed[2]:
                break
        assert killed[2] == stuck[1]
        (tmp_path / "after 30").touch()
        assert await result_of(agent) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)


STUCK = '''
"""Rank 0 ends so that gloo's collective on the other ranks is stuck: it resets their connections before they read."""

import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchelastic

folder = Path(sys.argv[1])
torch.set_num_threads(1)


def wait_for_collective():
    """Wait until a thread of gloo waits for data: it is in the same call of futex(2) for a while."""
    seen, last = 0, None
    while seen < 10:
        tasks = [path for path in Path("/proc/self/task").iterdir() if "gloo" in (path / "comm").read_text()]
        calls = [(path / "syscall").read_text().split() for path in tasks]
        found = next((call for call in calls if len(call) > 4 and int(call[4], 16)), None)
        seen = seen + 1 if found is not None and found == last else 0
        last = found
        time.sleep(0.01)


def announce(rank):
    wait_for_collective()
    (partial := folder / f"partial {rank}").write_text(f"{os.getpid()}")
    partial.rename(folder / f"waits {rank}")


def stop(rank):
    while not (file := folder / f"waits {rank}").exists():
        time.sleep(0.01)
    os.kill(pid := int(file.read_text()), signal.SIGSTOP)
    while not all(" T " in (task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.01)


def end(size):
    for path in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # not a socket
    (folder / "waits 0").touch()
    for rank in range(1, size):
        stop(rank)
    dist.all_reduce(torch.ones(1), async_op=True)
    wait_for_collective()
    os.kill(os.getpid(), signal.SIGKILL)


@torchelastic.elastic
def train(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    os.write(1, f"world of {size}, commits {state.commits}, weight {state.weight.item()}\\n".encode())
    while state.commits < 60:
        one = torch.ones(1)
        checkpointer.wait()  # so that there is a copy of each step
        is_whole = size == int(os.environ["LOCAL_WORLD_SIZE"])
        if state.commits == 10 and is_whole and not (folder / f"waits {rank}").exists():
            end(size) if rank == 0 else threading.Thread(target=announce, args=[rank], daemon=True).start()
        dist.all_reduce(one, op=dist.ReduceOp.AVG)
        state.weight += one
        state.commit()


checkpointer = torchelastic.Checkpointer(memory_every=1)
train(torchelastic.TorchState(weight=torch.zeros(1), checkpointer=checkpointer))
'''


@pytest.mark.parametrize("size", [2, 4])
async def test_a_collective_that_gloo_does_not_end_costs_the_process_and_not_the_training(
    size: int, tmp_path: Path
) -> None:
    (program := tmp_path / "program.py").write_text(STUCK)
    arguments = ("--standalone", f"--nproc-per-node={size}", "--rejoin-timeout=600", program, tmp_path)
    async with AgentProcess(*arguments) as agent:
        await agent.wait_for_line(r"killed by SIGKILL")
        stopped = [int(path.read_text()) for path in tmp_path.glob("waits [1-9]")]
        assert len(stopped) == size - 1
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert await agent.code() == 0, agent.output
    assert "so this process has ended itself" in agent.output
    worlds = re.findall(r"world of (\d), commits (\d+), weight ([\d.]+)", agent.output)
    assert {(size, commits) for size, commits, _ in worlds[:size]} == {(f"{size}", "0")}, agent.output
    assert all(commits == weight.removesuffix(".0") and int(commits) >= 10 for _, commits, weight in worlds[size:])
    assert worlds[-1][0] == f"{size}", agent.output


async def test_ranks_that_begin_at_different_steps_are_a_warning(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(
        "import os\nimport torchelastic\n"
        "for step in range(int(os.environ['RANK']) * 20, 60):\n    torchelastic.step(step)\n"
    )
    async with AgentProcess("--standalone", "--nproc-per-node=3", program) as agent:
        assert await agent.code() == 0
    assert "round 1: the ranks began at different steps, from 0 to 40, so they do not train the same" in agent.output


async def test_an_error_of_the_program_is_raised_at_once(program: Path, tmp_path: Path) -> None:
    async with AgentProcess(
        "--standalone", "--max-restarts=0", "--nproc-per-node=2", program, tmp_path, "wrong"
    ) as agent:
        assert await agent.code() == 1
    assert "RuntimeError: The size of tensor a (2) must match the size of tensor b (3)" in agent.output


async def test_ranks_with_and_without_elastic_are_refused_in_one_job(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(
        "import os\nimport torchelastic\nimport torch.distributed as dist\n"
        "train = dist.init_process_group\n"
        "if os.environ['RANK'] != '1':\n"
        "    train = torchelastic.elastic(lambda state: None)\n"
        "train(torchelastic.TorchState() if os.environ['RANK'] != '1' else 'gloo')\n"
    )
    async with AgentProcess("--standalone", "--nproc-per-node=2", program) as agent:
        assert await agent.code() != 0
    assert (
        "Rank 1 has called init_process_group(), and this rank uses @torchelastic.elastic. All ranks of a job must do "
        "the same." in agent.output
    )
    assert "round 2" not in agent.output


async def test_a_program_continues_from_its_checkpoint_in_a_world_of_another_size(
    program: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    flags = ("--standalone", program, tmp_path, "checkpoints")
    async with AgentProcess("--nproc-per-node=2", *flags) as agent:
        await poll_until(lambda: any((tmp_path / "checkpoints").glob("checkpoint-*.json")))
        agent.kill()
    (tmp_path / "after 30").touch()
    async with AgentProcess("--nproc-per-node=3", *flags) as agent:
        assert await result_of(agent) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)
    [*began] = {line.partition("commits ")[2].partition(",")[0] for line in agent.lines if "commits" in line}
    assert len(began) == 1
    assert began != ["0"]
