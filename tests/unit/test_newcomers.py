"""Newcomers who find a run whose members have all gone at once begin without the dead."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.nodes import Meeting, all_with
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
