"""The memory store behaves like etcd, and can be made unreachable or wiped by a test."""

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


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def test_a_lease_can_be_expired(store: MemoryStore) -> None:
    lease = await store.grant(60)
    await store.put("a", b"", lease=lease)
    store.expire(lease)
    assert await store.get("a") is None
    with pytest.raises(LeaseLost):
        await store.put("a", b"", lease=lease)


async def test_the_keys_of_a_lease_are_deleted_in_one_revision(store: MemoryStore) -> None:
    lease = await store.grant(60)
    for key in "ab":
        last = await store.put(key, b"", lease=lease)
    async with contextlib.aclosing(store.watch("", last + 1)) as watch:
        await confirmed(watch)
        store.expire(lease)
        assert {change.revision for change in await anext(watch)} == {last + 1}


async def test_an_unreachable_store_fails_but_keeps_its_data(store: MemoryStore) -> None:
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


async def test_wiping_removes_keys_leases_and_history(store: MemoryStore) -> None:
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


async def test_the_history_is_compacted_without_breaking_idle_watches(
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
