"""Leader election among the copies of the operator, with a Lease.

The leader election of the client library is not used: it does not release the lease at the end, does not notice that
the leader's work has ended, ends at the first broken connection, and writes local time as UTC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from elastic_operator.api.json_values import get_dict, get_int, get_str
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import LEASES, Api, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from elastic_operator.api.json_values import Json

logger: Final = logging.getLogger(__name__)

_TIMEOUT: Final = 3.0
"""Seconds for an attempt to acquire the lease, and for its release: a dead connection may go unnoticed."""


@dataclass(slots=True, kw_only=True)
class LeaderElector:
    """Competes for a lease. After a crash of the leader, a standby leads within ``lease_duration + 2 * poll_period``.

    A lease counts as expired if this copy has seen no renewal for the lease's duration. The times in the lease are
    ignored, because the clocks of machines differ.

    Attributes:
        identity: the unique name of this copy.
        lease_duration: seconds after which a lease that was not renewed has expired; a whole number.
        retry_period: seconds between renewals by the leader.
        renew_deadline: seconds without a renewal after which the leader stops; less than ``lease_duration``.
        poll_period: seconds between checks by a standby, and between attempts after a failed renewal.
    """

    api: Api
    namespace: str
    name: str
    identity: str
    lease_duration: int = 10
    retry_period: float = 2.5
    renew_deadline: float = 6.5
    poll_period: float = 1.0
    is_leader: bool = field(default=False, init=False)
    _seen: tuple[str, float] = field(default=("", 0.0), init=False)
    _renewed: float = field(default=0.0, init=False)
    _problem: str = field(default="", init=False)

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
        """Run ``work`` whenever the lease is held, and cancel it when the lease is lost; release the lease at the end.

        The work must run until it is canceled.
        """
        while True:
            while await self._hold(_TIMEOUT) != self.identity:  # noqa: ASYNC110 - a lease can only be polled
                await asyncio.sleep(self.poll_period)
            logger.info("became leader (%s)", self.identity)
            self.is_leader = True
            try:
                await until_one_ends(work(), self._renew_until_lost())
            finally:
                self.is_leader = False
                await self._release()
            logger.warning("no longer leader (%s): the lease could not be renewed", self.identity)

    async def _renew_until_lost(self) -> None:
        while True:
            await asyncio.sleep(self.retry_period)
            deadline = self._renewed + self.renew_deadline
            while (holder := await self._hold(max(deadline - time.monotonic(), 0))) != self.identity:
                if holder is not None or time.monotonic() >= deadline:
                    return
                await asyncio.sleep(self.poll_period)

    async def _hold(self, limit: float) -> str | None:
        """Acquire or renew the lease, if that is possible now; return its holder, or None if the holder is unknown."""
        problem = ""
        try:
            async with asyncio.timeout(limit):
                lease = await self._read()
                if not self._is_free(lease):
                    return _holder(lease)
                await self._write(lease, self.identity)
        except ClusterError as error:
            if isinstance(error, ApiError) and error.conflict:  # another copy was faster
                return None
            problem = str(error)
        except TimeoutError:
            problem = "the API server does not answer in time"
        if problem and problem != self._problem:
            logger.warning(
                "the lease %s cannot be %s: %s", self.name, "renewed" if self.is_leader else "acquired", problem
            )
        self._problem = problem
        return None if problem else self.identity

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                while _holder(lease := await self._read()) == self.identity:
                    try:
                        await self._write(lease, "")
                    except ApiError as error:
                        if not error.conflict:  # an earlier renewal succeeded without a response
                            raise
        except (ClusterError, TimeoutError) as error:
            logger.debug("the lease was not released: %s", str(error) or "no answer in time")

    async def _read(self) -> Json | None:
        try:
            return await self.api.get(LEASES, self.namespace, self.name)
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def _write(self, lease: Json | None, holder: str) -> None:
        """Create, renew, take over or release the lease, if it has not changed since it was read."""
        began = time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before: Json = get_dict(lease, "spec") if lease else {}
        transition = get_str(before, "holderIdentity") != holder
        spec: dict[str, Any] = {
            "holderIdentity": holder or None,
            "leaseDurationSeconds": self.lease_duration if holder else 1,
            "acquireTime": now if transition else before.get("acquireTime"),
            "renewTime": now,
            "leaseTransitions": (get_int(before, "leaseTransitions") or 0) + (1 if before and transition else 0),
        }
        about: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": about, "spec": spec}
        if lease:
            about |= {"resourceVersion": lease["metadata"]["resourceVersion"], "uid": lease["metadata"]["uid"]}
            await self.api.replace(LEASES, self.namespace, self.name, body)
        else:
            await self.api.create(LEASES, self.namespace, body)
        self._renewed = began

    def _is_free(self, lease: Json | None) -> bool:
        if lease is None or _holder(lease) in ("", self.identity):
            return True
        now = time.monotonic()
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, now)
        duration = get_int(lease, "spec", "leaseDurationSeconds") or self.lease_duration
        return now - self._seen[1] >= duration


def _holder(lease: Json | None) -> str:
    return get_str(lease, "spec", "holderIdentity")


async def until_one_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until one of them ends, then cancel the others; raise its exception, if any."""
    tasks = {asyncio.ensure_future(work) for work in works}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
