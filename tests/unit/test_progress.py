"""Progress from the program's calls to the node's record; the test process is both worker and agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

import torchelastic
from torchelastic import metrics
from torchelastic.agent.worker_socket import Progress, WorkerSocket
from torchelastic.agent_socket import AGENT, CHANNEL
from torchelastic.metrics.api import REGISTRY
from torchelastic.protocol import Member, RoundRecord
from torchelastic.training import progress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

PATIENCE = 20.0
RECORD = RoundRecord(number=3, members=(Member("a.1", "10.0.0.1", 2), Member("b.1", "10.0.0.2", 2)))


class Node:
    """A node that records the progress reported to it."""

    node = "a.1"

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self._more = asyncio.Event()

    def report(self, round: int, **changes: Any) -> None:
        assert round == RECORD.number
        self.reports.append(changes)
        self._more.set()

    async def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return the first report for which a condition holds."""
        async with asyncio.timeout(PATIENCE):
            while not (self.reports and condition(self.reports[-1])):
                self._more.clear()
                await self._more.wait()
        return self.reports[-1]


class Agent:
    """An agent with only a worker socket and progress."""

    def __init__(self, folder: Path) -> None:
        self.changes = 0
        self.node = Node()
        self.progress = Progress(self.node)
        self.channel = WorkerSocket(folder, stands=self._stands, changed=self._changed, progress=self.progress)
        self.began = 0.0

    def begin(self) -> None:
        self.began = time.time()
        self.channel.expect(RECORD.number)
        self.progress.begin(RECORD)

    def _changed(self) -> None:
        self.changes += 1

    async def _stands(self, round: int, seconds: float) -> bool:
        return True


