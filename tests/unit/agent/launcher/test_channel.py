"""A broken path between a launcher and an agent is noticed by both ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from torchelastic.launcher import channel
from torchelastic.launcher.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The launcher's end, which sends pings, and the agent's."""
    first, second = socket.socketpair()
    launcher = Channel(os.dup(first.fileno()), first.detach(), pings=True)
    agent = Channel(os.dup(second.fileno()), second.detach())
    yield launcher, agent
    launcher.close()
    agent.close()
    for _ in launcher.messages():  # closes the descriptor
        pass


def test_a_launcher_that_has_nothing_to_send_sends_pings(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(channel, "_PING_INTERVAL", 0.01)
    _, agent = request.getfixturevalue("ends")
    with contextlib.closing(agent.messages()) as messages:
        assert [next(messages)[0] for _ in range(3)] == [{"type": "ping"}] * 3


async def test_an_agent_notices_a_launcher_that_sends_nothing(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PING_TIMEOUT", 0.01)
    launcher, agent = ends
    async with asyncio.timeout(60):
        assert await agent.silence() is None
    with contextlib.closing(agent.messages()) as messages:
        launcher.send({"type": "last"})
        assert next(messages)[0] == {"type": "last"}
