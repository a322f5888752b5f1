"""The keys that a node reads and writes in the store: those that every node watches, and the node's own key."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from torchelastic.errors import LeaseLost, MalformedRecord, StoreUnavailable
from torchelastic.protocol.codec import decode, decode_same_version, decode_state, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import NUMBER_STEP, LeaderRecord, NodeRecord, NoticeRecord, SizeRecord
from torchelastic.store.api import Listing
from torchelastic.store.client import Backoff, RunLease, follow_forever

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.protocol.records import OutcomeRecord, RoundRecord, StateRecord
    from torchelastic.store.api import Change, Entry, Store

logger = logging.getLogger(__name__)

RecordT_co = TypeVar("RecordT_co", bound=msgspec.Struct, covariant=True)


class ChangeSignal:
    """A counter of changes that tasks of one event loop can wait on without missing a change."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def send(self) -> None:
        """Announce a change."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, seen: int, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - waking is the point
        """Wait until :attr:`count` differs from ``seen``, or the timeout has passed; return the count."""
        if self.count == seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._next.wait()
        return self.count

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; check it after each change."""
        while not condition():
            await self.after(self.count)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended; ignore their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Versioned(Generic[RecordT_co]):
    """A record with the revision of its last change.

    Attributes:
        record: the record; None if the key does not exist or its value cannot be read.
        mod_revision: the revision that a compare-and-swap has to expect; 0 if the key does not exist.
    """

    record: RecordT_co | None = None
    mod_revision: int = 0


