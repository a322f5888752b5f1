"""A node's view of the keys that every node watches: leader, state (round and outcome), notice, size."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from torchelastic.errors import MalformedRecord
from torchelastic.protocol import (
    LeaderRecord,
    NoticeRecord,
    RoundRecord,
    SizeRecord,
    StateRecord,
    decode,
    decode_notice,
    decode_size,
    decode_state,
)
from torchelastic.rendezvous.change_signal import ChangeSignal
from torchelastic.store.api import Listing
from torchelastic.store.list_and_watch import follow_forever

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.errors import StoreUnavailable
    from torchelastic.protocol import OutcomeRecord, RunKeys
    from torchelastic.store.api import Change, Entry, Store
    from torchelastic.store.run_lease import RunLease

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Versioned(Generic[RecordT]):
    """A record with the revision of its last change.

    Attributes:
        record: None without a key, or if it cannot be read.
        modified: the revision that a compare-and-swap has to expect; 0 without a key.
    """

    record: RecordT | None = None
    modified: int = 0


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the parts of a node share: its id, the rules, the store and the run's keys."""

    node: str
    settings: RendezvousSettings
    store: Store
    keys: RunKeys
    lasting: RunLease
    run: RunStateWatch


class RunStateWatch:
    """The run's keys as this node knows them, kept up to date by :meth:`follow`.

    Attributes:
        leader: who leads.
        state: the round and the outcome.
        notice: the last notice.
        size: the size that the operator wants.
        accepted_round: the last round that this node was told of.
        changed: sent after every change, and when the store is lost or back.
        away_since: since when the store is unreachable, by the loop's clock; None while it is reachable.
        back_at: when the store last came back, by the loop's clock; None if it never was away.
        last_leader: the node that leads, or led last; empty if none is known.
        restored: how often the store lost data: it has another cluster id than before, or an earlier revision.
    """

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self.leader: Versioned[LeaderRecord] = Versioned()
        self.state: Versioned[StateRecord] = Versioned()
        self.notice: Versioned[NoticeRecord] = Versioned()
        self.size: Versioned[SizeRecord] = Versioned()
        self.accepted_round: RoundRecord | None = None
        self.changed = ChangeSignal()
        self.away_since: float | None = 0.0
        self.back_at: float | None = None
        self.last_leader = ""
        self.restored = 0
        self._store = store
        self._keys = keys
        self._warned: set[str] = set()
        self._cluster_id = ""
        self._revision = 0
        self._lost = False

    @property
    def round(self) -> RoundRecord | None:
        """The round in the store."""
        return None if self.state.record is None else self.state.record.round

    @property
    def outcome(self) -> OutcomeRecord | None:
        """The run's outcome."""
        return None if self.state.record is None else self.state.record.outcome

    @property
    def latest_round(self) -> RoundRecord | None:
        """The later one of the round in the store and the last one that this node was told of."""
        stored, accepted = self.round, self.accepted_round
        return accepted if stored is None or (accepted is not None and accepted.number > stored.number) else stored

    async def follow(self) -> None:
        """Watch the keys until cancelled.

        Raises:
            StoreRefused: the store refuses this node.
        """
        async with aclosing(follow_forever(self._store, self._keys.control, lost=self._lose)) as news:
            async for batch in news:
                if isinstance(batch, Listing):
                    self.replace(batch)
                elif batch:
                    for change in batch:
                        self.apply(change)
                    self.changed.send()

    async def is_current(self, round: RoundRecord) -> bool:
        """Whether the run is not over and has no later round than this one, read from the store now.

        Raises:
            StoreError: it could not be read.
        """
        entry = await self._store.get(self._keys.state)
        if entry is None:
            return True  # the store has lost its data, and the leader is about to restore them
        try:
            stored = decode_state(entry.value)
        except MalformedRecord:
            return False
        if stored.outcome is not None or stored.round is None:
            return stored.outcome is None
        return stored.round.number < round.number or stored.round == round

    def replace(self, listing: Listing) -> None:
        """Take over a listing of all keys."""
        is_other = bool(self._cluster_id) and listing.cluster_id not in ("", self._cluster_id)
        if is_other or listing.revision < self._revision:
            self.restored += 1
        self._cluster_id = listing.cluster_id or self._cluster_id
        self._revision = listing.revision
        entries = {entry.key: entry for entry in listing.entries}
        for key in (self._keys.leader, self._keys.state, self._keys.notice, self._keys.size):
            self._set(key, entries.get(key))
        if self._lost:
            self.back_at = asyncio.get_running_loop().time()
        self.away_since = None
        self._lost = False
        self.changed.send()

    def apply(self, change: Change) -> None:
        """Take over one change, unless this node has noted it already."""
        self._revision = max(self._revision, change.revision)
        known: dict[str, Versioned[LeaderRecord] | Versioned[StateRecord] | Versioned[NoticeRecord]] = {
            self._keys.leader: self.leader,
            self._keys.state: self.state,
            self._keys.notice: self.notice,
        }
        if change.key not in known or change.revision > known[change.key].modified:
            self._set(change.key, change.entry)

    def note_state(self, record: StateRecord, revision: int) -> None:
        """Note a state that this node has just committed, ahead of the watch."""
        if revision > self.state.modified:
            self.state = Versioned(record, revision)
            self.changed.send()

    def note_notice(self, record: NoticeRecord, revision: int) -> None:
        """Note a notice that this node has just given, ahead of the watch."""
        if revision > self.notice.modified:
            self.notice = Versioned(record, revision)
            self.changed.send()

    def note_leader(self, record: LeaderRecord, revision: int) -> None:
        """Note a leader that this node has just written, ahead of the watch."""
        if revision > self.leader.modified:
            self._set_leader(Versioned(record, revision))
            self.changed.send()

    def _set_leader(self, leader: Versioned[LeaderRecord]) -> None:
        self.leader = leader
        if leader.record is not None and leader.record.node:
            self.last_leader = leader.record.node

    def _lose(self, error: StoreUnavailable) -> None:
        if self.away_since is None:
            logger.warning("lost sight of the run's keys: %s", error)
            self._lost = True
            self.away_since = asyncio.get_running_loop().time()
            self.changed.send()

    def _set(self, key: str, entry: Entry | None) -> None:
        if key == self._keys.leader:
            self._set_leader(self._versioned(entry, lambda data: decode(data, LeaderRecord)))
        elif key == self._keys.state:
            self.state = self._versioned(entry, decode_state)
        elif key == self._keys.notice:
            self.notice = self._versioned(entry, decode_notice)
        elif key == self._keys.size:
            self.size = self._versioned(entry, decode_size)

    def _versioned(self, entry: Entry | None, read: Callable[[bytes], RecordT]) -> Versioned[RecordT]:
        if entry is None:
            return Versioned()
        try:
            return Versioned(read(entry.value), entry.modified)
        except MalformedRecord as error:
            if entry.key not in self._warned:
                self._warned.add(entry.key)
                logger.warning("ignoring %s: %s", entry.key, error)
            return Versioned(None, entry.modified)
