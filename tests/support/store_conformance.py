"""Tests of the guarantees of a store, which the tests of each adapter inherit.

The inheriting class has the fixtures ``store`` (a store), ``other`` (another client of the same data) and ``second``
(the duration of one second of a lease; at least 1 with etcd).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.protocol.keys import run_lease
from torchelastic.store.api import Listing
from torchelastic.store.client import RunLease, follow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from torchelastic.store.api import Change, Store

HANGS = 30.0
"""Seconds after which a waiting test fails."""


@contextlib.asynccontextmanager
async def watching(store: Store, prefix: str) -> AsyncIterator[AsyncGenerator[tuple[Change, ...], None]]:
    """Open a watch within the block; the block begins when the store has confirmed the watch."""
    async with contextlib.aclosing(store.watch(prefix)) as watch:
        async with asyncio.timeout(HANGS):
            assert await anext(watch) == ()
        yield watch


async def read_changes(watch: AsyncGenerator[tuple[Change, ...], None], count: int) -> list[Change]:
    """Read this number of changes from a watch."""
    changes: list[Change] = []
    async with asyncio.timeout(HANGS):
        while len(changes) < count:
            changes += await anext(watch)
    assert len(changes) == count
    return changes


async def ended(watch: AsyncGenerator[tuple[Change, ...], None]) -> None:
    """Read a watch until the watch ends or fails."""
    async with asyncio.timeout(HANGS):
        async for _ in watch:
            pass


async def keys_below(store: Store, prefix: str) -> list[str]:
    """Return the keys below a prefix, relative to the prefix."""
    return [entry.key.removeprefix(prefix) for entry in (await store.list(prefix)).entries]


class StoreBehavior:
    """Tests of the guarantees of a store, which the tests of each adapter inherit."""

    async def test_a_key_has_its_value_and_revisions_until_it_is_deleted(self, store: Store, prefix: str) -> None:
        assert await store.get(prefix + "a") is None
        first = await store.put(prefix + "a", b"one")
        second = await store.put(prefix + "a", b"two")
        await store.put(prefix + "ab", b"")
        entry = await store.get(prefix + "a")
        assert entry is not None
        assert (entry.key, entry.value) == (prefix + "a", b"two")
        assert (entry.create_revision, entry.mod_revision) == (first, second)
        assert second > first
        for _ in range(2):
            await store.delete(prefix + "a")
            assert await keys_below(store, prefix) == ["ab"]

    async def test_a_listing_has_the_keys_below_the_prefix_in_order(
        self, store: Store, other: Store, prefix: str
    ) -> None:
        for name in ("n/2", "n/10", "n/1", "n0", "n", "o/1"):
            await store.put(prefix + name, name.encode())
        last = await store.put(prefix + "elsewhere", b"")
        for below, keys in (("n/", ["n/1", "n/10", "n/2"]), ("nothing/", [])):
            listings = [await client.list(prefix + below) for client in (store, other)]
            for listing in listings:
                assert [entry.key.removeprefix(prefix) for entry in listing.entries] == keys
                assert [entry.value.decode() for entry in listing.entries] == keys
                assert listing.revision >= last
            assert listings[0].cluster_id == listings[1].cluster_id != ""
        for _ in range(2):
            await store.delete_prefix(prefix + "n/")
            assert await keys_below(store, prefix) == ["elsewhere", "n", "n0", "o/1"]

    async def test_a_swap_creates_changes_and_deletes_only_from_the_last_revision(
        self, store: Store, prefix: str
    ) -> None:
        key = prefix + "a"
        first = await store.compare_and_swap(key, b"one", expected=0)
        assert first is not None
        assert await store.compare_and_swap(key, b"other", expected=0) is None
        second = await store.compare_and_swap(key, b"two", expected=first)
        assert second is not None
        for value in (b"three", None):
            assert await store.compare_and_swap(key, value, expected=first) is None
        entry = await store.get(key)
        assert entry is not None
        assert (entry.value, entry.create_revision, entry.mod_revision) == (b"two", first, second)
        deleted = await store.compare_and_swap(key, None, expected=second)
        assert deleted is not None
        assert deleted > second
        assert await store.get(key) is None
        assert await store.compare_and_swap(key, b"again", expected=second) is None
        assert await store.compare_and_swap(key, b"again", expected=0) is not None

    async def test_revoking_a_lease_deletes_its_keys_and_it_cannot_be_used_again(
        self, store: Store, prefix: str
    ) -> None:
        lease = await store.grant(60)
        await store.put(prefix + "a", b"", lease=lease)
        await store.compare_and_swap(prefix + "b", b"", expected=0, lease=lease)
        free = await store.put(prefix + "free", b"before")
        await store.revoke(lease)
        with pytest.raises(LeaseLost):
            await store.keep_alive(lease)
        with pytest.raises(LeaseLost):
            await store.put(prefix + "free", b"after", lease=lease)
        with pytest.raises(LeaseLost):
            await store.compare_and_swap(prefix + "free", b"after", expected=free, lease=lease)
        await store.revoke(lease)
        assert [(entry.key, entry.value) for entry in (await store.list(prefix)).entries] == [
            (prefix + "free", b"before")
        ]

    async def test_any_text_can_be_a_key_and_any_bytes_a_value(self, store: Store, other: Store, prefix: str) -> None:
        odd = ("_hidden", "_/_", ".", "..", "a b", "100%", "%2F", "~", "~41", "+&=?#", "a//b", "ключ", "\udcff", "\n")
        values = {prefix + "odd/" + name: f"\0{name}".encode(errors="surrogateescape") for name in odd}
        values[prefix + "odd/long"] = b"\xff" * 100_000
        async with watching(other, prefix) as watch:
            for key, value in values.items():
                revision = await store.compare_and_swap(key, b"", expected=0)
                assert revision is not None, key
                await store.compare_and_swap(key, value, expected=revision)
            assert [change.key for change in await read_changes(watch, 2 * len(values))] == [
                key for key in values for _ in "12"
            ]
        read = {key: await other.get(key) for key in values}
        assert {key: entry and entry.value for key, entry in read.items()} == values
        assert {entry.key: entry for entry in (await other.list(prefix + "odd/")).entries} == read
        for key in [*values][::2]:
            await store.delete(key)
        assert {entry.key for entry in (await other.list(prefix + "odd/")).entries} == {*[*values][1::2]}

    async def test_only_one_of_many_concurrent_swaps_succeeds(self, store: Store, other: Store, prefix: str) -> None:
        swaps = (
            client.compare_and_swap(prefix + "a", str(index).encode(), expected=0)
            for index, client in enumerate([store, other] * 10)
        )
        revisions = await asyncio.gather(*swaps)
        [winner] = [index for index, revision in enumerate(revisions) if revision is not None]
        entry = await store.get(prefix + "a")
        assert entry is not None
        assert entry.value == str(winner).encode()

    async def test_an_expired_lease_deletes_its_keys_and_a_watch_reports_this(
        self, store: Store, prefix: str, second: float
    ) -> None:
        lease = await store.grant(second)
        names = {prefix + name for name in "abc"}
        async with watching(store, prefix) as watch:
            for name in names:
                last = await store.put(name, b"", lease=lease)
            changes = (await read_changes(watch, 2 * len(names)))[len(names) :]
        assert {change.key for change in changes} == names
        assert all(change.entry is None and change.revision > last for change in changes)
        assert (await store.list(prefix)).entries == ()

    @pytest.mark.parametrize("shared", [False, True])
    async def test_a_lease_that_is_kept_alive_or_granted_again_does_not_expire(
        self, store: Store, prefix: str, second: float, shared: bool
    ) -> None:
        kept = await store.grant(3 * second, lease=run_lease(prefix) if shared else 0)
        expiring, clock = await store.grant(3 * second), await store.grant(second)
        async with watching(store, prefix) as watch:
            for name, lease in (("kept", kept), ("expiring", expiring), ("clock", clock)):
                await store.put(prefix + name, b"", lease=lease)
            assert [change.key for change in await read_changes(watch, 4)][3:] == [prefix + "clock"]
            await (store.grant(3 * second, lease=kept) if shared else store.keep_alive(kept))
            assert [change.key for change in await read_changes(watch, 1)] == [prefix + "expiring"]
        await store.keep_alive(kept)

    async def test_clients_that_choose_the_same_lease_id_share_the_lease(
        self, store: Store, other: Store, prefix: str
    ) -> None:
        chosen = run_lease(prefix)
        assert await store.grant(60, lease=chosen) == chosen
        await store.put(prefix + "mine", b"", lease=chosen)
        assert await other.grant(60, lease=chosen) == chosen
        await other.put(prefix + "theirs", b"", lease=chosen)
        assert await keys_below(store, prefix) == ["mine", "theirs"]
        await other.revoke(chosen)
        assert await keys_below(store, prefix) == []
        assert await store.grant(60, lease=chosen) == chosen
        await store.keep_alive(chosen)

    async def test_run_keys_can_be_written_before_and_after_the_run_lease_is_lost(
        self, store: Store, prefix: str
    ) -> None:
        lease = RunLease(store, prefix)
        first = await lease.compare_and_swap(prefix + "a", b"one", expected=0)
        await store.revoke(run_lease(prefix))
        assert first is not None
        assert await lease.compare_and_swap(prefix + "a", b"two", expected=first) is None
        second = await lease.compare_and_swap(prefix + "a", b"two", expected=0)
        assert second is not None
        await store.put(prefix + "free", b"")
        await store.revoke(run_lease(prefix))
        await lease.put(prefix + "b", b"")
        await lease.end()
        assert await keys_below(store, prefix) == ["free"]

    async def test_run_keys_exist_while_at_least_one_client_keeps_the_run_lease_alive(
        self, store: Store, other: Store, prefix: str, second: float
    ) -> None:
        keepers = [RunLease(client, prefix, ttl=2 * second) for client in (store, other)]
        keeping = [asyncio.create_task(keeper.keep()) for keeper in keepers]
        async with watching(store, prefix) as watch:
            await keepers[0].put(prefix + "run", b"")
            keeping[0].cancel()
            clock = await store.grant(3 * second)
            await store.put(prefix + "clock", b"", lease=clock)
            assert [change.key for change in await read_changes(watch, 3)][1:] == [prefix + "clock"] * 2
            assert await store.get(prefix + "run") is not None
            keeping[1].cancel()
            assert [change.key for change in await read_changes(watch, 1)] == [prefix + "run"]
        for task in await asyncio.gather(*keeping, return_exceptions=True):
            assert isinstance(task, asyncio.CancelledError)

    async def test_keeping_a_lease_alive_changes_no_revision(self, store: Store, other: Store, prefix: str) -> None:
        own, shared = await store.grant(60), await store.grant(60, lease=run_lease(prefix))
        async with watching(other, prefix) as watch:
            for lease in (own, shared):
                await store.put(f"{prefix}{lease}", b"before", lease=lease)
            seen_by_other = {change.key: change.revision for change in await read_changes(watch, 2)}
            listed = {entry.key: entry.mod_revision for entry in (await store.list(prefix)).entries}
            for _ in range(3):
                await store.keep_alive(own)
                await other.grant(60, lease=shared)
            for client in (store, other):
                assert {entry.key: entry.mod_revision for entry in (await client.list(prefix)).entries} == listed
                for key, revision in listed.items():
                    entry = await client.get(key)
                    assert entry is not None
                    assert entry.mod_revision == revision
            # A client that knows a key's last write, from a watch or a listing, can still swap the key.
            for key, revision in seen_by_other.items():
                assert await other.compare_and_swap(key, b"after", expected=revision) is not None
            assert [change.entry and change.entry.value for change in await read_changes(watch, 2)] == [b"after"] * 2
        for key, revision in listed.items():
            assert await store.compare_and_swap(key, b"too late", expected=revision) is None

    async def test_a_key_that_moved_to_another_lease_is_not_kept_alive_by_its_former_lease(
        self, store: Store, other: Store, prefix: str, second: float
    ) -> None:
        first, other_lease = await store.grant(60), await other.grant(second)
        await store.put(prefix + "mine", b"", lease=first)
        revision = await store.put(prefix + "taken", b"", lease=first)
        async with watching(store, prefix) as watch:
            assert await other.compare_and_swap(prefix + "taken", b"", expected=revision, lease=other_lease) is not None
            await store.keep_alive(first)
            assert [change.entry and change.entry.value for change in await read_changes(watch, 2)] == [b"", None]
            await store.keep_alive(first)
        await store.revoke(first)
        assert (await store.list(prefix)).entries == ()

    async def test_a_key_that_is_written_again_belongs_only_to_its_new_lease(self, store: Store, prefix: str) -> None:
        first, second = await store.grant(60), await store.grant(60)
        await store.put(prefix + "freed", b"", lease=first)
        await store.put(prefix + "moved", b"", lease=first)
        await store.put(prefix + "freed", b"")
        await store.put(prefix + "moved", b"", lease=second)
        await store.revoke(first)
        assert await keys_below(store, prefix) == ["freed", "moved"]
        await store.revoke(second)
        assert await keys_below(store, prefix) == ["freed"]

    async def test_a_watch_reports_each_change_once_and_in_order(self, store: Store, prefix: str) -> None:
        await store.put(prefix + "w/a", b"before")
        async with watching(store, prefix + "w/") as watch:
            one = await store.put(prefix + "w/a", b"one")
            two = await store.put(prefix + "w/b", b"two")
            await store.put(prefix + "x", b"not below")
            await store.delete(prefix + "w/a")
            three = await store.put(prefix + "w/b", b"three")
            changes = await read_changes(watch, 4)
        assert [(change.key, change.entry and change.entry.value) for change in changes] == [
            (prefix + "w/a", b"one"),
            (prefix + "w/b", b"two"),
            (prefix + "w/a", None),
            (prefix + "w/b", b"three"),
        ]
        assert [changes[index].revision for index in (0, 1, 3)] == [one, two, three]
        assert changes[3].entry is not None
        assert (changes[3].entry.create_revision, changes[3].entry.mod_revision) == (two, three)

    async def test_a_follower_receives_every_change_from_concurrent_writers(
        self, store: Store, other: Store, prefix: str
    ) -> None:
        async def write(number: int) -> None:
            for index in range(50):
                await other.put(f"{prefix}{number}", str(index).encode())

        for _ in range(3):
            values: dict[str, bytes] = {}
            last = 0
            async with asyncio.timeout(HANGS), asyncio.TaskGroup() as writers:
                for number in range(4):
                    writers.create_task(write(number))
                async with contextlib.aclosing(follow(store, prefix)) as news:
                    async for each in news:
                        changes = each.entries if isinstance(each, Listing) else [change.entry for change in each]
                        for entry in changes:
                            assert entry is not None
                            assert isinstance(each, Listing) or last < entry.mod_revision
                            last = max(last, entry.mod_revision)
                            values[entry.key] = entry.value
                        if [*values.values()] == [b"49"] * 4:
                            break
            await store.delete_prefix(prefix)

    async def test_a_slow_reader_does_not_block_writers(self, store: Store, other: Store, prefix: str) -> None:
        async with watching(store, prefix) as watch:
            async with asyncio.timeout(HANGS):
                for index in range(500):
                    await other.put(f"{prefix}{index}", b"x" * 1000)
            changes = await read_changes(watch, 500)
        assert [change.key for change in changes] == [f"{prefix}{index}" for index in range(500)]

    async def test_closing_a_client_ends_only_its_own_watches(self, store: Store, other: Store, prefix: str) -> None:
        async with watching(store, prefix) as mine, watching(other, prefix) as theirs:
            await store.close()
            with pytest.raises(StoreUnavailable):
                await ended(mine)
            with pytest.raises(StoreUnavailable):
                await store.get(prefix + "a")
            await other.put(prefix + "a", b"")
            assert [change.key for change in await read_changes(theirs, 1)] == [prefix + "a"]
