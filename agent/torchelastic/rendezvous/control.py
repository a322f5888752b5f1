"""A node's view of the few keys that everybody watches: leader, epoch, outcome, size."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from torchelastic.contract import LeaderRecord, OutcomeRecord, decode, decode_epoch, decode_size
from torchelastic.errors import MalformedRecord
from torchelastic.rendezvous.pulse import Pulse
from torchelastic.store.api import Listing
from torchelastic.store.following import follow_for_good

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchelastic.contract import EpochRecord, RunKeys, SizeRecord
    from torchelastic.errors import StoreUnavailable
    from torchelastic.store.api import Entry, Store

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Standing(Generic[RecordT]):
    """A record with the revision of its last change.

    Attributes:
        record: what stands there; None for nothing (or nothing that can be read).
        modified: what a compare-and-swap has to expect; 0 where there is no such key.
    """

    record: RecordT | None = None
    modified: int = 0


class Control:
    """What stands below the run's control prefix, kept up to date by :meth:`follow`.

    Args:
        store: where.
        keys: the run's keys.
    """

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self.leader: Standing[LeaderRecord] = Standing()
        self.epoch: Standing[EpochRecord] = Standing()
        self.outcome: Standing[OutcomeRecord] = Standing()
        self.size: Standing[SizeRecord] = Standing()
        self.changed = Pulse()
        """Sent after every change, and when the store was lost or found."""
        self.away_since: float | None = 0.0
        """Since when the store is not reached, by the loop's clock; None while it is."""
        self.back_at: float | None = None
        """When the store last came back after having been away, by the loop's clock; None where it never was."""
        self._store = store
        self._keys = keys
        self._warned: set[str] = set()
        self._lost = False

    async def follow(self) -> None:
        """Watch, until cancelled.

        Raises:
            StoreRefused: the store refuses this node for good.
        """
        async with aclosing(follow_for_good(self._store, self._keys.control, lost=self._lose)) as news:
            async for batch in news:
                if isinstance(batch, Listing):
                    self._replace(batch.entries)
                    continue
                for change in batch:
                    if change.revision > self._modified(change.key):  # else this node noted it already
                        self._set(change.key, change.entry)
                if batch:
                    self.changed.send()

    def set_epoch(self, record: EpochRecord, revision: int) -> None:
        """Take note of an epoch that this node has just committed, ahead of the watch."""
        if revision > self.epoch.modified:
            self.epoch = Standing(record, revision)
            self.changed.send()

    def set_leader(self, record: LeaderRecord, revision: int) -> None:
        """Take note of a leader that this node has just made itself, ahead of the watch."""
        if revision > self.leader.modified:
            self.leader = Standing(record, revision)
            self.changed.send()

    def _lose(self, error: StoreUnavailable) -> None:
        if self.away_since is None:
            logger.warning("lost sight of the run's keys: %s", error)
            self._lost = True
            self.away_since = asyncio.get_running_loop().time()
            self.changed.send()

    def _replace(self, entries: Iterable[Entry]) -> None:
        by_key = {entry.key: entry for entry in entries}
        for key in (self._keys.leader, self._keys.epoch, self._keys.outcome, self._keys.size):
            self._set(key, by_key.get(key))
        if self._lost:
            self.back_at = asyncio.get_running_loop().time()
        self.away_since = None
        self._lost = False
        self.changed.send()

    def _modified(self, key: str) -> int:
        if key == self._keys.leader:
            return self.leader.modified
        return self.epoch.modified if key == self._keys.epoch else 0

    def _set(self, key: str, entry: Entry | None) -> None:
        if key == self._keys.leader:
            self.leader = self._standing(entry, _leader)
        elif key == self._keys.epoch:
            self.epoch = self._standing(entry, decode_epoch)
        elif key == self._keys.outcome:
            self.outcome = self._standing(entry, _outcome)
        elif key == self._keys.size:
            self.size = self._standing(entry, decode_size)

    def _standing(self, entry: Entry | None, read: Callable[[bytes], RecordT]) -> Standing[RecordT]:
        if entry is None:
            return Standing()
        try:
            return Standing(read(entry.value), entry.modified)
        except MalformedRecord as error:
            if entry.key not in self._warned:
                self._warned.add(entry.key)
                logger.warning("ignoring %s: %s", entry.key, error)
            return Standing(None, entry.modified)


def _leader(data: bytes) -> LeaderRecord:
    return decode(data, LeaderRecord)


def _outcome(data: bytes) -> OutcomeRecord:
    return decode(data, OutcomeRecord)
