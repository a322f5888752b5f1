"""A node that reaches neither the store nor its peers must not train on by itself; one that reaches either goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.nodes import Meeting, all_with
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from torchelastic.store import Store

LEASE = 0.4


class Clients:
    """Hands out clients of one store, and remembers them by the order in which they came."""

    def __init__(self) -> None:
        self.data = MemoryStore()
        self.all: list[MemoryStore] = []

    async def connect(self) -> Store:
        self.all.append(self.data.another())
        return self.all[-1]


@pytest.mark.parametrize("dying", ["a", "b"])
async def test_without_store_and_peers_the_workers_are_stopped_and_it_comes_back_later(dying: str) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        nodes = {name: await meeting.node(name, wanted=2) for name in "ab"}
        await all_with(*nodes.values())
        (left,) = set("ab") - {dying}
        cut_off = clients.all["ab".index(left)]
        cut_off.reachable = False
        await nodes[dying].crash()
        await nodes[left].until(lambda node: node.isolated)
        cut_off.reachable = True
        epoch = await all_with(nodes[left])
        assert epoch.number > 1
        assert epoch.restarts == 0


async def test_without_the_store_alone_training_goes_on_and_a_newcomer_is_taken_in_afterwards() -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, joining_window=0.5) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        for client in clients.all:
            client.reachable = False
        for node in (a, b):
            await node.until_away()
        for node in (a, b):
            clients.data.expire(node.inner._session.lease)
        for client in clients.all:
            client.reachable = True
        c = await meeting.node("c")
        epoch = await all_with(a, b, c)
        assert (epoch.number, epoch.nodes[:2]) == (2, first.nodes)
        assert not a.isolated
        assert not b.isolated
