"""A store within one process: for ``--standalone``, which needs no etcd, and for tests with thousands of events.

It behaves like etcd in all that a caller can observe: the whole store has one revision, changes of one revision are
reported together, and leases delete their keys when they expire.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.store.api import Change, Entry, Listing

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncGenerator


@dataclass(slots=True, eq=False)
class _Watch:
    """A watch, and the changes that its reader has not received yet; None among them means that the watch broke."""

    client: MemoryStore
    prefix: str
    batches: asyncio.Queue[tuple[Change, ...] | None] = field(default_factory=asyncio.Queue)


class _Data:
    """The data that the clients of one store share."""

    def __init__(self) -> None:
        self.revision = 1  # as in an empty etcd
        self.entries: dict[str, Entry] = {}
        self.lease_ids = itertools.count(1)
        self.leases: dict[int, tuple[float, asyncio.TimerHandle]] = {}  # seconds, and the timer that expires the lease
        self.lease_of: dict[str, int] = {}
        self.watches: dict[_Watch, None] = {}  # an ordered set, so that tests are reproducible


class MemoryStore:
    """A :class:`~torchelastic.store.api.Store` that keeps its data in this process.

    Every operation takes effect after one turn of the event loop, so that tasks interleave as with etcd.
    """

    def __init__(self) -> None:
        self._data = _Data()
        self._reachable = True
        self._closed = False

    def another(self) -> MemoryStore:
        """Return another client of the same data, which can be closed or made unreachable separately."""
        other = MemoryStore()
        other._data = self._data
        return other

    @property
    def reachable(self) -> bool:
        """Whether this client reaches the data; if set to False, the client behaves as if the network were broken."""
        return self._reachable and not self._closed

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        self._reachable = reachable
        if not reachable:
            self._cut_watches()

    async def get(self, key: str) -> Entry | None:
        return (await self._reached()).entries.get(key)

    async def list(self, prefix: str) -> Listing:
        data = await self._reached()
        return Listing(data.revision, tuple(data.entries[key] for key in self._below(prefix)), "memory")

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        await self._reached()
        return self._write({key: value}, lease)

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        entry = (await self._reached()).entries.get(key)
        return self._write({key: value}, lease) if (entry.mod_revision if entry else 0) == expected else None

    async def delete(self, key: str) -> None:
        if key in (await self._reached()).entries:
            self._write({key: None})

    async def delete_prefix(self, prefix: str) -> None:
        await self._reached()
        self._delete(self._below(prefix))

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        data = await self._reached()
        chosen = lease or next(data.lease_ids)
        self._start(chosen, ttl)
        return chosen

    async def keep_alive(self, lease: int) -> None:
        data = await self._reached()
        if lease not in data.leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        self._start(lease, data.leases[lease][0])

    async def revoke(self, lease: int) -> None:
        await self._reached()
        self.expire(lease)

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        data = await self._reached()
        watch = _Watch(self, prefix)
        data.watches[watch] = None
        try:
            yield ()
            while (changes := await watch.batches.get()) is not None:
                yield changes
        finally:
            del data.watches[watch]
        raise StoreUnavailable("the watch of the store in memory was interrupted")

    async def close(self) -> None:
        """Close this client; the data remain for other clients."""
        self._closed = True
        self._cut_watches()

    def expire(self, lease: int) -> None:
        """Expire a lease now: delete it and its keys in one revision."""
        if lease in self._data.leases:
            self._data.leases.pop(lease)[1].cancel()
        self._delete(sorted(key for key, held_by in self._data.lease_of.items() if held_by == lease))

    def wipe(self) -> None:
        """Delete all data and reset the revision, like an etcd that restarts without its data; break all watches."""
        data = self._data
        for _, timer in data.leases.values():
            timer.cancel()
        for watch in data.watches:
            watch.batches.put_nowait(None)
        for lost in (data.entries, data.leases, data.lease_of):
            lost.clear()
        data.revision = 1

    async def _reached(self) -> _Data:
        await asyncio.sleep(0)
        if not self.reachable:
            raise StoreUnavailable("the store in memory is closed" if self._closed else "the store is unreachable")
        return self._data

    def _below(self, prefix: str) -> builtins.list[str]:
        return sorted(key for key in self._data.entries if key.startswith(prefix))

    def _write(self, values: dict[str, bytes | None], lease: int = 0) -> int:
        """Set keys in one revision, or delete those with the value None; return the revision."""
        data = self._data
        if lease and lease not in data.leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        revision = data.revision = data.revision + 1
        changes: list[Change] = []
        for key, value in values.items():
            data.lease_of.pop(key, None)
            old, entry = data.entries.pop(key, None), None
            if value is not None:
                entry = data.entries[key] = Entry(key, value, old.create_revision if old else revision, revision)
                if lease:
                    data.lease_of[key] = lease
            changes.append(Change(key, entry, revision))
        for watch in data.watches:
            if news := tuple(change for change in changes if change.key.startswith(watch.prefix)):
                watch.batches.put_nowait(news)
        return data.revision

    def _delete(self, keys: builtins.list[str]) -> None:
        if keys:
            self._write(dict.fromkeys(keys))

    def _start(self, lease: int, ttl: float) -> None:
        if lease in self._data.leases:
            self._data.leases[lease][1].cancel()
        self._data.leases[lease] = (ttl, asyncio.get_running_loop().call_later(ttl, self.expire, lease))

    def _cut_watches(self) -> None:
        for watch in self._data.watches:
            if watch.client is self:
                watch.batches.put_nowait(None)
