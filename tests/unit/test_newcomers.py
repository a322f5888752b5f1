"""Newcomers who come to lead a run begin without the dead, and not without those that are on their way back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from tests.support.nodes import Meeting, all_with
from tests.support.store_conformance import confirmed, seen
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
    data = MemoryStore()
    clients: list[MemoryStore] = []

    async def connect() -> Store:
        clients.append(data.another())
        return clients[-1]

    async with Meeting(connect, "run", lease=2 * LEASE, joining_window=0.2) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        for client, node in zip(clients, (a, b), strict=True):
            client.reachable = False
            await node.until_away()
        for node in (a, b):
            data.expire(node.inner._session.lease)

        c = await meeting.node("c", joining_window=60.0)
        await c.inner._succession.until_leading()
        async with aclosing(data.watch(b.inner.keys.node(b.inner.node), 0)) as watch:
            await confirmed(watch)
            clients[1].reachable = True
            await seen(watch, 1)
        clients[0].reachable = True
        epoch = await all_with(a, b, c)
        assert epoch.nodes[:2] == first.nodes
        assert [record.number for record in a.epochs] == [1, 2]
