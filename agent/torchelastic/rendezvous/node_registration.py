"""A node's registration in the store: its key under its lease, written again when either is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.protocol import NodeRecord, encode
from torchelastic.rendezvous.change_signal import ChangeSignal
from torchelastic.store.backoff import backoff_delay

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.rendezvous.run_state import RunContext

logger = logging.getLogger(__name__)


class NodeRegistration:
    """Keeps a node's record in the store while :meth:`run` runs.

    Args:
        context: the node's.
        record: the node's first record.
        fresh_store_port: offers a port for the next round's TCPStore that no store knows yet; called before the key is
            written again after its loss, because the store may have lost a round that used the port offered before.
    """

    def __init__(self, context: RunContext, record: NodeRecord, fresh_store_port: Callable[[], int]) -> None:
        self.record = record
        self.lease = 0
        """The lease's id; 0 without one."""
        self._fresh_store_port = fresh_store_port
        self._store = context.store
        self._changed = context.run.changed
        self._key = context.keys.node(context.node)
        self._ttl = context.settings.lease
        self._request_timeout = context.settings.lease / 2  # an etcd that restarts may never answer
        self._updated = ChangeSignal()
        self._progress = ChangeSignal()
        self._written = 0
        self._renewal_due = 0.0
        self._tries = 0
        self._silent = False

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change the record; it is written as soon as the store takes it."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._updated.send()

    async def flush(self) -> None:
        """Wait until all updates so far are written."""
        while self._written < self._updated.count or not self.lease:
            await self._progress.after(self._progress.count)

    async def run(self) -> None:
        """Hold the lease and the key until cancelled.

        Raises:
            StoreRefused: the store refuses this node.
        """
        while True:
            try:
                await self._hold()
            except TimeoutError:
                if not self._silent:
                    logger.info("the store did not answer in time; retrying until it does")
                self._silent = True
            except LeaseLost:
                self.lease = 0
                logger.info("the lease of this node has expired; taking a new one")
            except StoreUnavailable as error:
                if self._tries == 0:
                    logger.warning("%s; going on without it until it is back", error)
                await asyncio.sleep(backoff_delay(self._tries))
                self._tries += 1

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
        self._tries = 0
        self._silent = False
