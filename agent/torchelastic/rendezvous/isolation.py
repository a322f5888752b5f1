"""When a node is cut off from the run: then what it trains is of use to nobody, and its workers have to stop.

Losing the store alone stops nothing, nor does losing the peers alone: the store tells what became of them. A node that
has been without the store for a lease's time, and then finds neither the store nor a peer, is cut off: for all that it
can know, the others have gone on without it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from torchelastic.errors import StoreError
from torchelastic.rendezvous.link import LAST_LOOK
from torchelastic.store.retrying import RETRY_MIN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.contract import RunKeys
    from torchelastic.rendezvous.control import Control
    from torchelastic.store.api import Store


class Isolation:
    """Looks out for it, for as long as :meth:`watch` runs.

    Args:
        store: where the nodes meet.
        keys: the run's keys.
        control: the view of them.
        lease: seconds without the store after which it is asked whether the node is cut off.
        matters: whether the node trains with others now; else nothing is to be stopped.
        reaches_a_peer: whether a peer answers within so many seconds.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        control: Control,
        lease: float,
        *,
        matters: Callable[[], bool],
        reaches_a_peer: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._store = store
        self._keys = keys
        self._control = control
        self._lease = lease
        self._matters = matters
        self._reaches_a_peer = reaches_a_peer
        self._last_look = min(LAST_LOOK, lease)

    async def watch(self, tell: Callable[[], None]) -> NoReturn:
        """Tell each time that the node is cut off, until cancelled."""
        changed = self._control.changed
        while True:
            seen = changed.count
            away = self._control.away_since
            if away is None or not self._matters():
                await changed.after(seen)
                continue
            left = away + self._lease - asyncio.get_running_loop().time()
            if left > 0:
                await changed.after(seen, timeout=left)
            elif await self._finds_somebody():
                await changed.after(seen, timeout=self._lease)
            elif self._control.away_since is not None and self._matters():
                tell()
                while self._control.away_since is not None:
                    await changed.after(changed.count)

    async def _finds_somebody(self) -> bool:
        """Whether a peer or the store answers, looked at for a while.

        A link that was cut takes a moment to be made again, and a store may be back whose keys are not watched yet.
        """
        looks = [asyncio.create_task(_until(look)) for look in (self._finds_a_peer, self._finds_the_store)]
        try:
            found, _ = await asyncio.wait(looks, timeout=self._last_look, return_when=asyncio.FIRST_COMPLETED)
            return bool(found)
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _finds_a_peer(self) -> bool:
        return await self._reaches_a_peer(self._last_look)

    async def _finds_the_store(self) -> bool:
        await asyncio.sleep(RETRY_MIN)  # as a rule a peer has answered by then, and the store is left in peace
        try:
            await self._store.get(self._keys.leader)
        except StoreError:
            return False
        return True


async def _until(look: Callable[[], Awaitable[bool]]) -> None:
    found = await look()
    while not found:
        await asyncio.sleep(RETRY_MIN)
        found = await look()
