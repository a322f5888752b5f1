"""Nodes of a run within the test process: the real protocol, without agents and workers."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from torchelastic.config.settings import RendezvousSettings
from torchelastic.protocol.records import NodeRecord, NoticeRecord, OutcomeRecord, RoundRecord, SizeRecord
from torchelastic.rendezvous.node import Partitioned, RendezvousNode, RoundStarted
from torchelastic.rendezvous.run_watch import cancel
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.store.api import Store

TIMEOUT = 90.0
"""The limit of each wait in seconds, even on a busy machine; no measurement depends on it."""


class Clients:
    """Creates clients of one store, and keeps them in the order of creation."""

    def __init__(self) -> None:
        self.data = MemoryStore()
        self.all: list[MemoryStore] = []

    async def connect(self) -> Store:
        self.all.append(self.data.another())
        return self.all[-1]

    def reach(self, reachable: bool) -> None:
        """Set whether the clients can reach the store."""
        for client in self.all:
            client.reachable = reachable


class NodeFactory:
    """Creates the nodes of one run, and stops them."""

    def __init__(self, connect: Callable[[], Awaitable[Store]], run_id: str, **settings: Any) -> None:
        self.connect = connect
        self._run_id = run_id
        self._settings = settings
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def node(
        self,
        name: str,
        *,
        wanted: int | None = None,
        low: int = 1,
        high: int = 8,
        connect: Callable[[], Awaitable[Store]] | None = None,
        **settings: Any,
    ) -> TestNode:
        size = SizeRecord(min=low, max=high, desired=wanted)
        rules = RendezvousSettings(
            run_id=self._run_id, size=size, **{"max_restarts": 100, **self._settings, **settings}
        )
        store = await (connect or self.connect)()
        self._stack.push_async_callback(store.close)
        inner = RendezvousNode(
            store,
            rules,
            node=f"{name}.{next(self._numbers)}",
            record=NodeRecord(name=name, address="127.0.0.1", workers=1, size=size),
        )
        await inner.__aenter__()
        node = TestNode(name, inner)
        self._stack.push_async_callback(node.close)
        return node


class TestNode:
    """One node, and the events that it received."""

    __test__ = False

    def __init__(self, name: str, inner: RendezvousNode) -> None:
        self.name = name
        self.inner = inner
        self.rounds: list[RoundRecord] = []
        self.notices: list[NoticeRecord] = []  # of the current round
        self.answers = False
        """Whether the node's workers save at once when they get a notice."""
        self.outcome: OutcomeRecord | None = None
        self.partitioned = False
        self.serves = False
        """Whether the node serves the TCPStore of its last round."""
        self._open = True

    async def until(self, wanted: Callable[[TestNode], bool]) -> TestNode:
        """Process the node's events until a condition holds."""
        async with asyncio.timeout(TIMEOUT):
            while not wanted(self):
                event = await self.inner.events.get()
                if isinstance(event, RoundStarted):
                    self.rounds.append(event.record)
                    self.notices.clear()
                    self.serves = event.tcp_store_listener is not None
                    if event.tcp_store_listener is not None:
                        event.tcp_store_listener.close()
                elif isinstance(event, NoticeRecord):
                    self.notices.append(event)
                    if self.answers:
                        self.inner.report(event.round, answered_notice=event.number)
                elif isinstance(event, OutcomeRecord):
                    self.outcome = event
                elif isinstance(event, Partitioned):
                    self.partitioned = True
        return self

    async def report(self, **changes: Any) -> None:
        """Report on the current round, and wait until the report is in the store."""
        self.inner.report(self.rounds[-1].number, **changes)
        await self.inner.registration.flush()

    async def until_with(self, *names: str) -> RoundRecord:
        """Wait for a round of exactly these nodes."""
        await self.until(lambda node: bool(node.rounds) and set(node.members) == set(names))
        return self.rounds[-1]

    async def until_noticed(self) -> NoticeRecord:
        """Wait until the node has received the notice that its round is about to change."""
        await self.until(lambda node: bool(node.notices))
        return self.notices[-1]

    async def wait_until_store_lost(self) -> None:
        """Wait until the node has noticed that it cannot reach the store."""
        control = self.inner.run
        async with asyncio.timeout(TIMEOUT):
            while control.unreachable_since is None:
                await control.changed.after(control.changed.count)

    @property
    def members(self) -> list[str]:
        return [node.rpartition(".")[0] for node in self.rounds[-1].nodes]

    def drain(self) -> list[RoundRecord]:
        """Return the rounds that the node has received but not processed."""
        records = []
        while not self.inner.events.empty():
            event = self.inner.events.get_nowait()
            if isinstance(event, RoundStarted):
                records.append(event.record)
                if event.tcp_store_listener is not None:
                    event.tcp_store_listener.close()
            elif isinstance(event, Partitioned):
                self.partitioned = True
        return records

    async def crash(self) -> None:
        """Stop the node as SIGKILL does: its connections are closed, and its lease expires."""
        self._open = False
        await self.inner.server.close()
        await cancel(self.inner.failed)
        await self.inner._close_sockets()

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self.inner.__aexit__(None, None, None)


async def all_with(*nodes: TestNode) -> RoundRecord:
    """Wait until all of these nodes have received a round of exactly these nodes."""
    names = [node.name for node in nodes]
    records = await asyncio.gather(*(node.until_with(*names) for node in nodes))
    assert len({record.number for record in records}) == 1
    return records[0]
