"""Fresh listings of all that the operator looks at: when it starts, now and then, and whenever a watch was broken.

Watches tell what changes. What vanished while one was broken, nobody tells: the watch begins again with what exists.
And a watch may fall silent. So the cache is compared with a listing, soon after a watch has begun anew and every few
minutes. This also fills it in the first place.

Of several namespaces, one may be closed to the operator: nobody gave it rights there, or they went with the namespace.
That is no reason to leave the others alone. It is tried again now and then, and what was known of it stays known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.pod_group import POD_GROUPS
from elastic_operator.kube.resources import DEPLOYMENTS, DISRUPTION_BUDGETS, ELASTIC_JOBS, PODS, SERVICES
from elastic_operator.names import LABEL_JOB, LABEL_ROLE, ROLE_ETCD, ROLE_WORKER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_operator.kube.api import Api
    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.resources import Resource

_log: Final = logging.getLogger(__name__)

LOOKED_AT: Final[Mapping[Resource, str]] = {
    PODS: f"{LABEL_ROLE}={ROLE_WORKER}",
    SERVICES: f"{LABEL_ROLE}={ROLE_ETCD}",
    DEPLOYMENTS: f"{LABEL_ROLE}={ROLE_ETCD}",
    DISRUPTION_BUDGETS: LABEL_JOB,
    ELASTIC_JOBS: "",
}
"""The kinds of objects that the operator looks at, each with its label selector, which the API server applies.

The jobs come last: where pods may not be listed, no job must seem to have none.
"""

OPTIONAL: Final[Mapping[Resource, str]] = dict.fromkeys(POD_GROUPS.values(), LABEL_JOB)
"""Kinds of objects that not every cluster has. They are listed and not watched: nobody but this operator has reason to
change or remove those with its label."""

_LISTED: Final[Mapping[Resource, str]] = {
    **{resource: labels for resource, labels in LOOKED_AT.items() if resource != ELASTIC_JOBS},
    **OPTIONAL,
    ELASTIC_JOBS: LOOKED_AT[ELASTIC_JOBS],
}

_CLOSED: Final = (403, 404)
"""The HTTP statuses that say that a namespace is closed to the operator."""

_NOT_NOW: Final = (410, 429)
"""The HTTP statuses below 500 that say that the same question may be answered soon."""

_GRANT: Final = "grant the operator its rights there (the chart's role has them)"

_LONGEST_SETTLING: Final = 10
"""So many times is a watch waited for that tells and tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingSettings:
    """When listings are made.

    Attributes:
        relist_every: seconds after which everything is listed again though nothing seems to be wrong.
        retry_closed: seconds after which it is seen whether a namespace that could not be listed now can.
        settling: seconds after a watch began anew, in which it may tell more of what exists.
        first_retry: seconds after which a listing that failed is made again; then twice as long, and so on.
        longest_retry: seconds that lie at most between two tries.
        stumbling: seconds between tries of the listing of one kind, before all kinds are listed anew.
    """

    relist_every: float = 300.0
    retry_closed: float = 10.0
    settling: float = 1.0
    first_retry: float = 0.5
    longest_retry: float = 10.0
    stumbling: tuple[float, ...] = (0.1, 0.2, 0.4)