class RunWatch:
    """The state of a run as one node knows it; :meth:`follow` keeps it up to date.

    Attributes:
        keys: the run's keys.
        run_lease: writes keys that outlive this node.
        accepted_round: the last round that this node has accepted.
        changed: signals every change that this node notes, and every loss and return of the store.
        unreachable_since: when the store became unreachable, by the loop's clock; 0 before the first listing; None
            while the store is reachable.
        reachable_since: when the store became reachable again, by the loop's clock; None if it was never unreachable.
        last_leader: the record of the node that leads, or led last; None if no leader is known.
        listings: the number of listings of all keys that this node has read.
        data_lost: whether a listing has shown that the store lost data: a different cluster id, or an earlier revision.
            The node that reacts to the loss resets the attribute.
    """

    def __init__(self, node: str, settings: RendezvousSettings, store: Store) -> None:
        self.node = node
        self.settings = settings
        self.store = store
        self.keys = keys = RunKeys(settings.run_id)
        self.run_lease = RunLease(store, settings.run_id, ttl=settings.run_lease)
        self.accepted_round: RoundRecord | None = None
        self.changed = ChangeSignal()
        self.unreachable_since: float | None = 0.0
        self.reachable_since: float | None = None
        self.last_leader: LeaderRecord | None = None
        self.listings = 0
        self.data_lost = False
        self._decoders: dict[str, Callable[[bytes], msgspec.Struct]] = {
            keys.leader: lambda data: decode(data, LeaderRecord),
            keys.state: self._decode_state,
            keys.notice: self._decode_notice,
            keys.size: self._decode_size,
        }
        self._known: dict[str, Versioned[Any]] = dict.fromkeys(self._decoders, Versioned())
        self._warned: set[str] = set()
        self._cluster_id = ""
        self._revision = 0

    @property
    def leader(self) -> Versioned[LeaderRecord]:
        """The record of the leader."""
        return self._known[self.keys.leader]

    @property
    def state(self) -> Versioned[StateRecord]:
        """The record of the round and the outcome."""
        return self._known[self.keys.state]

    @property
    def notice(self) -> Versioned[NoticeRecord]:
        """The record of the last notice."""
        return self._known[self.keys.notice]

    @property
    def size(self) -> SizeRecord | None:
        """The size that the operator requests; None if the store has none."""
        size: SizeRecord | None = self._known[self.keys.size].record
        return size

    @property
    def round(self) -> RoundRecord | None:
        """The round in the store; None if there is none."""
        return None if self.state.record is None else self.state.record.round

    @property
    def outcome(self) -> OutcomeRecord | None:
        """The run's outcome; None while the run is in progress."""
        return None if self.state.record is None else self.state.record.outcome

    @property
    def latest_round(self) -> RoundRecord | None:
        """The later of the round in the store and the last round that this node has accepted."""
        stored, accepted = self.round, self.accepted_round
        return accepted if stored is None or (accepted is not None and accepted.number > stored.number) else stored

    async def follow(self) -> None:
        """Watch the keys until cancelled, or until the store refuses this node."""
        async with aclosing(follow_forever(self.store, self.keys.control, lost=self._lose)) as news:
            async for batch in news:
                if isinstance(batch, Listing):
                    self.replace(batch)
                elif batch:
                    for change in batch:
                        self.apply(change)
                    self.changed.send()

    def replace(self, listing: Listing) -> None:
        """Apply a listing of all keys."""
        is_other = bool(self._cluster_id) and listing.cluster_id not in ("", self._cluster_id)
        if is_other or listing.revision < self._revision:
            self.data_lost = True
        self._cluster_id = listing.cluster_id or self._cluster_id
        self._revision = listing.revision
        entries = {entry.key: entry for entry in listing.entries}
        for key in self._decoders:
            self._set(key, self._versioned(key, entries.get(key)))
        self.listings += 1
        if self.unreachable_since:  # 0 before the first listing
            self.reachable_since = asyncio.get_running_loop().time()
        self.unreachable_since = None
        self.changed.send()

    def apply(self, change: Change) -> None:
        """Apply a change, unless this node has noted it already."""
        self._revision = max(self._revision, change.revision)
        if change.key in self._known and change.revision > self._known[change.key].mod_revision:
            self._set(change.key, self._versioned(change.key, change.entry))

    def note(self, key: str, record: msgspec.Struct, revision: int) -> None:
        """Note a record that this node has just written, before the watch returns it."""
        if revision > self._known[key].mod_revision:
            self._set(key, Versioned(record, revision))
            self.changed.send()

    def _set(self, key: str, known: Versioned[Any]) -> None:
        self._known[key] = known
        if self.leader.record is not None and self.leader.record.node:
            self.last_leader = self.leader.record

    def _lose(self, error: StoreUnavailable) -> None:
        if self.unreachable_since is None:
            logger.warning("the watch of the run's keys broke: %s", error)
            self.unreachable_since = asyncio.get_running_loop().time()
            self.changed.send()

    def _decode_state(self, data: bytes) -> StateRecord:
        state = decode_state(data)
        known = self.settings.resume.round if self.accepted_round is None else self.accepted_round.number
        if state.round is not None and state.round.number > known + NUMBER_STEP:
            raise MalformedRecord(f"the round {state.round.number} is too far beyond the round {known}")
        return state

    def _decode_size(self, data: bytes) -> SizeRecord:
        size, known = decode_same_version(data, SizeRecord), self.settings.size.generation
        if size.generation > known + NUMBER_STEP:
            raise MalformedRecord(f"the generation {size.generation} is too far beyond the generation {known}")
        return size

    def _decode_notice(self, data: bytes) -> NoticeRecord:
        notice, known = decode_same_version(data, NoticeRecord), self.notice.record
        number = 0 if known is None else known.number
        if notice.number > number + NUMBER_STEP:
            raise MalformedRecord(f"the notice {notice.number} is too far beyond the notice {number}")
        return notice

    def _versioned(self, key: str, entry: Entry | None) -> Versioned[Any]:
        if entry is None:
            return Versioned()
        try:
            return Versioned(self._decoders[key](entry.value), entry.mod_revision)
        except MalformedRecord as error:
            if key not in self._warned:
                self._warned.add(key)
                logger.warning("ignoring %s: %s", key, error)
            return Versioned(None, entry.mod_revision)


