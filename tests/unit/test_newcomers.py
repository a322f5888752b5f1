"""Newcomers who come to lead a run begin without the dead, and not without those that are on their way back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.nodes import Meeting, all_with
from torchelastic.contract import EpochRecord, Member, NodeRecord, RunKeys, SizeRecord, encode
from torchelastic.rendezvous.node import RendezvousNode
from torchelastic.settings import RendezvousSettings
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from torchelastic.store import Store

LEASE = 1.5


async def test_they_do_not_meet_a_dead_member_whose_key_still_stands() -> None:
    data = MemoryStore()

    async def connect() -> Store:
        return data.another()

    async with Meeting(connect, "run", lease=LEASE, joining_window=0.2, unique_run=True) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        leader, other = (a, b) if a.inner._leadership is not None else (b, a)
        await asyncio.gather(leader.inner._succession.leave(), other.crash())
        await leader.crash()

        c, d = [await meeting.node(name) for name in "cd"]
        epoch = await all_with(c, d)
        for node in (c, d):
            assert [record.nodes for record in node.epochs if record.number > first.number] == [epoch.nodes]


async def test_a_member_that_is_slower_to_come_back_than_another_is_waited_for() -> None:
    data, keys = MemoryStore(), RunKeys.of("run")

    async def connect() -> Store:
        return data.another()

    async def comes_back(name: str) -> None:
        size = SizeRecord(min=1, max=8)
        record = NodeRecord(name=name, address="127.0.0.1", workers=1, size=size, store=40000, epoch=4)
        await data.put(keys.node(f"{name}.1"), encode(record))

    # All leases have ended with a store that was away, and the members are on their way back to it.
    members = (Member("a.1", "127.0.0.1", 1), Member("b.1", "127.0.0.1", 1))
    await data.put(keys.epoch, encode(EpochRecord(number=4, members=members, store="127.0.0.1:40000")))
    async with Meeting(connect, "run", lease=0.5, joining_window=60.0) as meeting:
        c = await meeting.node("c")
        await c.inner._succession.until_leading()
        await comes_back("b")
        while (leadership := c.inner._leadership) is None:
            await c.inner._control.changed.after(c.inner._control.changed.count)
        while "b.1" not in leadership._roster.peers:
            await leadership._changed.after(leadership._changed.count)
        await comes_back("a")
        epoch = await c.until_with("a", "b", "c")
        assert (epoch.number, epoch.nodes[:2]) == (5, ("a.1", "b.1"))


async def test_one_that_gives_up_while_it_waits_for_the_store_lets_go_of_its_ports() -> None:
    store = MemoryStore()
    store.reachable = False
    size = SizeRecord(min=1, max=8)
    record = NodeRecord(name="a", address="127.0.0.1", workers=1, size=size)
    node = RendezvousNode(store, RendezvousSettings(run_id="run", size=size), node="a.1", record=record)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), node:
            pass
    assert (node._server._listener.fileno(), node._offer.fileno()) == (-1, -1)
