"""Which of several copies of the operator acts: the one that holds a Lease.

The client library has a leader election of its own, which does not fit: it neither gives the lease back at the end, so
that a successor waits until it has run out, nor notices when the leader's work has died; it ends with the first broken
connection; and it writes local time as UTC. What is needed is little.

A lease counts as abandoned when it has not been renewed for its duration as measured here: clocks of machines differ.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.resources import LEASES
from elastic_operator.unchecked import integer, mapping, text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from elastic_operator.kube.api import Api
    from elastic_operator.spec import Json

_log: Final = logging.getLogger(__name__)

_GIVING_BACK: Final = 3.0
"""Seconds that giving the lease back may take; a successor waits for its end otherwise."""

_ASKING: Final = 3.0
"""Seconds after which it is asked anew who holds the lease: a connection may be dead without anybody's having said so,
and a successor that waits for its answer takes the place of nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """A lease and its times, in seconds.

    Who stands by leads at the latest ``duration + 2 * ask_every`` after the leader was heard of last, and a moment.

    Attributes:
        namespace: where it is.
        name: its name.
        identity: who would hold it; no two processes that run at the same time have the same.
        duration: after which it is abandoned if it was not renewed; whole seconds.
        renew_every: so often the leader renews it.
        give_up_after: the leader stops leading when it could not renew it for so long; less than ``duration``.
        ask_every: so often the others look at it.
    """

    namespace: str
    name: str
    identity: str
    duration: int = 10
    renew_every: float = 2.5
    give_up_after: float = 6.5
    ask_every: float = 1.0


class Leadership:
    """Leads whenever nobody else does.

    Args:
        api: the connection.
        settings: see there.

    Attributes:
        leads: whether this copy leads now.
    """

    def __init__(self, api: Api, settings: LeaseSettings) -> None:
        self._api = api
        self._settings = settings
        self._lease: Json = {}
        self._seen = ""
        self._seen_since = 0.0
        self._renewed = 0.0
        self._complaint = ""
        self.leads = False

    async def run(self, work: Callable[[], Awaitable[None]]) -> NoReturn:
        """Wait for the lease, then work as long as it is held, and so on until cancelled; then give it back.

        Args:
            work: what a leader does; it is cancelled when the lease is lost. It must not end by itself.
        """
        while True:
            await self._acquire()
            _log.info("this copy (%s) leads", self._settings.identity)
            self.leads = True
            try:
                await self._while_held(work)
            finally:
                self.leads = False
                await self._give_back()
            _log.warning("this copy (%s) leads no more: the lease could not be renewed", self._settings.identity)

    async def _while_held(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work until the lease is lost."""
        working = asyncio.ensure_future(work())
        holding = asyncio.ensure_future(self._hold())
        try:
            await asyncio.wait({working, holding}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, holding):
                task.cancel()
            await asyncio.wait({working, holding})
        for task in (working, holding):
            if not task.cancelled():
                task.result()

    async def _acquire(self) -> None:
        """Return when the lease is held."""
        settings = self._settings
        while True:
            try:
                async with asyncio.timeout(_ASKING):
                    lease = await self._read()
                    if lease is None or self._is_free(lease):
                        await self._write(lease, settings.identity)
                        self._complaint = ""
                        return
            except ApiError as error:
                if not error.conflict:  # else another one was faster
                    self._complain(str(error))
            except ClusterError as error:
                self._complain(str(error))
            except TimeoutError:
                self._complain("the API server does not answer in time")
            await asyncio.sleep(settings.ask_every)

    async def _hold(self) -> None:
        """Renew the lease; returns when it is lost."""
        settings = self._settings
        while True:
            await asyncio.sleep(settings.renew_every)
            while not await self._renew():
                if time.monotonic() - self._renewed >= settings.give_up_after:
                    return
                await asyncio.sleep(settings.ask_every)
            if self._holder(self._lease) != settings.identity:
                return

    async def _renew(self) -> bool:
        """Try once; gives back whether it is known now who holds the lease."""
        settings = self._settings
        left = self._renewed + settings.give_up_after - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0)):
                try:
                    await self._write(self._lease, settings.identity)
                except ApiError as error:
                    if not error.conflict and not error.not_found:
                        raise
                    lease = await self._read()  # perhaps an earlier renewal was done and its answer got lost
                    if lease is not None and self._holder(lease) == settings.identity:
                        self._lease = lease
                        return False
                    self._lease = lease or {}
        except (ClusterError, TimeoutError) as error:
            _log.info("the lease could not be renewed: %s", str(error) or "no answer in time")
            return False
        return True

    async def _give_back(self) -> None:
        """Let a successor lead at once."""
        if self._holder(self._lease) != self._settings.identity:
            return
        try:
            async with asyncio.timeout(_GIVING_BACK):
                while not await self._tried_to_give_back():
                    pass  # it was read anew
        except (ClusterError, TimeoutError) as error:
            _log.debug("the lease was not given back: %s", str(error) or "no answer in time")
        self._lease = {}

    async def _tried_to_give_back(self) -> bool:
        """Try once; False where it is to be tried again: a renewal was done and its answer did not come."""
        try:
            await self._write(self._lease, "")
        except ApiError as error:
            if not error.conflict:
                raise
            self._lease = await self._read() or {}
            return self._holder(self._lease) != self._settings.identity
        return True

    async def _read(self) -> Json | None:
        try:
            return await self._api.get(LEASES, self._settings.namespace, self._settings.name)
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def _write(self, lease: Json | None, holder: str) -> None:
        """Make the lease, renew it, take it over or give it back, if nobody else has changed it meanwhile."""
        settings = self._settings
        began = time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before: Json = mapping(lease, "spec") if lease else {}
        changes_hands = text(before, "holderIdentity") != holder
        spec: dict[str, Any] = {
            "holderIdentity": holder or None,
            "leaseDurationSeconds": settings.duration if holder else 1,
            "acquireTime": now if changes_hands else before.get("acquireTime"),
            "renewTime": now,
            "leaseTransitions": (integer(before, "leaseTransitions") or 0) + (1 if before and changes_hands else 0),
        }
        about: dict[str, Any] = {"name": settings.name, "namespace": settings.namespace}
        body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": about, "spec": spec}
        if lease:
            about |= {"resourceVersion": lease["metadata"]["resourceVersion"], "uid": lease["metadata"]["uid"]}
            self._lease = await self._api.replace(LEASES, settings.namespace, settings.name, body)
        else:
            self._lease = await self._api.create(LEASES, settings.namespace, body)
        self._renewed = began

    def _is_free(self, lease: Json) -> bool:
        """Whether nobody holds the lease, or its holder has not been heard of for too long."""
        holder = self._holder(lease)
        if holder in ("", self._settings.identity):
            return True
        now = time.monotonic()
        state = lease["metadata"]["resourceVersion"]
        if state != self._seen:
            self._seen, self._seen_since = state, now
        duration = integer(lease, "spec", "leaseDurationSeconds") or self._settings.duration
        return now - self._seen_since >= duration

    @staticmethod
    def _holder(lease: Json) -> str:
        return text(lease, "spec", "holderIdentity")

    def _complain(self, sentence: str) -> None:
        """Say it once, not with every try."""
        if sentence != self._complaint:
            _log.warning("the lease %s cannot be had: %s", self._settings.name, sentence)
        self._complaint = sentence
