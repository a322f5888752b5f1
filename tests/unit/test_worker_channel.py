"""The channel between an agent and its workers: this process is both, so it is a worker that asks its own agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from torchelastic import worker
from torchelastic.agent.progress import Progress
from torchelastic.agent.worker_channel import WorkerChannel
from torchelastic.worker import CHANNEL, LINE_LIMIT, short_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

PATIENCE = 20.0
EPOCH = 3


class SilentNode:
    """A node that has nobody to report to."""

    node = "a.1"

    def report(self, epoch: int, **changes: Any) -> None:
        pass


class Agent:
    """An agent of which there is nothing but its channel."""

    def __init__(self, folder: Path) -> None:
        self.changed = asyncio.Event()
        self.standing = True
        self.asked: list[tuple[int, float]] = []
        self.channel = WorkerChannel(
            folder, stands=self._stands, changed=self.changed.set, progress=Progress(SilentNode())
        )

    async def until(self, condition: Callable[[WorkerChannel], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition(self.channel):
                self.changed.clear()
                await self.changed.wait()

    async def _stands(self, epoch: int, seconds: float) -> bool:
        self.asked.append((epoch, seconds))
        return self.standing


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    agent = Agent(tmp_path)
    async with agent.channel as channel:
        monkeypatch.setattr(worker, "_here", worker._Here())
        for name, value in {**channel.variables, "TORCHELASTIC_EPOCH": str(EPOCH), "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        channel.expect(EPOCH)
        channel.began({0: 1, 1: os.getpid()})
        yield agent


async def ask(agent: Agent, seconds: float = 20.0, **more: Any) -> None:
    await asyncio.to_thread(worker.ask_for_notice, seconds, **more)
    await agent.until(lambda channel: channel.asked == seconds)


async def told(agent: Agent, **more: Any) -> worker.Notice:
    """Give notice, and wait until the worker knows."""
    agent.channel.tell(**{"seconds": 10.0, "reason": "node_joined", "cause": "b joined", **more})
    return await noticed()


async def noticed() -> worker.Notice:
    async with asyncio.timeout(PATIENCE):
        while (notice := worker.notice()) is None:  # noqa: ASYNC110 - it is there to be polled
            await asyncio.sleep(0.001)
    return notice


async def until_none() -> None:
    async with asyncio.timeout(PATIENCE):
        while worker.notice() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_process_that_asks_on_and_on_without_listening_is_heard_no_more(agent: Agent) -> None:
    line = b'{"ask": 1}\n' * 1000

    def ask_on(connection: socket.socket) -> int:
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 1000 * len(line):
                sent += connection.send(line)
        return sent

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        connection.connect(os.environ[CHANNEL])
        connection.sendall(json.dumps({"epoch": EPOCH, "local_rank": 1}).encode() + b"\n")
        assert await asyncio.to_thread(ask_on, connection) < 1000 * len(line)


async def test_a_worker_that_asked_is_told_and_its_answer_is_known(agent: Agent) -> None:
    assert agent.channel.asked == 0
    assert worker.notice() is None
    await ask(agent)
    assert agent.channel.answered
    notice = await told(agent)
    assert (notice.reason, notice.cause) == ("node_joined", "b joined")
    assert 0 < notice.seconds_left <= 10
    assert notice.deadline <= time.monotonic() + 10
    assert not agent.channel.answered
    worker.saved()
    assert worker.notice() is None
    await agent.until(lambda channel: channel.answered)


async def test_an_answer_is_to_the_notice_that_was_seen_and_no_later_one(agent: Agent) -> None:
    await ask(agent)
    await told(agent)
    agent.channel.take_back()
    agent.channel.tell(10.0, reason="resized", cause="three are wanted")
    async with asyncio.timeout(PATIENCE):
        while (standing := worker._here._standing) is None or standing[1].reason != "resized":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    worker.saved()
    assert (await noticed()).reason == "resized"
    worker.saved()
    await agent.until(lambda channel: channel.answered)


async def test_a_notice_that_is_taken_back_is_none_and_needs_no_answer(agent: Agent) -> None:
    await ask(agent)
    await told(agent)
    agent.channel.take_back()
    await until_none()
    assert agent.channel.answered


async def test_who_asks_while_a_notice_stands_is_told_of_it(agent: Agent) -> None:
    agent.channel.tell(10.0, reason="node_left", cause="b left")
    assert agent.channel.answered
    await ask(agent)
    assert not agent.channel.answered
    assert (await noticed()).reason == "node_left"


async def test_what_is_asked_for_can_be_changed_and_taken_back(agent: Agent) -> None:
    await ask(agent, 20.0)
    await ask(agent, 60.0)
    await told(agent)
    await ask(agent, 0.0)
    assert agent.channel.answered


async def test_whoever_asks_for_an_eternity_is_understood(agent: Agent) -> None:
    await asyncio.to_thread(worker.ask_for_notice, 1e12)
    await agent.until(lambda channel: channel.asked == 1e6)
    assert await asyncio.to_thread(worker.epoch_stands, 1e8)


async def test_a_callback_is_called_once_and_answers_by_its_return(agent: Agent) -> None:
    called: list[worker.Notice] = []
    await ask(agent, callback=called.append)
    agent.channel.tell(10.0, reason="node_joined", cause="b joined")
    await agent.until(lambda _: called)
    await agent.until(lambda channel: channel.answered)
    assert [notice.cause for notice in called] == ["b joined"]


async def test_a_worker_that_has_ended_is_not_waited_for(agent: Agent) -> None:
    await ask(agent)
    await told(agent)
    agent.channel.forget(1)
    assert (agent.channel.asked, agent.channel.answered) == (0, True)


async def test_with_the_next_epoch_nothing_of_the_last_one_is_left(agent: Agent) -> None:
    await ask(agent)
    await told(agent)
    agent.channel.expect(EPOCH + 1)
    assert (agent.channel.asked, agent.channel.answered) == (0, True)
    await asyncio.to_thread(worker.ask_for_notice, 5.0)
    assert agent.channel.asked == 0


async def test_a_cause_of_any_length_and_in_any_script_arrives(agent: Agent) -> None:
    await ask(agent)
    notice = await told(agent, cause="\N{SNOWMAN}\x01\\" * 5000)
    assert notice.cause.startswith("\N{SNOWMAN}\x01\\")


async def test_whether_the_epoch_stands_is_asked_of_the_agent(agent: Agent) -> None:
    assert await asyncio.to_thread(worker.epoch_stands, 3.0)
    ((epoch, seconds),) = agent.asked
    assert epoch == EPOCH
    assert 0 < seconds < 3
    agent.standing = False
    assert not await asyncio.to_thread(worker.epoch_stands)


async def test_a_past_epoch_does_not_stand_whoever_asks(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_EPOCH", str(EPOCH - 1))
    assert not await asyncio.to_thread(worker.epoch_stands)
    monkeypatch.setenv("TORCHELASTIC_EPOCH", str(EPOCH))
    monkeypatch.setenv("LOCAL_RANK", "0")  # the worker with that rank is another process
    assert not await asyncio.to_thread(worker.epoch_stands)
    assert agent.asked == []


async def test_a_worker_that_is_faster_than_its_own_start_waits(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.channel.expect(EPOCH + 1)
    monkeypatch.setenv("TORCHELASTIC_EPOCH", str(EPOCH + 1))
    asking = asyncio.create_task(asyncio.to_thread(worker.epoch_stands))
    await asyncio.sleep(0)
    agent.channel.began({1: os.getpid()})
    assert await asking


GOOD = json.dumps({"epoch": EPOCH, "local_rank": 1}).encode() + b"\n"


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"hello\n",
        b"[1]\n",
        b"{}\n",
        b'{"epoch": -1, "local_rank": 1}\n',
        b'{"epoch": 3, "local_rank": 1, "stands": "soon"}\n',
        b'{"epoch": 3, "local_rank": 1, "more": 1}\n',
        b'{"epoch": 3, "local_rank": 0}\n',
        b'{"epoch": 2, "local_rank": 1}\n',
        b"[" * (LINE_LIMIT - 1) + b"\n",
        b"x" * (3 * LINE_LIMIT),
        GOOD + b'{"ask": -1}\n',
        GOOD + b'{"ask": 1e9}\n',
        GOOD + b'{"saved": 1.5}\n',
        GOOD + b'{"stepped": -1}\n',
        GOOD + b'{"kept": 1e12}\n',
        GOOD + b"\xff\xfe\n",
    ],
)
async def test_whoever_speaks_nonsense_is_hung_up_on_and_changes_nothing(agent: Agent, said: bytes) -> None:
    path = agent.channel.variables[CHANNEL]
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(said)
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionResetError):  # it was not even read to its end
            assert await reader.read() == b""
    writer.close()
    assert agent.channel.asked == 0
    await ask(agent)


async def test_without_an_agent_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "_here", worker._Here())
    monkeypatch.delenv(CHANNEL, raising=False)
    monkeypatch.delenv(worker.HEARTBEAT_FILE, raising=False)
    worker.heartbeat()
    worker.ask_for_notice(5)
    worker.saved()
    assert worker.notice() is None
    assert worker.epoch_stands()
    monkeypatch.setenv(CHANNEL, str(tmp_path / "channel"))  # of an agent that is gone
    worker.ask_for_notice(5)
    assert worker.notice() is None
    assert not worker.epoch_stands()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a time"):
        worker.ask_for_notice(seconds)


def test_a_socket_is_reached_however_deep_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    path = str(folder / "channel")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as speaking:
        with short_path(path) as short:
            listening.bind(short)
        listening.listen()
        with short_path(path) as short:
            speaking.connect(short)
    assert len([*folder.iterdir()]) == 1
