"""Mirrors a run's keys in the store: lists the keys, watches them, and lists them again after an outage.

During an outage of the store, the mirror keeps the last known values, and ``readable`` is false. Like the leading
agent, the mirror renews the run's lease.

Any user may name a hostile server as an etcd. So all mirrors of one operator share a budget of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar, cast

import msgspec

from torchelastic.errors import MalformedRecord, SettingsError, StoreError, StoreTooLarge
from torchelastic.protocol import codec, keys, records
from torchelastic.store.api import (
    MAX_ENTRIES,
    Change,
    Entry,
    Listing,
    Store,
    StoreSettings,
    parse_endpoints,
    too_large,
)
from torchelastic.store.client import Backoff, RunLease, connect, follow

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)
_log_limit = codec.LogLimit()

_Record = TypeVar("_Record", bound=msgspec.Struct)

TOO_LARGE_DELAY: Final = 600.0
"""Seconds for which a store that sends too much is left alone: reading it takes memory and time from other jobs."""

_ENTRY_PAUSE: Final = 1e-4
_BYTE_PAUSE: Final = 1e-7
"""Seconds of pause for each entry and for each byte that was read: about ten times as long as reading takes, so that a
store with endless changes leaves the operator's time to other jobs."""

_LONGEST_ID: Final = 512
"""Maximum length of a node's id: a pod's name, which has at most 253 characters, and a suffix."""

SettingsSource = Callable[[], StoreSettings | Awaitable[StoreSettings]]
"""A function that returns the settings of a store, or an awaitable of them."""


def store_at(endpoint: str, tls: ssl.SSLContext | None = None) -> StoreSettings:
    """Return the settings of the etcd at an endpoint, which is parsed as an agent parses it.

    Args:
        endpoint: one or more ``host[:port]``, separated by commas; ``http://`` or ``https://`` may precede each.
        tls: the context of TLS connections, which are the default then; None for the system's authorities.

    Raises:
        SettingsError: the endpoint is malformed.
    """
    scheme, endpoints = parse_endpoints(endpoint)
    return StoreSettings(endpoints=endpoints, protocol=scheme or ("https" if tls else "http"), tls=tls)


_FREE: Final = 64 << 10
"""Bytes of each mirror that do not count: enough for a small run."""


