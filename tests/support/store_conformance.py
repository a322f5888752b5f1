"""The behaviour of every adapter of the store: tests for a class that inherits them.

The class has the fixtures ``store`` (a store), ``other`` (another client of the same data), ``second`` (the duration of
one second of a lease; at least 1 with etcd) and ``compact`` (forgets the history up to and including a revision).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from torchelastic.errors import HistoryCompacted, LeaseLost, StoreUnavailable
from torchelastic.protocol import run_lease
from torchelastic.store.run_lease import RunLease

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from torchelastic.store import Change, Store

HANGS = 30.0
"""Seconds after which a test that waits has failed."""


async def confirmed(watch: AsyncGenerator[tuple[Change, ...], None]) -> None:
    """Wait for the empty batch with which every watch begins."""
    async with asyncio.timeout(HANGS):
        assert await anext(watch) == ()


async def seen(watch: AsyncGenerator[tuple[Change, ...], None], count: int) -> list[Change]:
    """This many changes of a watch."""
    changes: list[Change] = []
    async with asyncio.timeout(HANGS):
        while len(changes) < count:
            changes += await anext(watch)
    assert len(changes) == count
    return changes


async def ended(watch: AsyncGenerator[tuple[Change, ...], None]) -> None:
    """Read a watch until it fails."""
    async with asyncio.timeout(HANGS):
        async for _ in watch:
            pass


class StoreBehaviour:
    """Tests of a store's guarantees."""

    async def test_a_key_is_read_back_with_its_revisions_until_it_is_deleted(self, store: Store, prefix: str) -> None:
        assert await store.get(prefix + "a") is None
        first = await store.put(prefix + "a", b"one")
        second = await store.put(prefix + "a", b"two")
        await store.put(prefix + "ab", b"")
        entry = await store.get(prefix + "a")
        assert entry is not None
        assert (entry.key, entry.value) == (prefix + "a", b"two")
        assert (entry.created, entry.modified) == (first, second)
        assert second > first
        for _ in range(2):
            await store.delete(prefix + "a")
            assert [entry.key for entry in (await store.list(prefix)).entries] == [prefix + "ab"]

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
            left = [entry.key.removeprefix(prefix) for entry in (await store.list(prefix)).entries]
            assert left == ["elsewhere", "n", "n0", "o/1"]

    async def test_a_swap_creates_changes_and_deletes_only_from_the_last_revision(
        self, store: Store, prefix: str
    ) -> None:
        key = prefix + "a"
        before = (await store.list(prefix)).revision
        assert await store.compare_and_swap(key, None, expected=0) == before
        assert (await store.list(prefix)).revision == before
        first = await store.compare_and_swap(key, b"one", expected=0)
        assert first is not None
        assert await store.compare_and_swap(key, b"other", expected=0) is None
        second = await store.compare_and_swap(key, b"two", expected=first)
        assert second is not None
        for value in (b"three", None):
            assert await store.compare_and_swap(key, value, expected=first) is None
        entry = await store.get(key)
        assert entry is not None
        assert (entry.value, entry.created, entry.modified) == (b"two", first, second)
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

    @pytest.mark.parametrize("value", [b"", b"\0\xff\n", b"x" * 100_000], ids=["empty", "binary", "long"])
    async def test_any_bytes_can_be_a_value(self, store: Store, prefix: str, value: bytes) -> None:
        await store.put(prefix + "ключ%2F", value)
        entry = await store.get(prefix + "ключ%2F")
        assert entry is not None
        assert entry.value == value

    async def test_any_text_can_be_a_key(self, store: Store, other: Store, prefix: str) -> None:
        odd = ("_hidden", "_/_", ".", "..", "a b", "100%", "%2F", "~", "~41", "+&=?#", "a//b", "ключ", "\udcff", "\n")
        keys = [prefix + "odd/" + name for name in odd]
        async with contextlib.aclosing(other.watch(prefix, 0)) as watch:
            await confirmed(watch)
            for number, key in enumerate(keys):
                revision = await store.compare_and_swap(key, b"", expected=0)
                assert revision is not None, key
                await store.compare_and_swap(key, str(number).encode(), expected=revision)
            assert [change.key for change in await seen(watch, 2 * len(keys))] == [key for key in keys for _ in "12"]
        read = {key: await other.get(key) for key in keys}
        assert [entry and entry.value for entry in read.values()] == [
            str(number).encode() for number in range(len(odd))
        ]
        assert {entry.key: entry for entry in (await other.list(prefix + "odd/")).entries} == read
        for key in keys[::2]:
            await store.delete(key)
        assert {entry.key for entry in (await other.list(prefix + "odd/")).entries} == set(keys[1::2])

    async def test_of_many_swaps_at_once_one_wins(self, store: Store, other: Store, prefix: str) -> None:
        swaps = (
            client.compare_and_swap(prefix + "a", str(index).encode(), expected=0)
            for index, client in enumerate([store, other] * 10)
        )
        revisions = await asyncio.gather(*swaps)
        winners = [index for index, revision in enumerate(revisions) if revision is not None]
        assert len(winners) == 1
        entry = await store.get(prefix + "a")
        assert entry is not None
        assert entry.value == str(winners[0]).encode()

    async def test_the_end_of_a_lease_takes_its_keys_along_and_a_watch_tells(
        self, store: Store, prefix: str, second: float
    ) -> None:
        lease = await store.grant(second)
        names = {prefix + name for name in "abc"}
        for name in names:
            last = await store.put(name, b"", lease=lease)
        async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
            await confirmed(watch)
            changes = await seen(watch, len(names))
        assert {change.key for change in changes} == names
        assert all(change.entry is None and change.revision > last for change in changes)
        assert (await store.list(prefix)).entries == ()

    async def test_a_lease_that_is_kept_alive_outlives_one_that_is_not(
        self, store: Store, prefix: str, second: float
    ) -> None:
        kept, left, clock = [await store.grant(seconds * second) for seconds in (3, 3, 1)]
        last = 0
        for name, lease in (("kept", kept), ("left", left), ("clock", clock)):
            last = await store.put(prefix + name, b"", lease=lease)
        async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
            await confirmed(watch)
            assert [change.key for change in await seen(watch, 1)] == [prefix + "clock"]
            await store.keep_alive(kept)
            assert [change.key for change in await seen(watch, 1)] == [prefix + "left"]
        await store.keep_alive(kept)

    async def test_a_lease_may_have_an_id_of_the_callers_choice_under_which_all_find_the_same_one(
        self, store: Store, other: Store, prefix: str
    ) -> None:
        chosen = run_lease(prefix)
        assert await store.grant(60, lease=chosen) == chosen
        await store.put(prefix + "mine", b"", lease=chosen)
        assert await other.grant(60, lease=chosen) == chosen
        await other.put(prefix + "theirs", b"", lease=chosen)
        assert len((await store.list(prefix)).entries) == 2
        await other.revoke(chosen)
        assert (await store.list(prefix)).entries == ()
        assert await store.grant(60, lease=chosen) == chosen
        await store.keep_alive(chosen)

    async def test_granting_a_lease_that_is_there_keeps_it_alive(
        self, store: Store, prefix: str, second: float
    ) -> None:
        chosen = run_lease(prefix)
        left, clock = await store.grant(3 * second), await store.grant(second)
        await store.grant(3 * second, lease=chosen)
        last = 0
        for name, lease in (("kept", chosen), ("left", left), ("clock", clock)):
            last = await store.put(prefix + name, b"", lease=lease)
        async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
            await confirmed(watch)
            assert [change.key for change in await seen(watch, 1)] == [prefix + "clock"]
            await store.grant(3 * second, lease=chosen)
            assert [change.key for change in await seen(watch, 1)] == [prefix + "left"]
        await store.keep_alive(chosen)

    async def test_lasting_keys_are_written_before_and_after_their_lease_was_lost(
        self, store: Store, prefix: str
    ) -> None:
        lasting = RunLease(store, prefix)
        first = await lasting.compare_and_swap(prefix + "a", b"one", expected=0)
        await store.revoke(run_lease(prefix))
        assert first is not None
        assert await lasting.compare_and_swap(prefix + "a", b"two", expected=first) is None
        second = await lasting.compare_and_swap(prefix + "a", b"two", expected=0)
        assert second is not None
        await store.put(prefix + "free", b"")
        await store.revoke(run_lease(prefix))
        await lasting.put(prefix + "b", b"")
        await lasting.end()
        assert [entry.key for entry in (await store.list(prefix)).entries] == [prefix + "free"]

    async def test_lasting_keys_stay_as_long_as_one_of_many_keeps_them_and_no_longer(
        self, store: Store, other: Store, prefix: str, second: float
    ) -> None:
        keepers = [RunLease(client, prefix, ttl=2 * second) for client in (store, other)]
        keeping = [asyncio.create_task(keeper.keep()) for keeper in keepers]
        last = await keepers[0].put(prefix + "lasting", b"")
        async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
            await confirmed(watch)
            keeping[0].cancel()
            clock = await store.grant(3 * second)
            await store.put(prefix + "clock", b"", lease=clock)
            assert [change.key for change in await seen(watch, 2)] == [prefix + "clock"] * 2
            assert await store.get(prefix + "lasting") is not None
            keeping[1].cancel()
            assert [change.key for change in await seen(watch, 1)] == [prefix + "lasting"]
        for task in await asyncio.gather(*keeping, return_exceptions=True):
            assert isinstance(task, asyncio.CancelledError)

    async def test_keeping_a_lease_alive_changes_nothing_that_anybody_sees(
        self, store: Store, other: Store, prefix: str
    ) -> None:
        own, shared = await store.grant(60), await store.grant(60, lease=run_lease(prefix))
        async with contextlib.aclosing(other.watch(prefix, 0)) as watch:
            await confirmed(watch)
            for lease in (own, shared):
                await store.put(f"{prefix}{lease}", b"before", lease=lease)
            seen_by_other = {change.key: change.revision for change in await seen(watch, 2)}
            listed = {entry.key: entry.modified for entry in (await store.list(prefix)).entries}
            for _ in range(3):
                await store.keep_alive(own)
                await other.grant(60, lease=shared)
            for client in (store, other):
                assert {entry.key: entry.modified for entry in (await client.list(prefix)).entries} == listed
                for key, revision in listed.items():
                    entry = await client.get(key)
                    assert entry is not None
                    assert entry.modified == revision
            # Who has seen a key's last write may still swap it, whether it was told of it or has read it.
            for key, revision in seen_by_other.items():
                assert await other.compare_and_swap(key, b"after", expected=revision) is not None
            assert [change.entry and change.entry.value for change in await seen(watch, 2)] == [b"after"] * 2
        for key, revision in listed.items():
            assert await store.compare_and_swap(key, b"too late", expected=revision) is None

    async def test_a_key_that_somebody_else_has_taken_over_is_not_kept_alive_with_the_lease_that_it_had(
        self, store: Store, other: Store, prefix: str, second: float
    ) -> None:
        first, taking = await store.grant(60), await other.grant(second)
        await store.put(prefix + "mine", b"", lease=first)
        revision = await store.put(prefix + "taken", b"", lease=first)
        taken = await other.compare_and_swap(prefix + "taken", b"", expected=revision, lease=taking)
        assert taken is not None
        async with contextlib.aclosing(store.watch(prefix, taken + 1)) as watch:
            await confirmed(watch)
            await store.keep_alive(first)
            assert [(change.key, change.entry) for change in await seen(watch, 1)] == [(prefix + "taken", None)]
            await store.keep_alive(first)
        await store.revoke(first)
        assert (await store.list(prefix)).entries == ()

    async def test_a_key_set_anew_hangs_on_its_new_lease_alone(self, store: Store, prefix: str) -> None:
        first, second = await store.grant(60), await store.grant(60)
        await store.put(prefix + "freed", b"", lease=first)
        await store.put(prefix + "moved", b"", lease=first)
        await store.put(prefix + "freed", b"")
        await store.put(prefix + "moved", b"", lease=second)
        await store.revoke(first)
        assert len((await store.list(prefix)).entries) == 2
        await store.revoke(second)
        assert [entry.key for entry in (await store.list(prefix)).entries] == [prefix + "freed"]

    async def test_a_watch_tells_each_change_once_and_in_order_from_a_past_revision(
        self, store: Store, prefix: str
    ) -> None:
        start = (await store.list(prefix)).revision + 1
        one = await store.put(prefix + "w/a", b"one")
        two = await store.put(prefix + "w/a", b"two")
        await store.put(prefix + "x", b"not below")
        await store.delete(prefix + "w/a")
        async with contextlib.aclosing(store.watch(prefix + "w/", start)) as watch:
            await confirmed(watch)
            past = await seen(watch, 3)
            three = await store.put(prefix + "w/b", b"three")
            new = await seen(watch, 1)
        assert [(change.key, change.entry and change.entry.value) for change in past + new] == [
            (prefix + "w/a", b"one"),
            (prefix + "w/a", b"two"),
            (prefix + "w/a", None),
            (prefix + "w/b", b"three"),
        ]
        assert [change.revision for change in past[:2] + new] == [one, two, three]
        assert past[1].entry is not None
        assert (past[1].entry.created, past[1].entry.modified) == (one, two)

    async def test_a_watch_started_again_after_the_last_revision_goes_on_without_a_gap(
        self, store: Store, other: Store, prefix: str
    ) -> None:
        start = (await store.list(prefix)).revision + 1

        async def write(number: int) -> None:
            for index in range(50):
                await other.put(f"{prefix}{number}/{index}", b"")

        told: list[Change] = []
        async with asyncio.TaskGroup() as writers:
            for number in range(4):
                writers.create_task(write(number))
            while len(told) < 200:
                async with contextlib.aclosing(store.watch(prefix, start)) as watch:
                    await confirmed(watch)
                    told += await anext(watch)
                    start = told[-1].revision + 1
        assert len({change.revision for change in told}) == 200
        assert [change.revision for change in told] == sorted(change.revision for change in told)
        for number in range(4):
            mine = [change.key for change in told if change.key.startswith(f"{prefix}{number}/")]
            assert mine == [f"{prefix}{number}/{index}" for index in range(50)]

    async def test_a_reader_that_does_not_read_holds_nobody_up(self, store: Store, other: Store, prefix: str) -> None:
        start = (await store.list(prefix)).revision + 1
        async with contextlib.aclosing(store.watch(prefix, start)) as watch:
            await confirmed(watch)
            async with asyncio.timeout(HANGS):
                for index in range(500):
                    await other.put(f"{prefix}{index}", b"x" * 1000)
            told = await seen(watch, 500)
        assert [change.key for change in told] == [f"{prefix}{index}" for index in range(500)]

    async def test_a_forgotten_past_cannot_be_watched(
        self, store: Store, prefix: str, compact: Callable[[int], Awaitable[None]]
    ) -> None:
        first = await store.put(prefix + "a", b"one")
        await store.put(prefix + "a", b"two")
        third = await store.put(prefix + "a", b"three")
        await compact(third)
        async with contextlib.aclosing(store.watch(prefix, first)) as watch:
            with pytest.raises(HistoryCompacted):
                await ended(watch)
        async with contextlib.aclosing(store.watch(prefix, third + 1)) as watch:
            await confirmed(watch)

    async def test_a_revision_that_the_store_has_not_reached_is_from_a_lost_past(
        self, store: Store, prefix: str
    ) -> None:
        ahead = await store.put(prefix + "a", b"") + 1000
        async with contextlib.aclosing(store.watch(prefix, ahead)) as watch:
            with pytest.raises(HistoryCompacted):
                await ended(watch)

    async def test_closing_ends_the_watches_of_this_client_alone(self, store: Store, other: Store, prefix: str) -> None:
        start = (await store.list(prefix)).revision + 1
        async with (
            contextlib.aclosing(store.watch(prefix, start)) as mine,
            contextlib.aclosing(other.watch(prefix, start)) as theirs,
        ):
            await confirmed(mine)
            await confirmed(theirs)
            await store.close()
            with pytest.raises(StoreUnavailable):
                await ended(mine)
            with pytest.raises(StoreUnavailable):
                await store.get(prefix + "a")
            await other.put(prefix + "a", b"")
            assert [change.key for change in await seen(theirs, 1)] == [prefix + "a"]
