"""A node's presence in the store: its key under its lease, put again whenever either is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from torchelastic.contract import NodeRecord, encode
from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.rendezvous.pulse import Pulse
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from torchelastic.contract import RunKeys
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)


class Session:
    """Keeps a node's record in the store for as long as :meth:`run` runs.

    Args:
        store: where.
        keys: the run's keys.
        node: this node's id.
        record: what it says of itself at first.
        lease: seconds after which it counts as gone when nothing is heard of it.
        changed: is sent when a record was put or a lease was granted.
    """

    def __init__(
        self, store: Store, keys: RunKeys, node: str, record: NodeRecord, lease: float, changed: Pulse
    ) -> None:
        self.node = node
        self.record = record
        self.lease = 0
        """The lease's id; 0 while there is none."""
        self._changed = changed
        self._store = store
        self._key = keys.node(node)
        self._ttl = lease
        # An etcd that finds its feet again may never answer what it was asked before.
        self._patience = lease / 2
        self._wanted = Pulse()
        self._progress = Pulse()
        self._written = 0
        self._due = 0.0
        self._tries = 0
        self._silent = False

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change what the node says of itself; it is written as soon as the store takes it."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._wanted.send()

    async def flush(self) -> None:
        """Wait until all updates so far are written."""
        while self._written < self._wanted.count or not self.lease:
            await self._progress.after(self._progress.count)

    async def run(self) -> None:
        """Hold the lease and the key, until cancelled.

        Raises:
            StoreRefused: the store refuses this node.
        """
        while True:
            try:
                await self._hold()
            except TimeoutError:
                if not self._silent:
                    logger.info("the store did not answer in time; asking it again until it does")
                self._silent = True
            except LeaseLost:
                self.lease = 0
                logger.info("the lease of this node has ended; taking a new one")
            except StoreUnavailable as error:
                if self._tries == 0:
                    logger.warning("%s; going on without it until it is back", error)
                await asyncio.sleep(retry_delay(self._tries))
                self._tries += 1

    async def withdraw(self) -> None:
        """Take the node's key away at once; nothing may run that would put it again."""
        await self._store.delete(self._key)  # also where its lease has just been replaced
        if self.lease:
            lease, self.lease = self.lease, 0
            await self._store.revoke(lease)

    async def _hold(self) -> None:
        now = asyncio.get_running_loop().time
        if not self.lease:
            due = now() + self._ttl / 3
            async with asyncio.timeout(self._patience):
                lease = await self._store.grant(self._ttl)
            await self._put(lease)
            self.lease, self._due = lease, due
            self._progress.send()
            self._changed.send()
        while True:
            if self._written == self._wanted.count:
                await self._wanted.after(self._written, timeout=max(self._due - now(), 0.0))
            if now() >= self._due:  # also where there is something to write all the time
                due = now() + self._ttl / 3
                async with asyncio.timeout(self._patience):
                    await self._store.keep_alive(self.lease)
                self._due = due
                self._answered()
            if self._written < self._wanted.count:
                await self._put(self.lease)

    async def _put(self, lease: int) -> None:
        count, record = self._wanted.count, self.record
        async with asyncio.timeout(self._patience):
            revision = await self._store.put(self._key, encode(record), lease=lease)
        if not self.record.joined:
            # Goes along with the next update: until then the key's own creation says the same.
            self.record = msgspec.structs.replace(self.record, joined=revision)
        self._written = count
        self._answered()
        self._progress.send()

    def _answered(self) -> None:
        self._tries = 0
        self._silent = False
