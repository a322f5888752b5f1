"""A store that refuses a node at startup is an error; a later refusal counts as unavailability."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.support.nodes import Meeting, all_with
from torchelastic.errors import StoreRefused
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from torchelastic.store import Change, Store


class RefusingStore:
    """A store client that can refuse every request."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.refused = False

    def __getattr__(self, request: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            self._check()
            return await getattr(self.store, request)(*args, **options)

        return call

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        self._check()
        async with contextlib.aclosing(self.store.watch(prefix, start)) as batches:
            async for batch in batches:
                yield batch

    async def close(self) -> None:
        await self.store.close()

    def refuse(self) -> None:
        self.refused = True
        self.store.reachable = False  # ends the watches
        self.store.reachable = True

    def _check(self) -> None:
        if self.refused:
            raise StoreRefused("etcd does not allow this user to use these keys: permission denied")


async def test_training_continues_after_a_refusal_and_new_nodes_join_later() -> None:
    clients: list[RefusingStore] = []
    data = MemoryStore()

    async def connect() -> Store:
        clients.append(RefusingStore(data.another()))
        return cast("Store", clients[-1])

    async with Meeting(connect, "run", lease=0.5, last_call_timeout=0.2) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        for client in clients:
            client.refuse()
        for node in (a, b):
            await node.until_away()
        await asyncio.sleep(1.0)  # the nodes send requests, and their leases expire
        for client in clients:
            client.refused = False
        c = await meeting.node("c")
        round = await all_with(a, b, c)
        assert (round.number, round.nodes[:2]) == (2, first.nodes)
        assert not any(node.partitioned or node.inner.failed.done() for node in (a, b, c))


async def test_a_refusal_at_startup_is_an_error() -> None:
    store = RefusingStore(MemoryStore())
    store.refuse()

    async def connect() -> Store:
        return cast("Store", store)

    async with Meeting(connect, "run", lease=0.5) as meeting:
        with pytest.raises(StoreRefused, match="permission denied"):
            await meeting.node("a")