class MemoryBudget:
    """A bound on the memory of several mirrors: what they keep, and what their connections have received.

    If the mirrors take more, those that take the most are refused, and left alone for TOO_LARGE_DELAY.

    Args:
        limit: the bytes for all mirrors, without the first 64 KiB of each.

    Attributes:
        taken: the bytes that count.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self._limit = limit
        self._taken: dict[StoreMirror, int] = {}
        self.taken = 0

    def take(self, mirror: StoreMirror, size: int) -> None:
        """Record how many bytes a mirror takes now."""
        counted = max(size - _FREE, 0)
        self.taken += counted - self._taken.pop(mirror, 0)
        if counted:
            self._taken[mirror] = counted
        while self.taken > self._limit:
            largest = max(self._taken, key=self._taken.__getitem__)
            self.taken -= self._taken.pop(largest)
            largest.refuse()


class StoreMirror:
    """The keys of one run.

    The mirror calls ``changed()`` when an attribute changes, except for ``time_breakdown``, the progress of the program
    in ``nodes``, and ``history``, unless the ranks began its last round at different steps. It calls ``away(error)``
    when it cannot connect or the connection breaks.

    Args:
        run_id: the run's id.
        changed: called without arguments after a change.
        away: called with the error for which the store is away.
        recorded: called without arguments after a change of ``history``.
        run_lease: seconds after which the store deletes a run whose lease no agent and no operator renews.
        budget: the memory that this mirror shares with others.

    Attributes:
        readable: whether the following attributes are current.
        round: the current round; None if no round is known.
        outcome: how the run ended; None if it has not ended.
        size: the desired size; None if the store has none.
        time_breakdown: the run's time breakdown, which the leader writes every few seconds.
        history: the run's rounds.
        nodes: the registered nodes that can start workers, by node id.
        names: the names of the pods of the nodes that were registered, by node id: of the last MAX_ENTRIES nodes.
        paused: whether the store is left alone for TOO_LARGE_DELAY.
    """

    def __init__(
        self,
        run_id: str,
        *,
        changed: Callable[[], None],
        away: Callable[[StoreError | SettingsError], None],
        recorded: Callable[[], None] = lambda: None,
        run_lease: float = keys.RUN_LEASE_TTL,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._run_id = run_id
        self._ttl = run_lease
        self._keys = keys.RunKeys(run_id)
        self._changed = changed
        self._away = away
        self._recorded = recorded
        self._store: Store | None = None  # set while connected, even if the store does not respond
        self.readable = False
        self.round: records.RoundRecord | None = None
        self.outcome: records.OutcomeRecord | None = None
        self.size: records.SizeRecord | None = None
        self.time_breakdown: records.TimeBreakdown | None = None
        self.history: records.HistoryRecord | None = None
        self.nodes: dict[str, records.NodeRecord] = {}
        self.names: dict[str, str] = {}
        self.paused = False
        self._budget = budget or MemoryBudget()
        self._sizes: dict[str, int] = {}  # the memory for the keys with their values, by key
        self._size = 0  # of these, and of ``names``
        self._received = 0
        self._refused = asyncio.Event()

    async def run(self, settings: SettingsSource, available: asyncio.Event | None) -> None:
        """Follow the store until canceled.

        Args:
            settings: called for the settings before each attempt to connect; may raise SettingsError or StoreError.
            available: an event that is set while the store should be available; None if that is unknown.
        """
        try:
            await self._run(settings, available)
        finally:
            self._budget.take(self, 0)

    async def _run(self, settings: SettingsSource, available: asyncio.Event | None) -> None:
        task = asyncio.current_task()
        backoff = Backoff()
        while True:
            if available is not None:
                await available.wait()
            self._refused.clear()
            try:
                async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._until_refused())
                    how = settings()
                    store = await connect(
                        replace(await how if isinstance(how, Awaitable) else how, received=self._receive)
                    )
                    stack.push_async_callback(store.close)
                    self._store = store
                    tasks.create_task(self._lease(store).keep())
                    await self._follow(store)
            except* (StoreError, SettingsError) as errors:
                error = cast("StoreError | SettingsError", errors.exceptions[0])
                logger.info("the store of the run %s: %s", self._run_id, error)
                self.paused = isinstance(error, StoreTooLarge)
                if self.paused:
                    self._forget()
                self._away(error)
            finally:
                self._store = None
                self._received = 0
                self._budget.take(self, self._size)
                if self.readable:
                    backoff.reset()
                    self.readable = False
                    self._changed()
            if task is not None and task.cancelling():
                # If the connection breaks during the cancellation, the task group reports only the broken connection.
                raise asyncio.CancelledError
            if self.paused:
                await asyncio.sleep(TOO_LARGE_DELAY)
            await backoff.wait()

    async def write_size(self, size: records.SizeRecord) -> None:
        """Write the desired size if the mirror is connected; if it is not, ``changed()`` is called once it is.

        Raises:
            StoreError: the store is unavailable, or refused the request.
        """
        if self._store is not None:
            await self._lease(self._store).put(self._keys.size, codec.encode(size))

    async def forget_run(self) -> None:
        """Delete the run's keys from a store that outlives the run, if the mirror is connected.

        Raises:
            StoreError: the store is unavailable, or refused the request.
        """
        if (store := self._store) is not None:  # the attribute may change at each await
            await self._lease(store).end()
            await store.delete_prefix(self._keys.root)

    def refuse(self) -> None:
        """End the connection, and leave the store alone, because the mirrors take too much memory."""
        self._refused.set()
        self._forget()

    async def _until_refused(self) -> NoReturn:
        await self._refused.wait()
        raise _refusal()

    def _receive(self, size: int) -> None:
        """Record that the connection has received more bytes, or that they are no longer in memory."""
        self._received = max(self._received + size, 0)  # an answer may be released after its connection was closed
        self._take_memory()
        if size > 0 and self._refused.is_set():
            raise _refusal()

    def _take_memory(self) -> None:
        self._budget.take(self, self._size + self._received)

    def _forget(self) -> None:
        """Forget the run."""
        self.readable = False
        self.round = self.outcome = self.size = self.time_breakdown = self.history = None
        self.nodes, self.names = {}, {}
        self._sizes, self._size = {}, 0

    def _lease(self, store: Store) -> RunLease:
        return RunLease(store, self._run_id, ttl=self._ttl)

    async def _follow(self, store: Store) -> None:
        async with contextlib.aclosing(follow(store, self._keys.root)) as news:
            async for each in news:
                entries = self._take(each) if isinstance(each, Listing) else self._follow_changes(each)
                size = sum(entry.memory for entry in entries if entry is not None)
                self._receive(size)  # they stay in memory during the pause
                await asyncio.sleep(_ENTRY_PAUSE * (1 + len(entries)) + _BYTE_PAUSE * size)
                del each, entries
                self._receive(-size)

    def _follow_changes(self, changes: Sequence[Change]) -> Sequence[Entry | None]:
        if any([self._put(change.key, change.entry) for change in changes]):  # noqa: C419 - put all of them
            self._changed()
        return [change.entry for change in changes]

    def _take(self, listing: Listing) -> Sequence[Entry | None]:
        if not self.nodes or self.outcome is not None:
            self.round = self.outcome = None
        # If the store has lost the round of known nodes, the nodes are about to restore it.
        self.size = self.time_breakdown = self.history = None
        self.nodes = {}
        self._size -= sum(self._sizes.values())
        self._sizes = {}
        for entry in listing.entries:
            self._put(entry.key, entry)
        self.readable = True
        self._changed()
        return listing.entries

    def _put(self, key: str, entry: Entry | None) -> bool:
        """Copy the value of a key; return whether to call ``changed()``.

        Raises:
            StoreTooLarge: the run has more keys than any run has, or takes too much memory.
        """
        keys = self._keys
        self._size -= self._sizes.pop(key, 0)
        if entry is not None:
            self._sizes[key] = size = _memory(key, entry.value)
            self._size += size
            if len(self._sizes) > MAX_ENTRIES:
                raise too_large("etcd")
            self._take_memory()
            if self._refused.is_set():
                raise _refusal()
        if key == keys.time_breakdown:
            self.time_breakdown = _record(entry, records.TimeBreakdown)
            return False
        if key == keys.history:
            before, self.history = _first_steps(self.history), _record(entry, records.HistoryRecord)
            self._recorded()
            return _first_steps(self.history) != before
        if key == keys.state:
            state = _record(entry, records.StateRecord) or records.StateRecord()
            self.round, self.outcome = state.round, state.outcome
        elif key == keys.size:
            self.size = _record(entry, records.SizeRecord)
        elif key.startswith(keys.nodes):
            node_id = key.removeprefix(keys.nodes)
            node = _record(entry, records.NodeRecord) if len(node_id) <= _LONGEST_ID else None
            if node is None or node.starting:
                self.nodes.pop(node_id, None)
            else:
                known = self.nodes.get(node_id)
                self.nodes[node_id] = node
                self._forget_name(node_id)
                self.names[node_id] = node.name
                self._size += _memory(node_id + node.name)
                if len(self.names) > MAX_ENTRIES:
                    self._forget_name(next(iter(self.names)))
                return known is None or _but_progress(known) != _but_progress(node)
        return True

    def _forget_name(self, node_id: str) -> None:
        if (name := self.names.pop(node_id, None)) is not None:
            self._size -= _memory(node_id + name)


def _memory(key: str, value: bytes = b"") -> int:
    """Return the maximum number of bytes that a key and its decoded record take.

    Each value in a record is an object, and one special character makes each character of its string take four bytes.
    """
    width = 1 if value.isascii() and b"\\u" not in value else 4
    return 700 + 4 * len(key) + width * len(value) + 100 * value.count(b",")


def _refusal() -> StoreTooLarge:
    return StoreTooLarge(
        "the etcds of all jobs hold more than the operator's memory allows, and this one the most: use an etcd without "
        "other programs' keys below /torchelastic/"
    )


def _first_steps(history: records.HistoryRecord | None) -> tuple[int, ...]:
    """Return the different steps at which the ranks began the last round of a history; empty if they agree."""
    return history.rounds[-1].first_steps if history is not None and history.rounds else ()


def _but_progress(node: records.NodeRecord) -> records.NodeRecord:
    """Return the node's record without its program's progress, which only the leader needs."""
    return msgspec.structs.replace(node, first_step_at=0.0, has_stepped=False, last_checkpoint_at=0.0)


def _record(entry: Entry | None, kind: type[_Record]) -> _Record | None:
    """Return the record in an entry; None if the record is missing or malformed."""
    if entry is None:
        return None
    try:
        return codec.decode(entry.value, kind)
    except MalformedRecord as error:
        if _log_limit.allows():
            logger.warning("%s: %s", entry.key, error)
        return None
