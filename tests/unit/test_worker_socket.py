"""The socket between an agent and its workers; the test process is both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

import torchelastic as worker
from torchelastic.agent.worker_socket import Progress, WorkerSocket
from torchelastic.agent_socket import AGENT, CHANNEL, HEARTBEAT_FILE, LINE_LIMIT, short_path
from torchelastic.training import notice as notice_module

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

PATIENCE = 20.0
ROUND = 3


class SilentNode:
    """A node whose reports go nowhere."""

    node = "a.1"

    def report(self, round: int, **changes: Any) -> None:
        pass


class Agent:
    """An agent that has only the socket."""

    def __init__(self, folder: Path) -> None:
        self.changed = asyncio.Event()
        self.standing = True
        self.asked: list[tuple[int, float]] = []
        self.channel = WorkerSocket(
            folder, stands=self._stands, changed=self.changed.set, progress=Progress(SilentNode())
        )

    async def until(self, condition: Callable[[WorkerSocket], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition(self.channel):
                self.changed.clear()
                await self.changed.wait()

    async def _stands(self, round: int, seconds: float) -> bool:
        self.asked.append((round, seconds))
        return self.standing


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    agent = Agent(tmp_path)
    async with agent.channel as channel:
        notice_module._notices._begin()
        for name, value in {**channel.variables, "TORCHELASTIC_ROUND": str(ROUND), "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        channel.expect(ROUND)
        yield agent
        AGENT.close()


async def ask(agent: Agent, seconds: float = 20.0, **more: Any) -> None:
    await asyncio.to_thread(worker.ask_for_notice, seconds, **more)
    await agent.until(lambda channel: channel.asked == seconds)


async def noticed_by(agent: Agent, **more: Any) -> worker.Notice:
    """Give notice, and wait until the worker receives it."""
    agent.channel.give_notice(**{"seconds": 10.0, "reason": "node_joined", "cause": "b joined", **more})
    return await noticed()


async def noticed() -> worker.Notice:
    async with asyncio.timeout(PATIENCE):
        while (notice := worker.notice()) is None:  # noqa: ASYNC110 - programs poll it
            await asyncio.sleep(0.001)
    return notice


async def test_a_worker_asks_for_notice_and_answers_it(agent: Agent) -> None:
    assert agent.channel.asked == 0
    assert worker.notice() is None
    await ask(agent)
    assert agent.channel.answered
    notice = await noticed_by(agent, cause="\N{SNOWMAN}\x01\\" * 5000)
    assert notice.reason == "node_joined"
    assert notice.cause.startswith("\N{SNOWMAN}\x01\\")
    assert 0 < notice.seconds_left <= 10
    assert notice.deadline <= time.monotonic() + 10
    assert not agent.channel.answered
    worker.saved()
    assert worker.notice() is None
    await agent.until(lambda channel: channel.answered)


async def test_a_withdrawn_notice_needs_no_answer(agent: Agent) -> None:
    await ask(agent)
    await noticed_by(agent)
    agent.channel.withdraw()
    async with asyncio.timeout(PATIENCE):
        while worker.notice() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert agent.channel.answered


async def test_a_worker_that_asks_during_a_notice_receives_it(agent: Agent) -> None:
    agent.channel.give_notice(10.0, reason="node_left", cause="b left")
    assert agent.channel.answered
    await ask(agent)
    assert not agent.channel.answered
    assert (await noticed()).reason == "node_left"


async def test_a_request_for_notice_can_be_changed_and_withdrawn(agent: Agent) -> None:
    await ask(agent, 20.0)
    await ask(agent, 60.0)
    await noticed_by(agent)
    await ask(agent, 0.0)
    assert agent.channel.answered
    await asyncio.to_thread(worker.ask_for_notice, 1e12)
    await agent.until(lambda channel: channel.asked == 1e6)


@pytest.mark.parametrize("end", [lambda channel: channel.forget(1), lambda channel: channel.expect(ROUND + 1)])
async def test_an_exited_worker_needs_no_notice(agent: Agent, end: Callable[[WorkerSocket], None]) -> None:
    await ask(agent)
    await noticed_by(agent)
    end(agent.channel)
    assert (agent.channel.asked, agent.channel.answered) == (0, True)


async def test_round_stands_asks_the_agent(agent: Agent) -> None:
    assert await asyncio.to_thread(worker.round_stands, 3.0)
    ((round, seconds),) = agent.asked
    assert round == ROUND
    assert 0 < seconds < 3
    agent.standing = False
    assert not await asyncio.to_thread(worker.round_stands)
    agent.asked.clear()
    agent.channel.expect(ROUND + 1)
    assert not await asyncio.to_thread(worker.round_stands)
    assert agent.asked == []


GOOD = json.dumps({"round": ROUND, "local_rank": 1}).encode() + b"\n"


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"hello\n",
        b'{"round": 3, "local_rank": 1, "stands": "soon"}\n',
        b'{"round": 2, "local_rank": 1}\n',
        b"[" * (LINE_LIMIT - 1) + b"\n",
        b"x" * (3 * LINE_LIMIT),
        GOOD + b'{"ask": -1}\n',
        GOOD + b'{"ask": 1e9}\n',
    ],
)
async def test_a_process_that_sends_an_invalid_line_is_disconnected(agent: Agent, said: bytes) -> None:
    path = agent.channel.variables[CHANNEL]
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(said)
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionResetError):  # the agent may close before it has read everything
            assert await reader.read() == b""
    writer.close()
    assert agent.channel.asked == 0
    await ask(agent)


async def test_without_an_agent_the_functions_do_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notice_module._notices._begin()
    monkeypatch.delenv(CHANNEL, raising=False)
    monkeypatch.delenv(HEARTBEAT_FILE, raising=False)
    worker.heartbeat()
    worker.ask_for_notice(5)
    worker.saved()
    assert worker.notice() is None
    assert worker.round_stands()
    monkeypatch.setenv(CHANNEL, str(tmp_path / "channel"))  # of an exited agent
    worker.ask_for_notice(5)
    assert worker.notice() is None
    assert not worker.round_stands()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_invalid_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a time"):
        worker.ask_for_notice(seconds)


def test_a_socket_with_a_long_path_is_reached(tmp_path: Path) -> None:
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
