"""What the clients of one store in memory share: keys, leases, history. Nothing here waits."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchelastic.errors import HistoryCompacted, LeaseLost
from torchelastic.store.api import Change, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORY_LIMIT = 100_000
"""So many changes are kept at least; twice as many at most."""


@dataclass(slots=True)
class Lease:
    """A lease: how long it lasts, when it ends, and the keys that end with it."""

    ttl: float
    ends_at: float
    keys: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Watcher:
    """Somebody who waits for changes below a prefix, and those that they have not taken yet."""

    prefix: str
    pending: list[Change] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False

    def tell(self, changes: list[Change]) -> None:
        """Hand on those changes that it waits for."""
        mine = [change for change in changes if change.key.startswith(self.prefix)]
        if mine:
            self.pending += mine
            self.wake.set()

    def cut(self) -> None:
        """Break its connection."""
        self.broken = True
        self.wake.set()


class MemoryData:
    """The keys, leases and history of one store.

    Args:
        now: what time it is, in seconds; None for the event loop's clock, with timers that end the leases.
    """

    def __init__(self, now: Callable[[], float] | None) -> None:
        self._now = now
        self._lease_ids = itertools.count(1)
        self.leases: dict[int, Lease] = {}
        self.watchers: dict[Watcher, None] = {}  # a set in the order of arrival, so that a test's run can be repeated
        self.wipe()

    def wipe(self) -> None:
        """Begin anew, with nothing."""
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
            self._unbind(key)
            entry = None
            if value is None:
                del self.entries[key]
            else:
                before = self.entries.get(key)
                entry = Entry(key, value, before.created if before else self.revision, self.revision)
                self.entries[key] = entry
            if lease:
                self.leases[lease].keys.add(key)
                self.lease_of[key] = lease
            changes.append(Change(key, entry, self.revision))
        self.history += changes
        if len(self.history) > 2 * HISTORY_LIMIT:
            self.compact(self.history[-HISTORY_LIMIT].revision)
        for watcher in self.watchers:
            watcher.tell(changes)

    def watch(self, prefix: str, start: int) -> Watcher:
        """Somebody who is told what has changed below the prefix from revision ``start`` (0: the next one) on."""
        start = start or self.revision + 1
        if start <= self.compacted:
            raise HistoryCompacted(f"revision {start} is no longer kept; the oldest one is {self.compacted + 1}")
        if start > self.revision + 1:
            raise HistoryCompacted(f"revision {start} is from a lost past: the store stands at {self.revision}")
        watcher = Watcher(prefix)
        first = bisect.bisect_left(self.history, start, key=lambda change: change.revision)
        watcher.tell(self.history[first:])
        self.watchers[watcher] = None
        return watcher

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including a revision."""
        self.compacted = max(self.compacted, min(revision, self.revision))
        first = bisect.bisect_right(self.history, self.compacted, key=lambda change: change.revision)
        del self.history[:first]

    def below(self, prefix: str) -> list[str]:
        """The keys below a prefix, in order."""
        return sorted(key for key in self.entries if key.startswith(prefix))

    def grant(self, ttl: float, lease: int = 0) -> int:
        """A new lease, or the one of this id, which may be there already."""
        lease = lease or next(self._lease_ids)
        self.leases.setdefault(lease, Lease(ttl, 0.0))
        self.renew(lease)
        return lease

    def renew(self, lease: int) -> None:
        """Start a lease's time anew."""
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
        """Delete a lease, and what hangs on it in one revision."""
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

    def _unbind(self, key: str) -> None:
        lease = self.lease_of.pop(key, 0)
        if lease in self.leases:
            self.leases[lease].keys.discard(key)
