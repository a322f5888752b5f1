"""Detection of a network partition: a node that reaches neither the store nor a peer must stop its workers.

Losing the store alone stops nothing, nor does losing the peers alone. A node that has been without the store for one
lease, and then finds neither the store nor a peer, must assume that the others have gone on without it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from torchelastic.errors import StoreError
from torchelastic.rendezvous.peer_connection import FINAL_PROBE_TIMEOUT
from torchelastic.store.backoff import RETRY_MIN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.rendezvous.run_state import RunContext


class PartitionDetector:
    """Detects that this node is partitioned.

    Args:
        context: the node's.
        has_workers: whether the node trains with others now.
        reaches_a_peer: whether a peer answers within so many seconds.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        has_workers: Callable[[], bool],
        reaches_a_peer: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._context = context
        self._run = context.run
        self._lease = context.settings.lease
        self._has_workers = has_workers
        self._reaches_a_peer = reaches_a_peer
        self._probe_timeout = min(FINAL_PROBE_TIMEOUT, self._lease)

    async def watch(self, partitioned: Callable[[], None]) -> NoReturn:
        """Call ``partitioned`` each time that the node is partitioned; until cancelled."""
        changed = self._run.changed
        while True:
            seen = changed.count
            away = self._run.away_since
            if away is None or not self._has_workers():
                await changed.after(seen)
                continue
            left = away + self._lease - asyncio.get_running_loop().time()
            if left > 0:
                await changed.after(seen, timeout=left)
            elif await self._reaches_any():
                await changed.after(seen, timeout=self._lease)
            elif self._run.away_since is not None and self._has_workers():
                partitioned()
                while self._run.away_since is not None:
                    await changed.after(changed.count)

    async def _reaches_any(self) -> bool:
        """Whether a peer or the store answers within a while: a connection that was cut takes a moment to return."""
        probes = [asyncio.create_task(_until(probe)) for probe in (self._probe_peers, self._probe_store)]
        try:
            found, _ = await asyncio.wait(probes, timeout=self._probe_timeout, return_when=asyncio.FIRST_COMPLETED)
            return bool(found)
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _probe_peers(self) -> bool:
        return await self._reaches_a_peer(self._probe_timeout)

    async def _probe_store(self) -> bool:
        await asyncio.sleep(RETRY_MIN)  # usually a peer has answered by then
        try:
            await self._context.store.get(self._context.keys.leader)
        except StoreError:
            return False
        return True


async def _until(probe: Callable[[], Awaitable[bool]]) -> None:
    found = await probe()
    while not found:
        await asyncio.sleep(RETRY_MIN)
        found = await probe()
