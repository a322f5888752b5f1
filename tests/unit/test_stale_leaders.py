"""A leader that stood still while others went on begins nothing and ends nothing by what it knew before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.nodes import PATIENCE, Meeting
from torchelastic.contract import EpochRecord, LeaderRecord, Member, RunKeys, encode
from torchelastic.rendezvous.leader import Leadership
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    import pytest

    from tests.support.nodes import TestNode
    from torchelastic.store import Store

KEYS = RunKeys.of("run")
SUCCESSOR = LeaderRecord(node="b.9", address="127.0.0.1:1")


def let_it_hear_nothing(node: TestNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.inner._control, "_set", lambda _key, _entry: None)


async def looks_before_it_acts(monkeypatch: pytest.MonkeyPatch) -> bool:
    """What the only leader of this process finds when it looks, and then has had the time to act upon."""
    look, found = Leadership._is_fresh, asyncio.get_running_loop().create_future()

    async def watched(leadership: Leadership) -> bool:
        fresh = await look(leadership)
        if not found.done():
            found.set_result(fresh)
        return fresh

    monkeypatch.setattr(Leadership, "_is_fresh", watched)
    async with asyncio.timeout(PATIENCE):
        fresh = await found
    assert isinstance(fresh, bool)
    return fresh


async def test_it_does_not_end_a_run_that_others_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    data = MemoryStore()

    async def connect() -> Store:
        return data.another()

    async with Meeting(connect, "run", lease=60.0, join_timeout=0.3) as meeting:
        a = await meeting.node("a", low=2, wanted=2)
        await a.inner._succession.until_leading()
        let_it_hear_nothing(a, monkeypatch)
        await data.put(KEYS.leader, encode(SUCCESSOR))
        assert not await looks_before_it_acts(monkeypatch)
        assert await data.get(KEYS.outcome) is None


async def test_it_does_not_begin_anew_what_others_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    data = MemoryStore()

    async def connect() -> Store:
        return data.another()

    async with Meeting(connect, "run", lease=0.3, joining_window=0.3) as meeting:
        a = await meeting.node("a")
        await a.inner._succession.until_leading()
        let_it_hear_nothing(a, monkeypatch)
        await data.put(KEYS.leader, encode(SUCCESSOR))
        begun = encode(EpochRecord(number=1, members=(Member("b.9", "127.0.0.1", 1),), store="127.0.0.1:1"))
        await data.put(KEYS.epoch, begun)
        assert not await looks_before_it_acts(monkeypatch)
        entry = await data.get(KEYS.epoch)
        assert entry is not None
        assert entry.value == begun
