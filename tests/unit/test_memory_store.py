"""The store in memory behaves as etcd does, and lets a test say what time it is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.store_conformance import StoreBehaviour, confirmed, ended, seen
from torchelastic.errors import HistoryCompacted, LeaseLost, StoreUnavailable
from torchelastic.store import memory
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class TestMemoryStore(StoreBehaviour):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def other(self, store: MemoryStore) -> MemoryStore:
        return store.another()

    @pytest.fixture
    def second(self) -> float:
        return 0.15

    @pytest.fixture
    def compact(self, store: MemoryStore) -> Callable[[int], Awaitable[None]]:
        async def compact(revision: int) -> None:
            store.compact(revision)

        return compact


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(now=clock)


async def test_leases_end_by_the_clock_that_is_handed_in(store: MemoryStore, clock: Clock) -> None:
    short, long = await store.grant(2), await store.grant(5)
    await store.put("short", b"", lease=short)
    await store.put("long", b"", lease=long)
    assert store.next_end() == 102.0
    clock.now += 1.9
    assert await store.get("short") is not None
    await store.keep_alive(short)
    clock.now += 1.9
    assert await store.get("short") is not None
    clock.now += 0.1
    assert await store.get("short") is None
    assert await store.get("long") is not None
    assert store.next_end() == 105.0
    with pytest.raises(LeaseLost):
        await store.keep_alive(short)


async def test_moving_the_clock_on_ends_leases_in_the_order_of_their_ends(store: MemoryStore, clock: Clock) -> None:
    for ttl in (3, 1, 2):
        await store.put(str(ttl), b"", lease=await store.grant(ttl))
    async with contextlib.aclosing(store.watch("", 1)) as watch:
        await confirmed(watch)
        await seen(watch, 3)
        clock.now += 2.5
        store.tick()
        changes = await seen(watch, 2)
    assert [change.key for change in changes] == ["1", "2"]
    assert changes[0].revision < changes[1].revision


async def test_a_lease_can_be_ended_as_if_its_time_had_run_out(store: MemoryStore) -> None:
    lease = await store.grant(60)
    await store.put("a", b"", lease=lease)
    store.expire(lease)
    assert await store.get("a") is None
    assert store.next_end() is None
    with pytest.raises(LeaseLost):
        await store.put("a", b"", lease=lease)


async def test_keys_of_one_lease_end_in_one_revision(store: MemoryStore) -> None:
    lease = await store.grant(60)
    for key in "ab":
        last = await store.put(key, b"", lease=lease)
    async with contextlib.aclosing(store.watch("", last + 1)) as watch:
        await confirmed(watch)
        store.expire(lease)
        assert {change.revision for change in await anext(watch)} == {last + 1}


async def test_out_of_reach_nothing_works_and_nothing_is_lost(store: MemoryStore) -> None:
    far = store.another()
    last = await far.put("a", b"before")
    async with contextlib.aclosing(far.watch("", last + 1)) as watch:
        await confirmed(watch)
        far.reachable = False
        with pytest.raises(StoreUnavailable):
            await ended(watch)
    with pytest.raises(StoreUnavailable):
        await far.get("a")
    await store.put("a", b"meanwhile")
    far.reachable = True
    async with contextlib.aclosing(far.watch("", last + 1)) as watch:
        await confirmed(watch)
        assert [change.entry and change.entry.value for change in await seen(watch, 1)] == [b"meanwhile"]


async def test_wiping_loses_keys_leases_and_history_as_an_etcd_without_its_disk(store: MemoryStore) -> None:
    lease = await store.grant(60)
    for index in range(5):
        last = await store.put(str(index), b"", lease=lease)
    async with contextlib.aclosing(store.watch("", last + 1)) as watch:
        await confirmed(watch)
        store.wipe()
        with pytest.raises(StoreUnavailable):
            await ended(watch)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    listing = await store.list("")
    assert listing.entries == ()
    assert listing.revision < last
    async with contextlib.aclosing(store.watch("", last + 1)) as watch:
        with pytest.raises(HistoryCompacted):
            await ended(watch)


async def test_the_history_has_an_end_and_quiet_watches_survive_it(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "HISTORY_LIMIT", 10)
    async with contextlib.aclosing(store.watch("quiet", 1)) as watch:
        await confirmed(watch)
        for index in range(100):
            await store.put(f"busy/{index}", b"")
        await store.put("quiet", b"")
        assert [change.key for change in await seen(watch, 1)] == ["quiet"]
    async with contextlib.aclosing(store.watch("", 2)) as watch:
        with pytest.raises(HistoryCompacted):
            await ended(watch)
