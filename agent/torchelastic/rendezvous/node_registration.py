"""A node's registration in the store: its key under its lease, and what it removes before it registers."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from torchelastic.errors import LeaseLost, MalformedRecord, StoreUnavailable
from torchelastic.protocol import NodeRecord, decode, decode_state, encode
from torchelastic.rendezvous.run_state import ChangeSignal
from torchelastic.store.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.protocol import RunKeys
    from torchelastic.rendezvous.run_state import RunStateWatch
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)


class NodeRegistration:
    """Keeps a node's record in the store while :meth:`run` runs; writes it again if the key or the lease is lost.

    Args:
        record: the node's first record.
        fresh_store_port: offers a port for the next round's TCPStore that no store knows yet; called before the key is
            written again after its loss, because the store may have lost a round that used the port offered before.
    """

    def __init__(self, run: RunStateWatch, record: NodeRecord, fresh_store_port: Callable[[], int]) -> None:
        self.record = record
        self.lease = 0
        """The lease's id; 0 without one."""
        self._fresh_store_port = fresh_store_port
        self._store = run.store
        self._changed = run.changed
        self._key = run.keys.node(run.node)
        self._ttl = run.settings.lease
        self._request_timeout = run.settings.lease / 2  # an etcd that restarts may never answer
        self._updated = ChangeSignal()
        self._progress = ChangeSignal()
        self._written = 0
        self._renewal_due = 0.0
        self._backoff = Backoff()
        self._timed_out = False

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change the record; it is written as soon as the store takes it."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._updated.send()

    async def flush(self) -> None:
        """Wait until all updates so far are written."""
        await self._progress.until(lambda: self._written == self._updated.count and bool(self.lease))

    async def run(self) -> None:
        """Hold the lease and the key until cancelled.

        Raises:
            StoreRefused: the store refuses this node.
        """
        while True:
            try:
                await self._hold()
            except TimeoutError:
                if not self._timed_out:
                    logger.info("the store did not answer in time; retrying until it does")
                self._timed_out = True
            except LeaseLost:
                self.lease = 0
                logger.info("the lease of this node has expired; taking a new one")
            except StoreUnavailable as error:
                if self._backoff.attempts == 0:
                    logger.warning("%s; going on without it until it is back", error)
                await self._backoff.wait()

    async def withdraw(self) -> None:
        """Delete the node's key; :meth:`run` may not run any more."""
        await self._store.delete(self._key)
        if self.lease:
            lease, self.lease = self.lease, 0
            await self._store.revoke(lease)

    async def _hold(self) -> None:
        now = asyncio.get_running_loop().time
        if not self.lease:
            due = now() + self._ttl / 3
            async with asyncio.timeout(self._request_timeout):
                lease = await self._store.grant(self._ttl)
            if self.record.joined:
                self.record = msgspec.structs.replace(self.record, store=self._fresh_store_port())
            await self._put(lease)
            self.lease, self._renewal_due = lease, due
            self._progress.send()
            self._changed.send()
        while True:
            if self._written == self._updated.count:
                await self._updated.after(self._written, timeout=max(self._renewal_due - now(), 0.0))
            if now() >= self._renewal_due:
                due = now() + self._ttl / 3
                async with asyncio.timeout(self._request_timeout):
                    await self._store.keep_alive(self.lease)
                self._renewal_due = due
                self._answered()
            if self._written < self._updated.count:
                await self._put(self.lease)

    async def _put(self, lease: int) -> None:
        count, record = self._updated.count, self.record
        async with asyncio.timeout(self._request_timeout):
            revision = await self._store.put(self._key, encode(record), lease=lease)
        if not self.record.joined:  # written with the next update; until then the key's creation says the same
            self.record = msgspec.structs.replace(self.record, joined=revision)
        self._written = count
        self._answered()
        self._progress.send()

    def _answered(self) -> None:
        self._backoff.reset()
        self._timed_out = False


async def remove_finished_run(run: RunStateWatch) -> None:
    """Remove a finished run of the same id, unless ids are unique or a node of it is still present.

    A store that is away is waited for as long as peers are.

    Raises:
        StoreError: as the store does.
    """
    if run.settings.unique_run:
        return
    backoff = Backoff()
    deadline = asyncio.get_running_loop().time() + run.settings.join_timeout
    while True:
        try:
            if not await _remove(run):
                return
        except StoreUnavailable as error:
            if backoff.attempts == 0:
                logger.warning("%s; waiting for it", error)
            if asyncio.get_running_loop().time() > deadline:
                raise
            await backoff.wait()


async def _remove(run: RunStateWatch) -> bool:
    """Remove what is left of a finished run; return whether to look again."""
    store, keys = run.store, run.keys
    if not _is_over(await store.get(keys.state)):
        return False  # usually; so a thousand new nodes need not list all keys
    listing = await store.list(keys.root)
    entries = {entry.key: entry for entry in listing.entries}
    state = entries.get(keys.state)
    if state is None or not _is_over(state) or any(_took_part(entry, state, keys) for entry in listing.entries):
        return False
    # The state last: while it stands, the other keys are not mistaken for those of a running run.
    for key in (keys.time_breakdown, keys.history, keys.notice, keys.leader, keys.state):
        if key in entries:
            await store.compare_and_swap(key, None, expected=entries[key].modified)
    return True


def _is_over(entry: Entry | None) -> bool:
    if entry is None:
        return False
    try:
        return decode_state(entry.value).outcome is not None
    except MalformedRecord:
        return False


def _took_part(entry: Entry, state: Entry, keys: RunKeys) -> bool:
    """Return whether this key belongs to a node that was present when the run ended."""
    if not entry.key.startswith(keys.nodes):
        return False
    try:
        joined = decode(entry.value, NodeRecord).joined
    except MalformedRecord:
        return False
    return (joined or entry.created) < state.modified