class NodeRegistration:
    """Keeps a node's record in the store under the node's lease, while :meth:`run` runs.

    Args:
        run: the state of the run.
        record: the node's first record.
        new_tcp_store_port: returns an unused port for the next round's TCPStore. After a lost lease, the registration
            calls it before it writes the record, because the store may have lost a round that used the old port.

    Attributes:
        record: the node's record with all updates; the last ones may not be written yet.
        lease: the id of the node's lease; 0 while the node has none.
        renewed_at: when the store granted or renewed the lease last, by the loop's clock.
        renewed_since: since when the store has granted and renewed the lease without a failure, by the loop's clock.
    """

    def __init__(self, run: RunWatch, record: NodeRecord, new_tcp_store_port: Callable[[], int]) -> None:
        self.record = record
        self.lease = 0
        self.renewed_at = self.renewed_since = math.inf
        self._new_tcp_store_port = new_tcp_store_port
        self._store = run.store
        self._changed = run.changed
        self._key = run.keys.node(run.node)
        self._ttl = run.settings.lease
        self._request_timeout = run.settings.lease / 2  # an etcd that restarts may never answer
        self._updated = ChangeSignal()
        self._progress = ChangeSignal()
        self._written = 0
        self._backoff = Backoff()

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change the record; :meth:`run` writes it."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._updated.send()

    async def flush(self) -> None:
        """Wait until all updates so far are written."""
        await self._progress.until(lambda: self._written == self._updated.count and bool(self.lease))

    async def run(self) -> None:
        """Keep the lease and the key until cancelled, or until the store refuses this node."""
        while True:
            try:
                await self._hold()
            except LeaseLost:
                self.lease = 0
                logger.info("the lease of this node has expired; requesting a new one")
            except (StoreUnavailable, TimeoutError) as error:
                if self._backoff.attempts == 0:
                    why = str(error) or "the store did not answer in time"
                    logger.warning("%s; continuing without it until it is back", why)
                await self._backoff.wait()

    async def withdraw(self) -> None:
        """Delete the node's key and lease, after :meth:`run` has ended."""
        await self._store.delete(self._key)
        if self.lease:
            lease, self.lease = self.lease, 0
            await self._store.revoke(lease)

    async def _hold(self) -> None:
        now = asyncio.get_running_loop().time
        due = now()
        self.renewed_since = math.inf
        if not self.lease:
            due += self._ttl / 3
            async with asyncio.timeout(self._request_timeout):
                lease = await self._store.grant(self._ttl)
            self.renewed_at = self.renewed_since = now()
            if self.record.joined_revision:
                self.record = msgspec.structs.replace(self.record, tcp_store_port=self._new_tcp_store_port())
            await self._put(lease)
            self.lease = lease
            self._progress.send()
            self._changed.send()
        while True:
            if self._written == self._updated.count:
                await self._updated.after(self._written, timeout=max(due - now(), 0.0))
            if now() >= due:
                due = now() + self._ttl / 3
                async with asyncio.timeout(self._request_timeout):
                    await self._store.keep_alive(self.lease)
                self.renewed_at = now()
                self.renewed_since = min(self.renewed_since, self.renewed_at)
                self._backoff.reset()
            if self._written < self._updated.count:
                await self._put(self.lease)

    async def _put(self, lease: int) -> None:
        count, record = self._updated.count, self.record
        async with asyncio.timeout(self._request_timeout):
            revision = await self._store.put(self._key, encode(record), lease=lease)
        if not self.record.joined_revision:  # until the next write, readers use the revision of the key's creation
            self.record = msgspec.structs.replace(self.record, joined_revision=revision)
        self._written = count
        self._backoff.reset()
        self._progress.send()


async def remove_finished_run(run: RunWatch) -> None:
    """Remove the keys of a finished run with the same id, unless a node of that run is present.

    Raises:
        StoreError: the request to the store failed.
    """
    store, keys = run.store, run.keys
    if not _is_over(await store.get(keys.state)):
        return  # the usual case, which needs no listing of all keys
    listing = await store.list(keys.root)
    entries = {entry.key: entry for entry in listing.entries}
    if not _is_over(entries.get(keys.state)) or any(key.startswith(keys.nodes) for key in entries):
        return
    # Delete the state last: keys without a state would seem to belong to a run in progress.
    for key in (keys.time_breakdown, keys.history, keys.notice, keys.leader, keys.state):
        if key in entries:
            await store.compare_and_swap(key, None, expected=entries[key].mod_revision)


def _is_over(entry: Entry | None) -> bool:
    if entry is None:
        return False
    try:
        return decode_state(entry.value).outcome is not None
    except MalformedRecord:
        return False
