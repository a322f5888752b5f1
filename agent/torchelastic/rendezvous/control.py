"""A node's view of the few keys that everybody watches: leader, epoch, notice, outcome, size."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from torchelastic.contract import (
    CONTRACT_VERSION,
    LeaderRecord,
    NoticeRecord,
    OutcomeRecord,
    decode,
    decode_epoch,
    decode_size,
    other_version,
)
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
        self.notice: Standing[NoticeRecord] = Standing()
        self.outcome: Standing[OutcomeRecord] = Standing()
        self.size: Standing[SizeRecord] = Standing()
        self.changed = Pulse()
        """Sent after every change, and when the store was lost or found."""
        self.away_since: float | None = 0.0
        """Since when the store is not reached, by the loop's clock; None while it is."""
        self.back_at: float | None = None
        """When the store last came back after having been away, by the loop's clock; None where it never was."""
        self.led_last = ""
        """The node that leads, or led last where nobody does; empty where none is known to have led."""
        self._store = store
        self._keys = keys
        self._warned: set[str] = set()
        self._lost = False

    async def follow(self) -> None:
        """Watch, until cancelled.

        Raises:
            StoreRefused: the store refuses this node.
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

    async def still_has(self, epoch: EpochRecord) -> bool:
        """Whether the run is not over and has no later epoch than this one, read from the store now.

        Raises:
            StoreError: it could not be read.
        """
        entries = {entry.key: entry for entry in (await self._store.list(self._keys.control)).entries}
        if self._keys.outcome in entries:
            return False
        if self._keys.epoch not in entries:
            return True  # it has lost its data, and is about to be given them back
        try:
            stored = decode_epoch(entries[self._keys.epoch].value)
        except MalformedRecord:
            return False
        return stored.number < epoch.number or stored == epoch

    def set_epoch(self, record: EpochRecord, revision: int) -> None:
        """Take note of an epoch that this node has just committed, ahead of the watch."""
        if revision > self.epoch.modified:
            self.epoch = Standing(record, revision)
            self.changed.send()

    def set_notice(self, record: NoticeRecord, revision: int) -> None:
        """Take note of a notice that this node has just given, ahead of the watch."""
        if revision > self.notice.modified:
            self.notice = Standing(record, revision)
            self.changed.send()

    def set_leader(self, record: LeaderRecord, revision: int) -> None:
        """Take note of a leader that this node has just made itself, ahead of the watch."""
        if revision > self.leader.modified:
            self._take_note(Standing(record, revision))
            self.changed.send()

    def _take_note(self, leader: Standing[LeaderRecord]) -> None:
        self.leader = leader
        if leader.record is not None and leader.record.node:
            self.led_last = leader.record.node

    def _lose(self, error: StoreUnavailable) -> None:
        if self.away_since is None:
            logger.warning("lost sight of the run's keys: %s", error)
            self._lost = True
            self.away_since = asyncio.get_running_loop().time()
            self.changed.send()

    def _replace(self, entries: Iterable[Entry]) -> None:
        by_key = {entry.key: entry for entry in entries}
        keys = self._keys
        for key in (keys.leader, keys.epoch, keys.notice, keys.outcome, keys.size):
            self._set(key, by_key.get(key))
        if self._lost:
            self.back_at = asyncio.get_running_loop().time()
        self.away_since = None
        self._lost = False
        self.changed.send()

    def _modified(self, key: str) -> int:
        if key == self._keys.leader:
            return self.leader.modified
        if key == self._keys.notice:
            return self.notice.modified
        return self.epoch.modified if key == self._keys.epoch else 0

    def _set(self, key: str, entry: Entry | None) -> None:
        if key == self._keys.leader:
            self._take_note(self._standing(entry, _leader))
        elif key == self._keys.epoch:
            self.epoch = self._standing(entry, decode_epoch)
        elif key == self._keys.notice:
            self.notice = self._standing(entry, _notice)
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


def _notice(data: bytes) -> NoticeRecord:
    notice = decode(data, NoticeRecord)
    if notice.contract != CONTRACT_VERSION:
        raise MalformedRecord(f"not a NoticeRecord for us: {other_version(notice.contract)}")
    return notice


def _outcome(data: bytes) -> OutcomeRecord:
    return decode(data, OutcomeRecord)
