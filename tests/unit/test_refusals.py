"""A store that refuses a node at its start is told of; one that does so later is away, and nothing ends for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.nodes import Meeting, all_with
from torchelastic.errors import StoreRefused
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from torchelastic.store import Store


class Doorkeeper(MemoryStore):
    """A client of a store that may be told to refuse it."""

    refused = False

    async def _reached(self) -> Any:
        if self.refused:
            raise StoreRefused("etcd does not allow this user to use these keys: permission denied")
        return await super()._reached()

    def refuse(self) -> None:
        self.refused = True
        self._cut_watches()


async def test_training_goes_on_and_so_do_changes_when_the_store_has_come_to_its_senses() -> None:
    clients: list[Doorkeeper] = []
    data = MemoryStore()

    async def connect() -> Store:
        client = Doorkeeper()
        client._data = data._data
        clients.append(client)
        return client

    async with Meeting(connect, "run", lease=0.5, last_call_timeout=0.2) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        for client in clients:
            client.refuse()
        for node in (a, b):
            await node.until_away()
        await asyncio.sleep(1.0)  # for all that the nodes ask meanwhile; their leases end
        for client in clients:
            client.refused = False
        c = await meeting.node("c")
        round = await all_with(a, b, c)
        assert (round.number, round.nodes[:2]) == (2, first.nodes)
        assert not any(node.partitioned or node.inner.failed.done() for node in (a, b, c))


async def test_at_the_start_it_is_an_error() -> None:
    store = Doorkeeper()

    async def connect() -> Store:
        return store

    async with Meeting(connect, "run", lease=0.5) as meeting:
        store.refused = True
        with pytest.raises(StoreRefused, match="permission denied"):
            await meeting.node("a")
