"""A store within one process: for ``--standalone``, which needs no etcd, and for tests that play thousands of events.

It behaves as etcd does wherever a caller could tell the difference: one revision for the whole store, changes of one
revision reported together, leases that take their keys along, watches that start in the past, a history that ends.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torchelastic.errors import HistoryCompacted, LeaseLost, StoreUnavailable
from torchelastic.store.api import Change, Entry, Listing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

HISTORY_LIMIT: Final = 100_000
"""Changes that are kept at least; at most twice as many are."""


class MemoryStore:
    """A :class:`~torchelastic.store.api.Store` whose data end with the process.

    Every operation takes effect after one turn of the event loop, so that tasks meet here as they would in etcd.
    """

    def __init__(self) -> None:
        self._data = _Data()
        self._reachable = True
        self._closed = False
        self._watchers: dict[_Watcher, None] = {}

    def another(self) -> MemoryStore:
        """Return another client of the same data, which is closed or cut off by itself."""
        other = MemoryStore()
        other._data = self._data
        return other

    @property
    def reachable(self) -> bool:
        """Whether this client reaches the data; if set to False, it behaves as an etcd behind a broken network."""
        return self._reachable and not self._closed

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        self._reachable = reachable
        if not reachable:
            self._cut_watches()

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        return (await self._reached()).entries.get(key)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        data = await self._reached()
        return Listing(data.revision, tuple(data.entries[key] for key in data.below(prefix)), "memory")

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        data = await self._reached()
        data.write({key: value}, lease)
        return data.revision

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.compare_and_swap <torchelastic.store.api.Store.compare_and_swap>`."""
        data = await self._reached()
        entry = data.entries.get(key)
        if (entry.modified if entry else 0) != expected:
            return None
        if value is not None or entry:
            data.write({key: value}, lease)
        return data.revision

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        data = await self._reached()
        if key in data.entries:
            data.write({key: None})

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        data = await self._reached()
        if keys := data.below(prefix):
            data.write(dict.fromkeys(keys, None))

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        return (await self._reached()).grant(ttl, lease)

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        (await self._reached()).renew(lease)

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        (await self._reached()).end_lease(lease)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        data = await self._reached()
        watcher = data.watch(prefix, start)
        self._watchers[watcher] = None
        try:
            yield ()
            while True:
                changes = await watcher.batches.get()
                if watcher.broken:
                    raise StoreUnavailable("the watch of the store in memory was cut off")
                yield changes
        finally:
            data.watchers.pop(watcher, None)
            self._watchers.pop(watcher, None)

    async def close(self) -> None:
        """Close this client; the data stay for the others."""
        self._closed = True
        self._cut_watches()

    def expire(self, lease: int) -> None:
        """End a lease now, as if its time had run out."""
        self._data.end_lease(lease)

    def compact(self, revision: int) -> None:
        """Forget the history up to and including a revision, as an etcd with auto-compaction does."""
        self._data.compact(revision)

    def wipe(self) -> None:
        """Lose everything, the revision included, as an etcd that comes back without its data; cut all watches."""
        self._data.wipe()

    async def _reached(self) -> _Data:
        await asyncio.sleep(0)
        if not self.reachable:
            raise StoreUnavailable("the store in memory is closed" if self._closed else "the store is out of reach")
        return self._data

    def _cut_watches(self) -> None:
        for watcher in self._watchers:
            watcher.cut()


@dataclass(slots=True, eq=False)
class _Watcher:
    """A watch, and the changes that its reader has not taken yet."""

    prefix: str
    batches: asyncio.Queue[tuple[Change, ...]] = field(default_factory=asyncio.Queue)
    broken: bool = False

    def tell(self, changes: list[Change]) -> None:
        if mine := tuple(change for change in changes if change.key.startswith(self.prefix)):
            self.batches.put_nowait(mine)

    def cut(self) -> None:
        self.broken = True
        self.batches.put_nowait(())


class _Data:
    """The keys, leases and history that the clients of one store share. Nothing here waits."""

    def __init__(self) -> None:
        self._lease_ids = itertools.count(1)
        self.leases: dict[int, tuple[float, asyncio.TimerHandle]] = {}  # seconds, and the timer that ends it
        self.watchers: dict[_Watcher, None] = {}  # a set in the order of arrival, so that a test can be repeated
        self.wipe()

    def wipe(self) -> None:
        for _, timer in self.leases.values():
            timer.cancel()
        for watcher in self.watchers:
            watcher.cut()
        self.revision = 1  # as in an empty etcd
        self.compacted = 0
        self.entries: dict[str, Entry] = {}
        self.history: list[Change] = []
        self.leases.clear()
        self.lease_of: dict[str, int] = {}

    def write(self, values: dict[str, bytes | None], lease: int = 0) -> None:
        """Set keys (None: delete them) in one revision."""
        if lease and lease not in self.leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        self.revision += 1
        changes: list[Change] = []
        for key, value in values.items():
            self.lease_of.pop(key, None)
            old, entry = self.entries.pop(key, None), None
            if value is not None:
                entry = self.entries[key] = Entry(key, value, old.created if old else self.revision, self.revision)
                if lease:
                    self.lease_of[key] = lease
            changes.append(Change(key, entry, self.revision))
        self.history += changes
        if len(self.history) > 2 * HISTORY_LIMIT:
            self.compact(self.history[-HISTORY_LIMIT].revision)
        for watcher in self.watchers:
            watcher.tell(changes)

    def watch(self, prefix: str, start: int) -> _Watcher:
        """Add a watcher of the changes below the prefix from revision ``start`` (0: the next one) on."""
        start = start or self.revision + 1
        if start <= self.compacted:
            raise HistoryCompacted(f"revision {start} is no longer kept; the oldest one is {self.compacted + 1}")
        if start > self.revision + 1:
            raise HistoryCompacted(f"revision {start} is from a lost past: the store is at {self.revision}")
        watcher = _Watcher(prefix)
        first = bisect.bisect_left(self.history, start, key=lambda change: change.revision)
        watcher.tell(self.history[first:])
        self.watchers[watcher] = None
        return watcher

    def compact(self, revision: int) -> None:
        self.compacted = max(self.compacted, min(revision, self.revision))
        first = bisect.bisect_right(self.history, self.compacted, key=lambda change: change.revision)
        del self.history[:first]

    def below(self, prefix: str) -> list[str]:
        return sorted(key for key in self.entries if key.startswith(prefix))

    def grant(self, ttl: float, lease: int) -> int:
        if lease in self.leases:
            ttl = self.leases[lease][0]
        return self._start(lease or next(self._lease_ids), ttl)

    def renew(self, lease: int) -> None:
        if lease not in self.leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        self._start(lease, self.leases[lease][0])

    def end_lease(self, lease: int) -> None:
        """Delete a lease and its keys in one revision."""
        if lease in self.leases:
            self.leases.pop(lease)[1].cancel()
        if keys := sorted(key for key, held_by in self.lease_of.items() if held_by == lease):
            self.write(dict.fromkeys(keys, None))

    def _start(self, lease: int, ttl: float) -> int:
        if lease in self.leases:
            self.leases[lease][1].cancel()
        self.leases[lease] = (ttl, asyncio.get_running_loop().call_later(ttl, self.end_lease, lease))
        return lease
