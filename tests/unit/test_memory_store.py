"""The memory store behaves like etcd, and can be made unreachable or wiped by a test."""

from __future__ import annotations

import pytest

from tests.support.store_conformance import StoreBehaviour, ended, read_changes, watching
from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class TestMemoryStore(StoreBehaviour):
    @pytest.fixture
    def other(self, store: MemoryStore) -> MemoryStore:
        return store.another()

    @pytest.fixture
    def second(self) -> float:
        return 0.15


async def test_the_keys_of_an_expired_lease_are_deleted_in_one_revision(store: MemoryStore) -> None:
    lease = await store.grant(60)
    for key in "ab":
        last = await store.put(key, b"", lease=lease)
    async with watching(store, "") as watch:
        store.expire(lease)
        assert {change.revision for change in await anext(watch)} == {last + 1}
    with pytest.raises(LeaseLost):
        await store.put("a", b"", lease=lease)


async def test_an_unreachable_store_fails_but_keeps_its_data(store: MemoryStore) -> None:
    far = store.another()
    await far.put("a", b"before")
    async with watching(far, "") as watch:
        far.reachable = False
        with pytest.raises(StoreUnavailable):
            await ended(watch)
    with pytest.raises(StoreUnavailable):
        await far.get("a")
    far.reachable = True
    async with watching(far, "") as watch:
        await store.put("a", b"after")
        assert [change.entry and change.entry.value for change in await read_changes(watch, 1)] == [b"after"]


async def test_wiping_removes_keys_and_leases_and_resets_the_revisions(store: MemoryStore) -> None:
    lease = await store.grant(60)
    for index in range(5):
        last = await store.put(str(index), b"", lease=lease)
    async with watching(store, "") as watch:
        store.wipe()
        with pytest.raises(StoreUnavailable):
            await ended(watch)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    listing = await store.list("")
    assert listing.entries == ()
    assert listing.revision < last
