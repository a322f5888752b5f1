"""The event queue of an agent."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from torchelastic.agent.events import EventQueue, RendezvousFailed
from torchelastic.errors import StoreError
from torchelastic.protocol import RoundRecord
from torchelastic.rendezvous.node import RoundStarted


def a_node() -> Any:
    return SimpleNamespace(events=asyncio.Queue(), failed=asyncio.get_running_loop().create_future())


def round_started(listener: socket.socket) -> RoundStarted:
    return RoundStarted(RoundRecord(number=1), listener)


async def test_a_round_that_starts_while_the_agent_exits_leaks_no_socket() -> None:
    for turns in range(4):  # the event is in the node's queue, in the forwarding task or in the agent's queue
        node, listener = a_node(), socket.create_server(("127.0.0.1", 0))
        async with EventQueue() as events:
            events.follow_rendezvous(node)
            await asyncio.sleep(0)
            node.events.put_nowait(round_started(listener))
            for _ in range(turns):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        left = [node.events.get_nowait().store for _ in range(node.events.qsize())]  # the node closes these
        assert left == [listener] or listener.fileno() == -1
        listener.close()


async def test_a_failed_rendezvous_is_the_last_event_with_its_first_cause() -> None:
    node = a_node()
    async with EventQueue() as events:
        events.follow_rendezvous(node)
        await asyncio.sleep(0)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            node.events.put_nowait(round_started(listener))
            node.failed.set_exception(ExceptionGroup("of tasks", [StoreError("refused")]))
            assert isinstance(await events.next(), RoundStarted)
            failed = await events.next()
    assert isinstance(failed, RendezvousFailed)
    assert str(failed.error) == "refused"
    assert await EventQueue().next(0) is None
