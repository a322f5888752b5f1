"""Nothing that happens to an agent is lost between those who tell of it and the agent."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from torchelastic.agent.happenings import Happenings, RendezvousFailed
from torchelastic.contract import EpochRecord
from torchelastic.errors import StoreError
from torchelastic.rendezvous.node import EpochBegan


def a_node() -> Any:
    return SimpleNamespace(events=asyncio.Queue(), failed=asyncio.get_running_loop().create_future())


def began(listener: socket.socket) -> EpochBegan:
    return EpochBegan(EpochRecord(number=1), listener)


async def test_an_epoch_that_comes_while_the_agent_ends_keeps_no_port() -> None:
    for turns in range(4):  # the event is on its way, in the hands of whoever takes it in, or in the queue
        node, listener = a_node(), socket.create_server(("127.0.0.1", 0))
        async with Happenings() as happenings:
            happenings.follow_rendezvous(node)
            await asyncio.sleep(0)
            node.events.put_nowait(began(listener))
            for _ in range(turns):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        left = [node.events.get_nowait().store for _ in range(node.events.qsize())]  # for the node itself to close
        assert left == [listener] or listener.fileno() == -1
        listener.close()


async def test_a_rendezvous_that_fails_is_told_with_its_first_cause_after_what_it_has_told() -> None:
    node = a_node()
    async with Happenings() as happenings:
        happenings.follow_rendezvous(node)
        await asyncio.sleep(0)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            node.events.put_nowait(began(listener))
            node.failed.set_exception(ExceptionGroup("of tasks", [StoreError("refused")]))
            assert isinstance(await happenings.next(), EpochBegan)
            failed = await happenings.next()
    assert isinstance(failed, RendezvousFailed)
    assert str(failed.error) == "refused"
    assert await Happenings().next(0) is None
