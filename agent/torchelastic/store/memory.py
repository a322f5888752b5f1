"""A store within one process: for ``--standalone``, which needs no etcd, and for tests that play thousands of events.

It keeps to what etcd does wherever a caller could tell the difference: one revision for the whole store, changes of
one revision told together, leases that take their keys along, watches that start in the past, a history that ends
somewhere. Time can be the caller's own: with ``now`` given no timer runs, and a test says what time it is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from torchelastic.errors import StoreUnavailable
from torchelastic.store.api import Listing
from torchelastic.store.memory_data import MemoryData

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from torchelastic.store.api import Change, Entry
    from torchelastic.store.memory_data import Watcher


class MemoryStore:
    """A :class:`~torchelastic.store.api.Store` whose data live and die with the process.

    Every operation takes effect after one turn of the event loop, so that tasks meet here as they would in etcd. A slow
    reader of a watch holds nobody up.

    Args:
        now: the time in seconds, from any zero. None takes the event loop's clock, and leases then end by themselves;
            with a clock of the caller's own they end at the next operation after their time, or at :meth:`tick`.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._data = MemoryData(now)
        self._reachable = True
        self._closed = False
        self._watchers: dict[Watcher, None] = {}

    def another(self) -> MemoryStore:
        """Another client of the same data, closed or cut off by itself."""
        other = MemoryStore()
        other._data = self._data
        return other

    @property
    def reachable(self) -> bool:
        """Whether this client reaches the data; set to False it behaves as an etcd behind a broken network."""
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
        return Listing(data.revision, tuple(data.entries[key] for key in data.below(prefix)))

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        data = await self._reached()
        data.write({key: value}, lease)
        return data.revision

    async def swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.swap <torchelastic.store.api.Store.swap>`."""
        data = await self._reached()
        entry = data.entries.get(key)
        if (entry.modified if entry else 0) != expected:
            return None
        if value is not None:
            data.write({key: value}, lease)
        elif entry:
            data.write({key: None})
        return data.revision

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        data = await self._reached()
        if key in data.entries:
            data.write({key: None})

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        data = await self._reached()
        keys = data.below(prefix)
        if keys:
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
        """Stop being a client of the data; they stay for the others. Leases are left to end by themselves."""
        self._closed = True
        self._cut_watches()

    def expire(self, lease: int) -> None:
        """End a lease now, as if its time had run out."""
        self._data.end_lease(lease)

    def tick(self) -> None:
        """End the leases whose time is over by the clock given as ``now``; to be called after moving it on."""
        self._data.end_due_leases()

    def next_end(self) -> float | None:
        """When the next lease ends if nobody keeps it alive; None where there is no lease."""
        return min((lease.ends_at for lease in self._data.leases.values()), default=None)

    def compact(self, revision: int) -> None:
        """Forget the history up to and including a revision, as an etcd with auto-compaction does."""
        self._data.compact(revision)

    def wipe(self) -> None:
        """Lose everything, the revision included, as an etcd that comes back without its data; cuts all watches."""
        self._data.wipe()

    async def _reached(self) -> MemoryData:
        await asyncio.sleep(0)
        if not self.reachable:
            raise StoreUnavailable("the store in memory is closed" if self._closed else "the store is out of reach")
        self._data.end_due_leases()
        return self._data

    def _cut_watches(self) -> None:
        for watcher in self._watchers:
            watcher.cut()
