"""The keys of a run that outlive the process that wrote them: written under the run's lease, which the nodes renew.

The id of the lease follows from the run's id. A write is sent as if the lease existed. If it does not (a new run, a
store that came back empty), the lease is granted and the write sent again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.protocol import RUN_LEASE_RENEWALS, RUN_LEASE_TTL, run_lease
from torchelastic.store.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.store.api import Store

_Result = TypeVar("_Result")

_LATER: Final = 1e-3
"""The first renewal by a node that leaves urgent requests to go first, as a share of the lease's time."""

_GRANTS: Final = 3
"""How often the lease is granted for one write before the store counts as unavailable."""


class RunLease:
    """Writes keys under the lease of one run, and renews it.

    It does not raise LeaseLost: a caller with a lease of its own would mistake it for the loss of that lease.

    Args:
        store: the store.
        run_id: the run's id.
        ttl: seconds for which the keys stay after the last renewal.
    """

    def __init__(self, store: Store, run_id: str, *, ttl: float = RUN_LEASE_TTL) -> None:
        self._store = store
        self._lease = run_lease(run_id)
        self._ttl = ttl

    async def put(self, key: str, value: bytes) -> int:
        """Set a key; see :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        return await self._under_lease(lambda: self._store.put(key, value, lease=self._lease))

    async def compare_and_swap(self, key: str, value: bytes, *, expected: int) -> int | None:
        """Set a key if it has not changed; see :meth:`~torchelastic.store.api.Store.compare_and_swap`."""
        return await self._under_lease(
            lambda: self._store.compare_and_swap(key, value, expected=expected, lease=self._lease),
        )

    async def keep(self, *, at_once: bool = True) -> NoReturn:
        """Grant the lease and renew it until cancelled; wait for a store that is away.

        Args:
            at_once: grant it now. False gives more urgent requests a moment, if another node has kept the lease so far.

        Raises:
            StoreRefused: trying again does not help.
        """
        if not at_once:
            await asyncio.sleep(self._ttl * _LATER)
        backoff = Backoff()
        while True:
            try:
                await self._grant()
            except StoreUnavailable:  # reported by the watch of the run's keys
                await backoff.wait()
            else:
                backoff.reset()
                await asyncio.sleep(self._ttl / RUN_LEASE_RENEWALS)

    async def end(self) -> None:
        """Remove the lease and its keys now."""
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
