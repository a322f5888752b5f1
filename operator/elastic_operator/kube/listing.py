"""Fresh listings of all that the operator looks at: when it starts, now and then, and whenever a watch was broken.

Watches tell what changes. What vanished while one was broken, nobody tells: the watch begins again with what exists.
And a watch may fall silent. So the cache is compared with a listing, soon after a watch has begun anew and every few
minutes. This also fills it in the first place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.resources import DEPLOYMENTS, ELASTIC_JOBS, PODS, SERVICES
from elastic_operator.names import LABEL_ROLE, ROLE_ETCD, ROLE_WORKER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_operator.kube.api import Api
    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.resources import Resource

_log: Final = logging.getLogger(__name__)

LOOKED_AT: Final[Mapping[Resource, str]] = {
    ELASTIC_JOBS: "",
    PODS: f"{LABEL_ROLE}={ROLE_WORKER}",
    SERVICES: f"{LABEL_ROLE}={ROLE_ETCD}",
    DEPLOYMENTS: f"{LABEL_ROLE}={ROLE_ETCD}",
}
"""The kinds of objects that the operator looks at, each with its label selector, which the API server applies."""


_LONGEST_SETTLING: Final = 10
"""So many times is a watch waited for that tells and tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingSettings:
    """When listings are made.

    Attributes:
        relist_every: seconds after which everything is listed again though nothing seems to be wrong.
        settling: seconds after a watch began anew, in which it may tell more of what exists.
        first_retry: seconds after which a listing that failed is made again; then twice as long, and so on.
        longest_retry: seconds that lie at most between two tries.
    """

    relist_every: float = 300.0
    settling: float = 1.0
    first_retry: float = 0.5
    longest_retry: float = 10.0


class Listings:
    """Keeps a cache true by listing.

    Args:
        api: what to ask.
        cache: what to fill.
        namespaces: which ones; empty for all.
        settings: see there.

    Attributes:
        complete: set once the cache holds everything.
    """

    def __init__(
        self, api: Api, cache: Cache, *, namespaces: Sequence[str] = (), settings: ListingSettings | None = None
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._settings = settings if settings is not None else ListingSettings()
        self._doubted = asyncio.Event()
        self._complaint = ""
        self.complete = asyncio.Event()

    def doubt(self) -> None:
        """A watch begins, or has begun anew: compare soon."""
        self._doubted.set()

    async def run(self) -> NoReturn:
        """List whenever it is time to, until cancelled. Who calls this lists for the first time himself."""
        while True:
            await self._until_doubted()
            await self.list_all()

    async def list_all(self) -> None:
        """List everything, however often that has to be tried."""
        delay = self._settings.first_retry
        while True:
            try:
                for resource, labels in LOOKED_AT.items():
                    for namespace in self._namespaces:
                        await self._list(resource, labels, namespace)
            except ClusterError as error:
                self._complain(_said(error))
            except Exception:  # noqa: BLE001 - whatever answered there, the next answer may make sense
                _log.exception("what exists cannot be listed")
            else:
                if self._complaint:
                    _log.info("everything can be listed now")
                self._complaint = ""
                self.complete.set()
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, self._settings.longest_retry)

    async def _until_doubted(self) -> None:
        """Return when it is time to list again."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.relist_every):
                await self._doubted.wait()
        except TimeoutError:
            return
        for _ in range(_LONGEST_SETTLING):
            self._doubted.clear()
            await asyncio.sleep(settings.settling)
            if not self._doubted.is_set():
                return

    async def _list(self, resource: Resource, labels: str, namespace: str | None) -> None:
        uids: set[str] = set()
        as_of = 0
        async with contextlib.aclosing(self._api.pages(resource, namespace, labels=labels)) as pages:
            async for page, version in pages:
                as_of = int(version)
                for body in page:
                    self._cache.put(resource, body)
                    uids.add(body["metadata"]["uid"])
        self._cache.keep_only(resource, uids, as_of, namespace)

    def _complain(self, sentence: str) -> None:
        """Say it once, not with every try."""
        if sentence != self._complaint:
            _log.warning("%s; trying again until it can be done", sentence)
        self._complaint = sentence


def _said(error: ClusterError) -> str:
    if isinstance(error, ApiError) and error.not_found:
        return (
            "this cluster does not know the ElasticJob: install the definition (it is part of the chart, or "
            "`kubectl apply -f crds/elasticjob.yaml`)"
        )
    return f"what exists cannot be listed: {error}"