class Listings:
    """Keeps a cache true by listing.

    Args:
        api: what to ask.
        cache: what to fill.
        namespaces: which ones; empty for all.
        settings: see there.

    Attributes:
        complete: set once the cache holds everything that may be listed.
        complaint: why nothing can be listed, as a sentence; empty where something can.
        namespaces: those that could be listed at last; empty for all.
    """

    def __init__(
        self, api: Api, cache: Cache, *, namespaces: Sequence[str] = (), settings: ListingSettings | None = None
    ) -> None:
        self._api = api
        self._cache = cache
        self._wanted: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._closed: frozenset[str | None] = frozenset()
        self._moved = asyncio.Event()
        self._settings = settings if settings is not None else ListingSettings()
        self._doubted = asyncio.Event()
        self.complete = asyncio.Event()
        self.complaint = ""
        self.namespaces = tuple(namespaces)

    def doubt(self) -> None:
        """A watch begins, or has begun anew: compare soon."""
        self._doubted.set()

    async def run(self) -> NoReturn:
        """List whenever it is time to, until cancelled. Who calls this lists for the first time himself."""
        settings, clock = self._settings, asyncio.get_running_loop().time
        last = clock()
        while True:
            doubted = await self._doubted_within(settings.retry_closed if self._closed else settings.relist_every)
            if doubted or clock() - last >= settings.relist_every or not await self._still_closed():
                await self.list_all()
                last = clock()

    async def others_than(self, namespaces: Sequence[str]) -> None:
        """Return when other namespaces than these can be listed."""
        while self.namespaces == tuple(namespaces):
            self._moved.clear()
            await self._moved.wait()

    async def list_all(self) -> tuple[str, ...]:
        """List everything that may be listed, however often that has to be tried.

        Returns:
            The namespaces that could be listed; empty for all.
        """
        delay = self._settings.first_retry
        while True:
            try:
                await self._list_open()
            except ClusterError as error:
                self._complain(_said(error))
            except Exception:  # noqa: BLE001 - whatever answered there, the next answer may make sense
                _log.exception("what exists cannot be listed")
            else:
                if self.complaint:
                    _log.info("%s can be listed now", ", ".join(self.namespaces) if self._closed else "everything")
                self.complaint = ""
                self.complete.set()
                return self.namespaces
            await asyncio.sleep(delay)
            delay = min(delay * 2, self._settings.longest_retry)

    async def _doubted_within(self, seconds: float) -> bool:
        """Whether there is reason to compare: soon after a watch has begun; False when this time is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._doubted.wait()
        except TimeoutError:
            return False
        for _ in range(_LONGEST_SETTLING):
            self._doubted.clear()
            await asyncio.sleep(self._settings.settling)
            if not self._doubted.is_set():
                break
        return True

    async def _list_open(self) -> None:
        """List what may be listed; an error where nothing may."""
        refusals = {namespace: await self._refusal(namespace) for namespace in self._wanted}
        closed = {namespace: error for namespace, error in refusals.items() if error is not None}
        if len(closed) == len(self._wanted):
            raise next(iter(closed.values()))
        for namespace, error in closed.items():
            if namespace not in self._closed:
                _log.warning(
                    "the namespace %s cannot be looked after: %s; %s, or take it out of --namespace",
                    namespace,
                    error,
                    _GRANT,
                )
        for namespace in self._closed.difference(closed):
            _log.info("the namespace %s can be looked after now", namespace)
        self._closed = frozenset(closed)
        self.namespaces = tuple(each for each in self._wanted if each is not None and each not in closed)
        self._moved.set()

    async def _still_closed(self) -> bool:
        """Whether all that was closed still is."""
        try:
            return all([await self._refusal(namespace) for namespace in self._closed])
        except Exception:  # noqa: BLE001 - who lists all finds out what it is
            return False

    async def _refusal(self, namespace: str | None) -> ApiError | None:
        """List a namespace; gives back the error where it is closed."""
        try:
            for resource, labels in _LISTED.items():
                if resource in OPTIONAL:
                    await self._list_if_known(resource, labels, namespace)
                else:
                    await self._list(resource, labels, namespace)
        except ApiError as error:
            if error.status not in _CLOSED:
                raise
            return error
        return None

    async def _list_if_known(self, resource: Resource, labels: str, namespace: str | None) -> None:
        """List objects of a kind that not every cluster has; where it does not, there are none."""
        try:
            await self._list(resource, labels, namespace)
        except ApiError as error:
            if error.not_found:
                self._cache.keep_only(resource, (), sys.maxsize, namespace)
            elif error.status not in _CLOSED:
                raise

    async def _list(self, resource: Resource, labels: str, namespace: str | None) -> None:
        """List one kind; a server that just stumbles is asked again soon, for else all would be listed anew."""
        for pause in self._settings.stumbling:
            try:
                await self._list_once(resource, labels, namespace)
            except ClusterError as error:
                if isinstance(error, ApiError) and error.status < 500 and error.status not in _NOT_NOW:
                    raise
            else:
                return
            await asyncio.sleep(pause)
        await self._list_once(resource, labels, namespace)

    async def _list_once(self, resource: Resource, labels: str, namespace: str | None) -> None:
        uids: set[str] = set()
        as_of = 0
        async with contextlib.aclosing(self._api.pages(resource, namespace, labels=labels)) as pages:
            async for page in pages:
                as_of = int(page.version)
                for body in page:
                    self._cache.put(resource, body)
                    uids.add(body["metadata"]["uid"])
        self._cache.keep_only(resource, uids, as_of, namespace)

    def _complain(self, sentence: str) -> None:
        """Say it once, not with every try."""
        if sentence != self.complaint:
            _log.warning("%s; trying again until it can be done", sentence)
        self.complaint = sentence


def _said(error: ClusterError) -> str:
    if isinstance(error, ApiError) and error.not_found:
        return (
            "this cluster does not know the ElasticJob: install the definition (it is part of the chart, or "
            "`kubectl apply -f crds/elasticjob.yaml`)"
        )
    words = f"what exists cannot be listed: {error}"
    return f"{words}; {_GRANT}" if isinstance(error, ApiError) and error.status in _CLOSED else words
