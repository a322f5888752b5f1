"""The keys of a run that outlive whoever wrote them: written under the run's lease, which is renewed by all who care.

The lease's id follows from the run's id, so nobody has to be told it. Nor does anybody have to wait for it: a write
goes out as if the lease were there, and only where it is not (a new run, a store that came back empty) is it granted
and the write sent once more. Nothing was done by the one that failed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from torchelastic.contract import RUN_LEASE_RENEWALS, RUN_LEASE_TTL, run_lease
from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.store.api import Store

_Result = TypeVar("_Result")

_MOMENTS: Final = 1000
"""So many times does a moment go into the lease's time: where others take over again and again, it is kept still."""

_GRANTS: Final = 3
"""So often is the lease granted for one write before the store counts as unable."""


class LastingKeys:
    """Writes lasting keys of one run, and keeps them.

    LeaseLost is never raised here: whoever has a lease of their own can't mistake the loss of this one for it.

    Args:
        store: where.
        run_id: the run's id.
        ttl: seconds for which the keys stay after they were last renewed.
    """

    def __init__(self, store: Store, run_id: str, *, ttl: float = RUN_LEASE_TTL) -> None:
        self._store = store
        self._lease = run_lease(run_id)
        self._ttl = ttl

    async def put(self, key: str, value: bytes) -> int:
        """Set a key; gives back the revision.

        Raises:
            StoreUnavailable: the store cannot be reached, or it may or may not have been done.
            StoreRefused: trying again is no use.
        """
        return await self._under_lease(lambda: self._store.put(key, value, lease=self._lease))

    async def swap(self, key: str, value: bytes, *, expected: int) -> int | None:
        """Set a key if its last change is still that of revision ``expected``, as :meth:`Store.swap` does.

        Returns:
            The new revision, or None where the key had changed meanwhile.

        Raises:
            StoreUnavailable: the store cannot be reached, or it may or may not have been done.
            StoreRefused: trying again is no use.
        """
        return await self._under_lease(
            lambda: self._store.swap(key, value, expected=expected, lease=self._lease),
        )

    async def keep(self, *, at_once: bool = True) -> NoReturn:
        """Grant the lease and renew it again and again, until cancelled; a store that is away is waited for.

        Args:
            at_once: begin with it. False leaves the store alone for a moment, where there is more urgent business and
                somebody else has kept the lease until now.

        Raises:
            StoreRefused: trying again is no use.
        """
        if not at_once:
            await asyncio.sleep(self._ttl / _MOMENTS)
        tries = 0
        while True:
            try:
                await self._grant()
            except StoreUnavailable:  # said already by whoever watches the run's keys
                await asyncio.sleep(retry_delay(tries))
                tries += 1
            else:
                tries = 0
                await asyncio.sleep(self._ttl / RUN_LEASE_RENEWALS)

    async def end(self) -> None:
        """Remove all lasting keys now, with their lease.

        Raises:
            StoreError: as the store does.
        """
        await self._store.revoke(self._lease)

    async def _grant(self) -> None:
        await self._store.grant(self._ttl, lease=self._lease)

    async def _under_lease(self, write: Callable[[], Awaitable[_Result]]) -> _Result:
        for _ in range(_GRANTS):
            try:
                return await write()
            except LeaseLost:
                await self._grant()
        raise StoreUnavailable("the store loses the run's lease as soon as it is granted")
