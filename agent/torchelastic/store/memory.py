"""A store within one process: for ``--standalone``, which needs no etcd, and for tests that play thousands of events.

It behaves as etcd does wherever a caller could tell the difference: one revision for the whole store, changes of one
revision reported together, leases that take their keys along, watches that start in the past, a history that ends.
With a clock of the caller's (``now``) no timer runs, and a test decides what time it is.
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
    from collections.abc import AsyncGenerator, Callable

HISTORY_LIMIT: Final = 100_000
"""Changes that are kept at least; at most twice as many are."""


class MemoryStore:
    """A :class:`~torchelastic.store.api.Store` whose data end with the process.

    Every operation takes effect after one turn of the event loop, so that tasks meet here as they would in etcd.

    Args:
        now: the time in seconds, from any zero. None takes the event loop's clock, and leases then end by themselves;
            with a clock of the caller's they end at the next operation after their time, or at :meth:`tick`.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._data = _Data(now)
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
                await watcher.wake.wait()
                if watcher.broken:
                    raise StoreUnavailable("the watch of the store in memory was cut off")
                watcher.wake.clear()
                changes, watcher.pending = tuple(watcher.pending), []
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

    def tick(self) -> None:
        """End the leases whose time is over by the caller's clock; to be called after moving it on."""
        self._data.end_due_leases()

    def next_end(self) -> float | None:
        """Return when the next lease ends unless it is kept alive; None if there is no lease."""
        return min((lease.ends_at for lease in self._data.leases.values()), default=None)

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
        self._data.end_due_leases()
        return self._data

    def _cut_watches(self) -> None:
        for watcher in self._watchers:
            watcher.cut()


@dataclass(slots=True)
class _Lease:
    ttl: float
    ends_at: float
    keys: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Watcher:
    """A watch, and the changes that its reader has not taken yet."""

    prefix: str
    pending: list[Change] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False

    def tell(self, changes: list[Change]) -> None:
        if mine := [change for change in changes if change.key.startswith(self.prefix)]:
            self.pending += mine
            self.wake.set()

    def cut(self) -> None:
        self.broken = True
        self.wake.set()


class _Data:
    """The keys, leases and history that the clients of one store share. Nothing here waits."""

    def __init__(self, now: Callable[[], float] | None) -> None:
        self._now = now
        self._lease_ids = itertools.count(1)
        self.leases: dict[int, _Lease] = {}
        self.watchers: dict[_Watcher, None] = {}  # a set in the order of arrival, so that a test can be repeated
        self.wipe()

    def wipe(self) -> None:
        for lease in self.leases.values():
            if lease.timer is not None:
                lease.timer.cancel()
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
            before = self.lease_of.pop(key, 0)
            if before in self.leases:
                self.leases[before].keys.discard(key)
            old, entry = self.entries.pop(key, None), None
            if value is not None:
                entry = self.entries[key] = Entry(key, value, old.created if old else self.revision, self.revision)
                if lease:
                    self.leases[lease].keys.add(key)
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

    def grant(self, ttl: float, lease: int = 0) -> int:
        lease = lease or next(self._lease_ids)
        self.leases.setdefault(lease, _Lease(ttl, 0.0))
        self.renew(lease)
        return lease

    def renew(self, lease: int) -> None:
        kept = self.leases.get(lease)
        if kept is None:
            raise LeaseLost(f"lease {lease:x} has ended")
        if kept.timer is not None:
            kept.timer.cancel()
        if self._now is not None:
            kept.ends_at = self._now() + kept.ttl
        else:
            loop = asyncio.get_running_loop()
            kept.ends_at = loop.time() + kept.ttl
            kept.timer = loop.call_at(kept.ends_at, self.end_lease, lease)

    def end_lease(self, lease: int) -> None:
        """Delete a lease and its keys in one revision."""
        ended = self.leases.pop(lease, None)
        if ended is None:
            return
        if ended.timer is not None:
            ended.timer.cancel()
        if ended.keys:
            self.write(dict.fromkeys(sorted(ended.keys), None))

    def end_due_leases(self) -> None:
        """End the leases whose time is over by the caller's clock, in the order of their ends."""
        if self._now is None:
            return
        now = self._now()
        for lease in sorted(self.leases, key=lambda lease: (self.leases[lease].ends_at, lease)):
            if self.leases[lease].ends_at > now:
                break
            self.end_lease(lease)
