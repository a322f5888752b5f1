"""The informer: lists the objects that the operator needs into the cache, in pages, and lets kopf watch them.

A namespace for which the operator lacks permissions does not block the others: its list is retried until it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.api.constants import LABEL_JOB
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes import client, handlers
from elastic_operator.kubernetes.kopf_session import WATCHED, KopfSession, wait_until_defined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.kubernetes.object_cache import ObjectCache

logger: Final = logging.getLogger(__name__)

_MAX_DELAY: Final = 10.0
_RESTART_DELAY: Final = 3.0
_POD_GROUPS_INTERVAL: Final = 300.0
_CONCURRENT_LISTS: Final = 4
"""Maximum number of concurrent lists: a page of large pods takes 50 MB, and each kind in each namespace has a list."""
_BATCH: Final = 100
"""Number of listed objects after which other tasks may run."""


class Informer:
    """Keeps the cache of objects up to date.

    Args:
        namespaces: the namespaces to watch; empty for all.
        base_delay: seconds before the first retry of a list.

    Attributes:
        synced: an event that is set once the cache contains all objects that may be listed.
    """

    def __init__(
        self, api: client.Api, cache: ObjectCache, *, namespaces: Sequence[str] = (), base_delay: float = 0.2
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._base_delay = base_delay
        self._listed: set[tuple[client.Resource, str | None]] = set()
        self._list_slots = asyncio.Semaphore(_CONCURRENT_LISTS)
        self._progress = asyncio.Event()
        self._problems: dict[str | None, str] = {}
        """By namespace, why it cannot be listed; with the key None, why nothing can be listed."""
        self.synced = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why the cache is not in sync, as a sentence; empty if it is in sync."""
        listing = "not all objects have been listed yet"
        return "" if self.synced.is_set() else next(iter(self._problems.values()), listing)

    async def run(self) -> NoReturn:
        """List and watch until canceled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._list_pod_groups_again())
            while True:
                delays = client.backoff(self._base_delay, _MAX_DELAY)
                await wait_until_defined(self._api, self._namespaces, delays, lambda error: self._report(None, error))
                namespaces = [each for each in self._namespaces if each is not None]
                why = await KopfSession(self._api, self._cache, self.list).run(handlers.registry, namespaces)
                logger.warning(
                    "the watches have ended%s; they start again in %.0f s", why and f" ({why})", _RESTART_DELAY
                )
                await asyncio.sleep(_RESTART_DELAY)

    async def list(self, resource: client.Resource, namespace: str | None) -> str:
        """List a kind into the cache, with retries until it succeeds; return the resource version of the list.

        Raises:
            ApiError: the cluster does not define the kind.
        """
        for delay in client.backoff(self._base_delay, _MAX_DELAY):
            try:
                if resource == client.ELASTIC_JOBS:  # a job must not be in the cache before its pods
                    others = {(each, namespace) for each in WATCHED if each != client.ELASTIC_JOBS}
                    while not others <= self._listed:
                        self._progress.clear()
                        await self._progress.wait()
                    await self._list_pod_groups(namespace)
                version = await self._list_into_cache(resource, namespace, WATCHED[resource])
            except ClusterError as error:
                if isinstance(error, client.ApiError) and error.not_found:
                    raise
                self._report(namespace, error)
                await asyncio.sleep(delay)
            else:
                self._has_listed(resource, namespace)
                return version
        raise AssertionError("unreachable")

    async def _list_pod_groups(self, namespace: str | None) -> None:
        for group in client.POD_GROUPS.values():
            try:
                await self._list_into_cache(group, namespace, LABEL_JOB)
            except client.ApiError as error:
                if error.not_found:
                    self._cache.remove_unlisted(group, (), sys.maxsize, namespace)
                elif error.status != 403:
                    raise

    async def _list_pod_groups_again(self) -> NoReturn:
        """List PodGroups regularly: not every cluster has these kinds, so they are not watched.

        Other clients may delete PodGroups, for example with their definition when a scheduler is reinstalled.
        """
        while True:
            await asyncio.sleep(_POD_GROUPS_INTERVAL)
            for namespace in [each for resource, each in self._listed if resource == client.ELASTIC_JOBS]:
                try:
                    await self._list_pod_groups(namespace)
                except ClusterError as error:
                    logger.info("the PodGroups could not be listed again: %s", error)

    async def _list_into_cache(self, resource: client.Resource, namespace: str | None, labels: str) -> str:
        uids: set[str] = set()
        version = ""
        async with self._list_slots, contextlib.aclosing(self._api.pages(resource, namespace, labels=labels)) as pages:
            async for items, version in pages:  # noqa: B007 - the version is that of the last page
                for number, body in enumerate(items, start=1):
                    self._cache.put(resource, body)
                    uids.add(body["metadata"]["uid"])
                    if not number % _BATCH:
                        await asyncio.sleep(0)
                del items  # or two pages would fill the memory
        self._cache.remove_unlisted(resource, uids, int(version), namespace)
        return version

    def _has_listed(self, resource: client.Resource, namespace: str | None) -> None:
        self._listed.add((resource, namespace))
        if resource == client.ELASTIC_JOBS:
            if self._problems.pop(None, ""):
                logger.info("the objects can be listed now")
            if self._problems.pop(namespace, ""):
                logger.info("the namespace %s can be watched now", namespace)
        self._update()

    def _report(self, namespace: str | None, error: ClusterError) -> None:
        """Log a problem once, not at every attempt.

        For about a second after a CRD is installed, an API server responds with 429: this is logged as information.
        """
        status = error.status if isinstance(error, client.ApiError) else 0
        problem = f"the objects cannot be listed: {error}"
        if namespace is not None and len(self._namespaces) > 1:
            problem = f"the namespace {namespace} cannot be watched: {error}"
        if status == 403:
            problem += "; grant the operator its permissions (the chart's role has them)"
            problem += ", or remove it from --namespace" if len(self._namespaces) > 1 else ""
        if status == 404:
            problem = (
                "this cluster does not know the ElasticJob: install the definition (it is part of the chart, or "
                "`kubectl apply -f crds/elasticjob.yaml`)"
            )
        if problem.partition(":")[0] != self._problems.get(namespace, "").partition(":")[0]:
            (logger.info if status == 429 else logger.warning)("%s; trying again until it succeeds", problem)
        self._problems[namespace] = problem
        self._update()

    def _update(self) -> None:
        self._progress.set()
        complete = {each for each in self._namespaces if (client.ELASTIC_JOBS, each) in self._listed}
        if complete and complete | self._problems.keys() >= set(self._namespaces):
            self.synced.set()