@pytest.fixture(autouse=True)
def _nothing_called_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reports = progress._Reports()
    monkeypatch.setattr(progress, "_reports", reports)
    yield
    with reports._lock:
        reports._unsent = {}  # sends nothing after the test
    AGENT.close()


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    agent = Agent(tmp_path)
    async with agent.channel as channel:
        for name, value in {**channel.variables, "TORCHELASTIC_ROUND": "3", "LOCAL_RANK": "0", "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        agent.begin()
        yield agent


class Measured(metrics.MetricHandler):
    """A handler that records the measured values."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        assert metric_data.group_name == "torchelastic"
        self.values.append((metric_data.name, metric_data.value))


@pytest.fixture
def measured() -> Iterator[Measured]:
    measured = Measured()
    REGISTRY.attach(measured)
    yield measured
    REGISTRY.detach(measured)


async def test_only_the_first_step_is_reported(agent: Agent) -> None:
    torchelastic.step()
    after = time.time()
    report = await agent.node.until(lambda report: report["first_step_at"])
    assert agent.began - 0.001 <= report["first_step_at"] <= after + 0.001
    assert report["last_checkpoint_at"] == 0
    for _ in range(100):
        torchelastic.step()
    with torchelastic.checkpoint():
        pass
    assert (await agent.node.until(lambda report: report["last_checkpoint_at"]))["first_step_at"] == report[
        "first_step_at"
    ]


async def test_a_checkpoint_is_reported_with_its_start_time(agent: Agent) -> None:
    before = time.time()
    with torchelastic.checkpoint():
        began = time.time()
        await asyncio.sleep(0.05)
    report = await agent.node.until(lambda report: report["last_checkpoint_at"])
    assert before - 0.001 <= report["last_checkpoint_at"] <= began + 0.001
    assert report["first_step_at"] == 0


async def test_a_failed_checkpoint_is_not_reported(agent: Agent, measured: Measured) -> None:
    with pytest.raises(OSError, match="full"), torchelastic.checkpoint():
        raise OSError("the disk is full")
    torchelastic.step()
    assert (await agent.node.until(lambda report: report["first_step_at"]))["last_checkpoint_at"] == 0
    assert measured.values == []


async def test_of_checkpoints_within_a_second_the_first_and_last_are_reported(agent: Agent) -> None:
    writing = [torchelastic.checkpoint() for _ in range(2000)]
    await asyncio.sleep(0.002)  # times have milliseconds, and the last one must differ
    writing.append(torchelastic.checkpoint())
    for each in writing:
        each.done()
    first = await agent.node.until(lambda report: report["last_checkpoint_at"])
    last = await agent.node.until(lambda report: report["last_checkpoint_at"] == round(writing[-1]._began, 3))
    assert first["last_checkpoint_at"] == round(writing[0]._began, 3)
    assert last["first_step_at"] == 0
    assert len(agent.node.reports) == 2


async def test_a_background_checkpoint_is_reported_when_its_future_succeeds(agent: Agent, measured: Measured) -> None:
    failed, cancelled, written = Future[None](), Future[None](), Future[None]()
    for future in (failed, cancelled, written):
        future.add_done_callback(torchelastic.checkpoint().done)
    failed.set_exception(OSError("the disk is full"))
    assert cancelled.cancel()
    assert measured.values == []
    written.set_result(None)
    await agent.node.until(lambda report: report["last_checkpoint_at"])
    assert [name for name, _ in measured.values] == ["checkpoint.write_latency_ms"]


def test_step_and_checkpoint_durations_are_measured(measured: Measured) -> None:
    for _ in range(3):
        torchelastic.step()
        time.sleep(0.002)
    with torchelastic.checkpoint() as writing:
        time.sleep(0.002)
        writing.done()
        writing.done()
    assert [name for name, _ in measured.values] == [*["train_step.duration.ms"] * 2, "checkpoint.write_latency_ms"]
    assert all(value > 1.5 for _, value in measured.values)


async def test_other_ranks_only_measure(agent: Agent, monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    monkeypatch.setenv("RANK", "1")
    torchelastic.step()
    torchelastic.step()
    torchelastic.checkpoint().done()
    assert len(measured.values) == 2
    monkeypatch.setenv("RANK", "0")
    torchelastic.checkpoint().done()
    assert (await agent.node.until(lambda report: report["last_checkpoint_at"]))["first_step_at"] == 0


async def test_unsent_progress_is_sent_later(agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = os.environ[CHANNEL]
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    monkeypatch.setenv(CHANNEL, str(tmp_path / "away"))
    torchelastic.step()
    writing = torchelastic.checkpoint()
    writing.done()
    monkeypatch.setenv(CHANNEL, path)
    report = await agent.node.until(lambda report: report["first_step_at"])
    assert report["last_checkpoint_at"] == round(writing._began, 3)


async def test_a_worker_reconnects_to_its_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    torchelastic.step()
    report = await agent.node.until(lambda report: report["first_step_at"])
    agent.channel.forget(0)
    async with asyncio.timeout(PATIENCE):
        while agent.node.reports[-1]["last_checkpoint_at"] == 0:
            with torchelastic.checkpoint():
                await asyncio.sleep(0.05)
    assert agent.node.reports[-1]["first_step_at"] == report["first_step_at"]


async def test_an_agent_that_reads_nothing_does_not_block_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "channel"))
        listener.listen(1)
        for name, value in {CHANNEL: str(tmp_path / "channel"), "TORCHELASTIC_ROUND": "1", "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        for _ in range(20_000):
            with torchelastic.checkpoint():
                torchelastic.step()
        assert time.monotonic() - began < PATIENCE
        assert not AGENT.send({"kept": 1.0})  # the socket's buffer is full


async def test_impossible_reports_are_ignored(agent: Agent) -> None:
    update, now = agent.progress.update, time.time()
    update(1, stepped=now, kept=now)  # not the worker of rank 0
    update(0, stepped=agent.began - 10, kept=agent.began - 10)
    assert (agent.progress.stepped, agent.progress.kept) == (0, 0)
    update(0, stepped=now + 1e6, kept=now + 1e6)
    assert now <= agent.progress.stepped <= time.time()
    assert now <= agent.progress.kept <= time.time()
    first, kept = agent.progress.stepped, agent.progress.kept
    update(0, stepped=now + 1e6, kept=now - 0.001)
    assert (agent.progress.stepped, agent.progress.kept) == (first, kept)


async def test_only_the_node_with_rank_0_reports(agent: Agent) -> None:
    agent.node.node = "b.1"
    agent.begin()
    agent.progress.update(0, stepped=time.time(), kept=time.time())
    assert agent.node.reports == []
    agent.progress.begin(RoundRecord(number=3, members=(Member("a.1", "10.0.0.1", 0), Member("b.1", "10.0.0.2", 1))))
    agent.progress.update(0, stepped=time.time())
    assert len(agent.node.reports) == 1


async def test_the_node_reports_once_a_second_or_on_request(agent: Agent) -> None:
    for _ in range(1000):
        agent.progress.update(0, kept=time.time())
    assert len(agent.node.reports) == 1
    agent.progress.report()
    agent.progress.report()
    assert [report["last_checkpoint_at"] for report in agent.node.reports][1:] == [round(agent.progress.kept, 3)]
    agent.progress.update(0, kept=time.time() + 1)
    agent.progress.update(0, stepped=time.time())
    assert len(agent.node.reports) == 2
    await agent.node.until(lambda report: report["first_step_at"])
    assert len(agent.node.reports) == 3


async def test_progress_ends_with_its_round(agent: Agent) -> None:
    for _ in range(2):
        agent.progress.update(0, stepped=time.time(), kept=time.time())
    agent.begin()
    agent.progress.report()
    assert (agent.progress.stepped, agent.progress.kept) == (0, 0)
    assert len(agent.node.reports) == 1
