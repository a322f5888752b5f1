"""What the agents say in the store, mirrored: listed, then watched; listed again when the store was away.

The mirror never decides anything. While the store is away it keeps what it knew last and says that it cannot be read.
As long as it follows a run it also renews the lease on which the run's lasting keys hang, as the leading agent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from torchelastic.contract import (
    RUN_LEASE_TTL,
    EpochRecord,
    HistoryRecord,
    NodeRecord,
    OutcomeRecord,
    RunKeys,
    SizeRecord,
    TimeSplit,
    decode,
    encode,
)
from torchelastic.endpoints import parse_endpoints
from torchelastic.errors import HistoryCompacted, LeaseLost, MalformedRecord, SettingsError, StoreError
from torchelastic.store import Listing, StoreSettings, connect, follow
from torchelastic.store.lasting import LastingKeys

if TYPE_CHECKING:
    from torchelastic.store import Entry, Store

_log = logging.getLogger(__name__)

_FIRST_DELAY: Final = 0.05
_LONGEST_DELAY: Final = 2.0

_REMEMBERED: Final = 1000

_Record = TypeVar("_Record", bound=msgspec.Struct)

Reach = Callable[[], StoreSettings | Awaitable[StoreSettings]]
"""Gives how to reach a store; it may have to ask for that first."""


def store_at(endpoint: str) -> StoreSettings:
    """How to reach the etcd that is written like this; an agent that is told the same reaches the same.

    Args:
        endpoint: ``host[:port]``, several with commas, each perhaps behind ``http://`` or ``https://``.

    Raises:
        SettingsError: that can't be read.
    """
    protocol, endpoints = parse_endpoints(endpoint)
    return StoreSettings(endpoints=endpoints, protocol=protocol or "http")


class StoreMirror:
    """The keys of one run.

    It calls ``changed()`` whenever an attribute has changed, but for what is told of the past and of a program's
    progress, and ``away(sentence)`` whenever the store could not be reached, the connection broke, or nobody can say
    where the store is.

    Args:
        run_id: the run's id.
        changed: see above.
        away: see above.
        run_lease: seconds after which nothing is left in the store of a run that everybody has abandoned.
        remembered: of how many nodes that are gone the names are kept at least.

    Attributes:
        readable: whether what follows is what stands in the store now.
        epoch: the current epoch.
        outcome: the end of the run.
        size: the wanted size.
        split: where the run's time went; it is rewritten every few seconds, so nobody is told of that.
        history: the run's epochs; of a new one ``epoch`` tells.
        nodes: by node id, the nodes that are there.
        names: by node id, the pod of every node that is there or in the epoch, and of those that went last.
    """

    def __init__(
        self,
        run_id: str,
        *,
        changed: Callable[[], None],
        away: Callable[[str], None],
        run_lease: float = RUN_LEASE_TTL,
        remembered: int = _REMEMBERED,
    ) -> None:
        self._run_id = run_id
        self._run_lease = run_lease
        self._remembered = remembered
        self._keys = RunKeys.of(run_id)
        self._changed = changed
        self._away = away
        self._store: Store | None = None
        self._lasting: LastingKeys | None = None
        self.readable = False
        self.epoch: EpochRecord | None = None
        self.outcome: OutcomeRecord | None = None
        self.size: SizeRecord | None = None
        self.split: TimeSplit | None = None
        self.history: HistoryRecord | None = None
        self.nodes: dict[str, NodeRecord] = {}
        self.names: dict[str, str] = {}

    async def run(self, settings: Reach, available: asyncio.Event | None) -> None:
        """Follow the store until cancelled.

        Args:
            settings: gives how to reach it, whenever it is tried; may raise SettingsError or StoreError.
            available: set while it is worth trying; None where nobody knows.
        """
        task = asyncio.current_task()
        delay = _FIRST_DELAY
        while True:
            if available is not None:
                await available.wait()
            try:
                async with contextlib.AsyncExitStack() as stack:
                    how = settings()
                    store = await connect(await how if isinstance(how, Awaitable) else how)
                    stack.push_async_callback(store.close)
                    self._store = store
                    self._lasting = LastingKeys(store, self._run_id, ttl=self._run_lease)
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._lasting.keep())
                        while True:
                            await self._follow(store)
            except* (StoreError, SettingsError) as errors:
                self._away(str(errors.exceptions[0]))
            finally:
                self._store = self._lasting = None
                if self.readable:
                    delay = _FIRST_DELAY
                    self.readable = False
                    self._changed()
            if task is not None and task.cancelling():
                # Where a connection breaks at the very moment of the cancellation, the task group tells that alone.
                raise asyncio.CancelledError
            await asyncio.sleep(delay)
            delay = min(delay * 2, _LONGEST_DELAY)

    @property
    def connected(self) -> bool:
        """Whether there is a store that could be asked; it may not answer all the same."""
        return self._lasting is not None

    async def write_size(self, size: SizeRecord) -> None:
        """Say how many nodes there should be.

        Raises:
            StoreError: the store is away, or refused.
        """
        if self._lasting is None:
            raise StoreError("the store cannot be reached just now")
        await self._lasting.put(self._keys.size, encode(size))

    async def forget_run(self) -> None:
        """Remove the run's keys from a store that outlives it.

        Raises:
            StoreError: the store is away, or refused.
        """
        store, lasting = self._store, self._lasting  # it may break, and be none of ours any more, at any await
        if store is None or lasting is None:
            return
        with contextlib.suppress(LeaseLost):  # then its keys are gone, but not those of the nodes
            await lasting.end()
        await store.delete_prefix(self._keys.root)

    async def _follow(self, store: Store) -> None:
        """Take over what stands in the store, and every change of it; returns where the store forgot the history."""
        with contextlib.suppress(HistoryCompacted):
            async with contextlib.aclosing(follow(store, self._keys.root)) as news:
                async for each in news:
                    if isinstance(each, Listing):
                        self._take(each)
                        self._changed()
                        continue
                    told = [self._put(change.key, change.entry) for change in each]
                    if any(told):
                        self._changed()

    def _take(self, listing: Listing) -> None:
        self.epoch = self.outcome = self.size = self.split = self.history = None
        self.nodes = {}
        for entry in listing.entries:
            self._put(entry.key, entry)
        self.readable = True

    def _put(self, key: str, entry: Entry | None) -> bool:
        """Take over what stands under a key; gives back whether somebody should know."""
        keys = self._keys
        if key == keys.split:
            self.split = _record(entry, TimeSplit)
            return False
        if key == keys.history:
            self.history = _record(entry, HistoryRecord)
            return False
        if key == keys.epoch:
            self.epoch = _record(entry, EpochRecord)
        elif key == keys.outcome:
            self.outcome = _record(entry, OutcomeRecord)
        elif key == keys.size:
            self.size = _record(entry, SizeRecord)
        elif key.startswith(keys.nodes):
            node_id = key.removeprefix(keys.nodes)
            node = _record(entry, NodeRecord)
            if node is None:
                self.nodes.pop(node_id, None)
            else:
                before = self.nodes.get(node_id)
                self.nodes[node_id] = node
                self.names.pop(node_id, None)  # the order is that in which they were last seen
                self.names[node_id] = node.name
                self._forget_names()
                return before is None or _but_progress(before) != _but_progress(node)
        return True

    def _forget_names(self) -> None:
        """Forget the names of nodes that went long ago; now and then, so that it costs next to nothing."""
        members = self.epoch.members if self.epoch is not None else ()
        if len(self.names) <= len(self.nodes) + len(members) + 2 * self._remembered:
            return
        in_use = self.nodes.keys() | {member.node for member in members}
        former = [node_id for node_id in self.names if node_id not in in_use]
        for node_id in former[: max(len(former) - self._remembered, 0)]:
            del self.names[node_id]


def _but_progress(node: NodeRecord) -> NodeRecord:
    """What a node says of itself, without what its program tells with each checkpoint: that is the leader's to hear."""
    return msgspec.structs.replace(node, stepped=0.0, kept=0.0)


def _record(entry: Entry | None, kind: type[_Record]) -> _Record | None:
    """The record in an entry; None where there is none that can be understood."""
    if entry is None:
        return None
    try:
        return decode(entry.value, kind)
    except MalformedRecord as error:
        _log.warning("%s: %s", entry.key, error)
        return None
