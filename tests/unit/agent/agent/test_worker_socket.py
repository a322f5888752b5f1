"""The socket between an agent and its workers, for notices and progress; the test process is both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

import torchelastic
from torchelastic.agent.worker_socket import WorkerSocket
from torchelastic.protocol.records import Member, NoticeRecord, RoundReason, RoundRecord
from torchelastic.protocol.worker import HEARTBEAT_FILE, LINE_LIMIT, WORKER_SOCKET, WorkerMessage
from torchelastic.training import notices, progress
from torchelastic.training.connection import AGENT_CONNECTION
from torchelastic.training.notices import Notice, Notices

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

TIMEOUT = 20.0
ROUND = 3
LIMIT = 60.0
RECORD = RoundRecord(number=ROUND, members=(Member("a.1", "10.0.0.1", 2), Member("b.1", "10.0.0.2", 2)))
NEXT = RoundRecord(number=ROUND + 1, members=RECORD.members)


class Node:
    """A node that keeps the last reported values."""

    def __init__(self) -> None:
        self.node = "a.1"
        self.current = True
        self.asked: list[tuple[int, float]] = []
        self.reported: dict[str, Any] = {}
        self.progress: list[tuple[float, float]] = []
        self._more = asyncio.Event()

    def report(self, round: int, **changes: Any) -> None:
        assert round in {ROUND, ROUND + 1}
        self.reported.update(changes)
        if "first_step_at" in changes:
            self.progress.append((changes["first_step_at"], changes["last_checkpoint_at"]))
        self._more.set()

    async def is_current(self, round: int, *, timeout: float) -> bool:  # noqa: ASYNC109 - the signature of a node
        self.asked.append((round, timeout))
        return self.current

    async def until(self, **wanted: Any) -> None:
        """Wait until these values are reported; a function in place of a value is a condition on that value."""
        async with asyncio.timeout(TIMEOUT):
            while not all(
                name in self.reported
                and (value(self.reported[name]) if callable(value) else self.reported[name] == value)
                for name, value in wanted.items()
            ):
                self._more.clear()
                await self._more.wait()


class Agent(WorkerSocket):
    """An agent that has only the socket."""

    def __init__(self, folder: Path) -> None:
        self.node = Node()
        super().__init__(
            folder,
            self.node,  # type: ignore[arg-type]
            limit=LIMIT,
            changed=lambda: self.report(),
            imported=lambda module, changed: self.node.report(ROUND, imported=(module, changed)),
            stepped=lambda rank: self.node.report(ROUND, stepped=rank),
        )

    def give(self, number: int = 1, *, seconds: float = 10.0, cause: str = "b joined") -> None:
        """Pass a notice from the leader to the workers."""
        self.take_notice(NoticeRecord(ROUND, number, seconds, RoundReason.NODE_JOINED, cause))


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    async with Agent(tmp_path) as agent:
        ours = {WORKER_SOCKET: agent.path, "TORCHELASTIC_ROUND": str(ROUND), "RANK": "0"}
        for name, value in ours.items():
            monkeypatch.setenv(name, value)
        agent.begin(RECORD, {})
        yield agent
        AGENT_CONNECTION.close()


@pytest.fixture
def worker() -> Notices:
    return Notices()


@pytest.fixture(autouse=True)
def _no_progress_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REPORTER", progress.ProgressReporter())


class Measured(float):
    """A number of another type than float, such as numpy.float64."""


async def ask_for_notice(worker: Notices, agent: Agent, seconds: float = 20.0) -> None:
    await asyncio.to_thread(worker.ask_for_notice, seconds)
    await agent.node.until(notice=min(seconds, LIMIT))


async def wait_for_notice(worker: Notices) -> Notice:
    async with asyncio.timeout(TIMEOUT):
        while (notice := worker.notice()) is None:  # noqa: ASYNC110 - programs poll for notices
            await asyncio.sleep(0.001)
    return notice


async def test_a_worker_asks_for_notice_and_answers_it(agent: Agent, worker: Notices) -> None:
    assert worker.notice() is None
    await ask_for_notice(worker, agent, Measured(20.0))
    assert not agent.pending
    agent.give(cause="\N{SNOWMAN}\x01\\" * 300)
    notice = await wait_for_notice(worker)
    assert notice.reason == "node_joined"
    assert notice.cause.startswith("\N{SNOWMAN}\x01\\")
    assert 0 < notice.seconds_left <= 10
    assert notice.deadline <= time.monotonic() + 10
    assert agent.pending
    assert "answered_notice" not in agent.node.reported
    worker.answer_notice()
    assert worker.notice() is None
    await agent.node.until(answered_notice=1)
    agent.give()  # the same notice
    agent.give(2)
    assert agent.node.reported["answered_notice"] == 1


async def test_the_leaders_notice_of_the_same_change_is_not_a_new_one(agent: Agent, worker: Notices) -> None:
    await ask_for_notice(worker, agent)
    agent.leave("a leaves (SIGTERM)")
    notice = await wait_for_notice(worker)
    assert (notice.reason, notice.cause) == ("node_left", "a leaves (SIGTERM)")
    worker.answer_notice()
    agent.give()
    await agent.node.until(answered_notice=1)
    assert worker.notice() is None


async def test_a_request_for_notice_can_be_changed_and_withdrawn(agent: Agent, worker: Notices) -> None:
    await ask_for_notice(worker, agent, 20.0)
    await ask_for_notice(worker, agent, 1e12)
    agent.give()
    await wait_for_notice(worker)
    await ask_for_notice(worker, agent, 0.0)
    assert "answered_notice" not in agent.node.reported


@pytest.mark.parametrize("end", [lambda agent: agent.forget(0), lambda agent: agent.begin(NEXT, {})])
async def test_an_exited_worker_needs_no_notice(agent: Agent, worker: Notices, end: Callable[[Agent], None]) -> None:
    await ask_for_notice(worker, agent)
    agent.leave("a leaves")
    assert agent.pending
    end(agent)
    assert not agent.pending
    agent.report()
    assert agent.node.reported["notice"] == 0


async def test_the_round_check_is_false_without_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WORKER_SOCKET, str(tmp_path / "channel"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "channel"))
        listener.listen()
        assert not await asyncio.to_thread(torchelastic.is_round_current, 0.05)


async def test_the_round_check_returns_the_agents_answer(agent: Agent) -> None:
    assert await asyncio.to_thread(torchelastic.is_round_current, Measured(3.0))
    ((round, seconds),) = agent.node.asked
    assert round == ROUND
    assert 0 < seconds < 3
    agent.node.current = False
    assert not await asyncio.to_thread(torchelastic.is_round_current)
    agent.node.asked.clear()
    agent.begin(NEXT, {})
    assert not await asyncio.to_thread(torchelastic.is_round_current)
    assert agent.node.asked == []


GOOD = json.dumps({"round": ROUND, "rank": 0}).encode() + b"\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\n",
        b'{"round": 3, "rank": 1, "check_timeout": "soon"}\n',
        b'{"round": 2, "rank": 1}\n',
        b"[" * (LINE_LIMIT - 1) + b"\n",
        b"x" * (3 * LINE_LIMIT),
        GOOD + b'{"requested_notice": -1}\n',
    ],
)
async def test_a_process_that_sends_an_invalid_line_is_disconnected(agent: Agent, worker: Notices, sent: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(agent.path)
    writer.write(sent)
    async with asyncio.timeout(TIMEOUT):
        with contextlib.suppress(ConnectionResetError):  # the agent may close before it has read all bytes
            assert await reader.read() == b""
    writer.close()
    assert not agent.node.reported.get("notice")
    await ask_for_notice(worker, agent)


async def test_without_an_agent_the_functions_do_nothing(
    worker: Notices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(WORKER_SOCKET, raising=False)
    monkeypatch.delenv(HEARTBEAT_FILE, raising=False)
    torchelastic.heartbeat()
    worker.ask_for_notice(5)
    worker.answer_notice()
    assert worker.notice() is None
    assert torchelastic.is_round_current()
    monkeypatch.setattr(notices, "_RETRY_INTERVAL", 0.01)
    for name, value in {"TORCHELASTIC_ROUND": str(ROUND), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(WORKER_SOCKET, str(tmp_path / "channel"))  # the socket of an exited agent
    worker.ask_for_notice(5)
    assert worker.notice() is None
    assert not torchelastic.is_round_current()
    async with Agent(tmp_path) as agent:  # the thread that sends the request later ends with the test
        agent.begin(RECORD, {})
        await agent.node.until(notice=5.0)
        AGENT_CONNECTION.close()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_invalid_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be 0 or more, and finite"):
        torchelastic.ask_for_notice(seconds)


# -- progress


async def test_a_failed_checkpoint_is_not_reported(agent: Agent) -> None:
    with pytest.raises(OSError, match="full"), torchelastic.report_checkpoint():
        raise OSError("the disk is full")
    torchelastic.step()
    await agent.node.until(first_step_at=bool)
    assert agent.node.reported["last_checkpoint_at"] == 0


async def test_the_first_and_last_of_several_checkpoints_within_a_second_are_reported(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = [torchelastic.report_checkpoint() for _ in range(2000)]
    await asyncio.sleep(0.002)  # times are in milliseconds, and the last time must differ
    before = time.time()
    writing.append(torchelastic.report_checkpoint())
    for each in writing:
        each.done()
    await agent.node.until(last_checkpoint_at=bool)
    assert agent.node.reported["last_checkpoint_at"] < before - 0.001
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + progress.MIN_REPORT_INTERVAL)
    torchelastic.step()
    await agent.node.until(last_checkpoint_at=lambda kept: kept >= before - 0.001)
    assert len({kept for _, kept in agent.node.progress}) == 2


async def test_a_background_checkpoint_is_reported_when_its_future_succeeds(agent: Agent) -> None:
    failed, cancelled, written = Future[None](), Future[None](), Future[None]()
    for future in (failed, cancelled, written):
        future.add_done_callback(torchelastic.report_checkpoint().done)
    failed.set_exception(OSError("the disk is full"))
    assert cancelled.cancel()
    torchelastic.step()
    await agent.node.until(first_step_at=bool)
    assert agent.node.reported["last_checkpoint_at"] == 0
    written.set_result(None)
    await agent.node.until(last_checkpoint_at=bool)


async def test_a_worker_reconnects_to_its_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_REPORT_INTERVAL", 0.05)
    torchelastic.step()
    await agent.node.until(first_step_at=bool)
    agent.forget(0)
    async with asyncio.timeout(TIMEOUT):
        while agent.node.reported["last_checkpoint_at"] == 0:
            with torchelastic.report_checkpoint():
                await asyncio.sleep(0.05)
    assert len({stepped for stepped, _ in agent.node.progress}) == 1


async def test_an_agent_that_reads_nothing_does_not_block_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "MIN_REPORT_INTERVAL", 0.0)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "channel"))
        listener.listen(1)
        for name, value in {WORKER_SOCKET: str(tmp_path / "channel"), "TORCHELASTIC_ROUND": "1", "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        for _ in range(20_000):
            with torchelastic.report_checkpoint():
                torchelastic.step()
        assert time.monotonic() - began < TIMEOUT
        assert not AGENT_CONNECTION.send(WorkerMessage(last_checkpoint_at=1.0))  # the socket's buffer is full
    AGENT_CONNECTION.close()
    monkeypatch.setattr(progress, "MIN_REPORT_INTERVAL", 1.0)


async def send(agent: Agent, **message: float) -> list[tuple[float, float]]:
    """Send a message, wait until the agent has handled it, and return the progress reported so far."""
    AGENT_CONNECTION.send(WorkerMessage(**message))
    AGENT_CONNECTION.send(WorkerMessage(requested_notice=1.0))
    await agent.node.until(notice=1.0)
    agent.node.reported.clear()
    return agent.node.progress


async def test_impossible_times_are_ignored(agent: Agent) -> None:
    now = time.time()
    assert {*await send(agent, first_step_at=now - 10, last_checkpoint_at=now - 10)} == {(0, 0)}
    stepped, kept = (await send(agent, first_step_at=now + 1e6, last_checkpoint_at=now + 1e6))[-1]
    assert now - 0.001 <= stepped <= time.time() + 0.001
    assert now - 0.001 <= kept <= time.time() + 0.001
    assert (await send(agent, first_step_at=now + 2e6, last_checkpoint_at=now))[-1] == (stepped, kept)
    agent.begin(NEXT, {})
    AGENT_CONNECTION.close()


@pytest.mark.parametrize("rank", [0, 1])
async def test_only_rank_0_reports_progress(agent: Agent, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", "0")  # as with --virtual-local-rank, or on the second node
    assert any(stepped for stepped, _ in await send(agent, first_step_at=time.time())) is (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
async def test_each_rank_reports_its_first_step(agent: Agent, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    torchelastic.step()
    await agent.node.until(stepped=rank)


async def test_a_worker_reports_what_it_imports(agent: Agent) -> None:
    await asyncio.to_thread(AGENT_CONNECTION.send, {"imported": "torch._dynamo", "changed": {"HOME": 1}})
    await agent.node.until(imported=("torch._dynamo", {"HOME": 1}))
