"""Adapts kopf to the operator: one run of kopf watches objects, and the operator lists them itself.

kopf does not list for itself, for these reasons:

- It runs a task for each listed object. Until 500 jobs with 5,000 pods are in the cache, kopf's own lists take 6.0 s
  and 142 MiB, and the operator's take 1.8 s and 114 MiB (the lists only, from a server in memory).
- It reports no deletion that happens between two watches. A periodic list of names finds it only after the interval;
  the cache finds it at once, by the object's absence from the list with which the next watch begins.
- A job must not be in the cache before its pods, and kopf lists all kinds at once.
- If a kind in one namespace cannot be listed, kopf ends all watches.

So kopf gets an empty list, with the resource version of the operator's own list, and watches from that version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.parse import urlsplit

import aiohttp
import kopf

from elastic_operator.api.constants import LABEL_JOB, LABEL_ROLE, ROLE_ETCD, ROLE_WORKER
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes import client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from elastic_operator.api.json_values import Json
    from elastic_operator.kubernetes.object_cache import ObjectCache

logger: Final = logging.getLogger(__name__)

WATCHED: Final[Mapping[client.Resource, str]] = {
    client.PODS: f"{LABEL_ROLE}={ROLE_WORKER}",
    client.SERVICES: f"{LABEL_ROLE}={ROLE_ETCD}",
    client.DEPLOYMENTS: f"{LABEL_ROLE}={ROLE_ETCD}",
    client.DISRUPTION_BUDGETS: LABEL_JOB,
    client.NETWORK_POLICIES: LABEL_JOB,
    client.ELASTIC_JOBS: "",
}
"""The watched kinds with their label selectors."""
_BY_PLURAL: Final = {resource.plural: resource for resource in WATCHED}

_STOP_TIMEOUT: Final = 10.0
_REQUEST_BACKOFF: Final = (1.0, 1.0, 2.0, 3.0, 5.0)
_LONGEST_WATCH: Final = 300.0
"""Seconds after which a watch is opened again, because the watch may deliver no more changes."""
_WATCH_INTERVAL: Final = 0.5
"""Minimum number of seconds between the starts of two watches of the same path: a proxy may end watches at once."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def wait_until_defined(
    api: client.Api, namespaces: Iterable[str | None], delays: Iterator[float], report: Callable[[ClusterError], None]
) -> None:
    """Wait until ElasticJobs are defined and may be listed in one of the namespaces; report each failed attempt.

    kopf never watches a kind that is defined after it has started.
    """
    for delay in delays:
        for namespace in namespaces:
            try:
                await api.list(client.ELASTIC_JOBS, namespace, name="none")
            except ClusterError as error:
                problem = error
            else:
                return
        report(problem)
        await asyncio.sleep(delay)


class KopfSession:
    """One run of kopf; kopf passes it to the handlers as ``memo``.

    Args:
        on_list: lists a kind in a namespace (None: in all) into the cache, and returns the resource version.
    """

    def __init__(
        self, api: client.Api, cache: ObjectCache, on_list: Callable[[client.Resource, str | None], Awaitable[str]]
    ) -> None:
        self._api = api
        self._cache = cache
        self._on_list = on_list
        self._http: WatchSession | None = None
        self._watch_problem = ""
        self._watchers: set[asyncio.Task[Any]] = set()

    def __copy__(self) -> Self:
        return self  # kopf copies the memo for each object

    async def run(self, registry: kopf.OperatorRegistry, namespaces: Sequence[str]) -> str:
        """Watch these namespaces, or all if there are none, until kopf ends; return why it ended."""
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until they have the operator's handlers again
        try:
            # kopf.operator() would cancel all tasks of the event loop when it ends, not only its own.
            tasks = await kopf.spawn_tasks(
                registry=registry,
                memo=self,
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                # The default asks for the user's name, and in a container a user may have none.
                identity="elastic-operator",  # type: ignore[arg-type]  # a str; kopf does not export its NewType
            )
            for number, handler in handlers.items():  # kopf has set its own, and would end the watches only
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, handler)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT)
            await self.close()  # kopf's cleanup has not run if a task takes longer
        errors = (task.exception() for task in tasks if task.done() and not task.cancelled())
        return next((str(error) or type(error).__name__ for error in list(errors) if error is not None), "")

    async def login(self) -> kopf.AiohttpSession:
        """Return the connection for the watches, with fresh credentials."""
        # kopf asks for another login after a rejection, and ends if it gets the same session again.
        info = await self._api.access()
        if self._http is None or self._http.info != info:
            if self._http is not None:
                await self._http.close()
            self._http = WatchSession(info, self._list, self._watch_failed)
        return kopf.AiohttpSession(server=info.server, aiohttp_session=cast("Any", self._http))

    async def close(self) -> None:
        """End the watches, and close their connections."""
        for task in self._watchers:
            task.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        if self._http is not None:
            await self._http.close()

    def update_cache(self, plural: str, event: Mapping[str, Any]) -> None:
        """Put the object of an event into the cache, or remove it; ``plural`` names its kind."""
        try:
            update = self._cache.remove if event["type"] == "DELETED" else self._cache.put
            update(_BY_PLURAL[plural], event["object"])
        except Exception:
            logger.exception("an unexpected error while a change was handled")

    async def _list(self, resource: client.Resource, namespace: str | None) -> str:
        if (task := asyncio.current_task()) is not None:
            self._watchers.add(task)  # each begins with a list; if one fails, kopf ends without canceling the others
        return await self._on_list(resource, namespace)

    def _watch_failed(self, problem: str) -> None:
        """Log once, not at every attempt, why no watch can be opened; an empty problem means that one was opened."""
        if problem and problem != self._watch_problem:
            logger.warning("a watch cannot be opened; trying again: %s", problem)
        self._watch_problem = problem


class WatchSession:
    """An HTTP session for kopf that answers each list request with an empty list, after ``on_list`` has made the list.

    A request after :meth:`close` opens the session again: kopf closes its session before its watches, and a watch
    without a session would wait for another login forever.

    Args:
        info: the API server, and the credentials.
        on_list: lists a kind in a namespace (None: in all) and returns the resource version.
        on_watch: called with the reason when a watch cannot be opened, and with "" when one is opened.
    """

    closed: Final = False

    def __init__(
        self,
        info: kopf.ConnectionInfo,
        on_list: Callable[[client.Resource, str | None], Awaitable[str]],
        on_watch: Callable[[str], None],
    ) -> None:
        self.info = info
        self.headers = {**info.as_http_headers(), "User-Agent": "elastic-operator"}
        self._on_list = on_list
        self._on_watch = on_watch
        self._session: aiohttp.ClientSession | None = None
        self._next_watch: dict[str, float] = {}

    async def request(self, *, url: str, **how: Any) -> aiohttp.ClientResponse | _EmptyList:  # noqa: ANN401 - aiohttp's
        """Send a request; instead of a request for a list, call ``on_list``."""
        parts = urlsplit(url)
        if "watch=" in parts.query:
            await self._throttle(parts.path)
        elif (resource := _BY_PLURAL.get(parts.path.rpartition("/")[2])) is not None:
            before, _, namespace = parts.path.rpartition("/")[0].rpartition("/")
            return _EmptyList(await self._on_list(resource, namespace if before.endswith("/namespaces") else None))
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self.info.as_ssl_context()),
                headers=self.headers,
                proxy=self.info.proxy_url,
            )
        try:
            response = await self._session.request(url=url, **how)
        except client.NETWORK_ERRORS as error:
            self._on_watch(str(client.unreachable(error)))
            raise
        if response.status < 400:
            self._on_watch("")
        elif response.status == 403 or response.status >= 500:
            self._on_watch(str(client.ApiError.of(response.status, await response.read())))
        return response

    async def _throttle(self, path: str) -> None:
        now = time.monotonic()
        begin = max(now, self._next_watch.get(path, 0.0) + _WATCH_INTERVAL)
        self._next_watch[path] = begin
        await asyncio.sleep(begin - now)

    async def close(self) -> None:
        """Close all connections until the next request."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _EmptyList(contextlib.nullcontext[None]):
    """A response with an empty list."""

    status: Final = 200

    def __init__(self, version: str) -> None:
        super().__init__()
        self._version = version

    async def json(self) -> Json:
        return {"metadata": {"resourceVersion": self._version}, "items": []}


class _NoDiffBase(kopf.DiffBaseStorage):
    """Stores nothing. kopf's default is to store the last state in the object itself."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        del body, extra_fields
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """Return None, because nothing is stored."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Store nothing."""


def configure(settings: kopf.OperatorSettings) -> None:
    """Turn off peering, events, annotations and finalizers, and watch only the objects of jobs."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = _REQUEST_BACKOFF
    settings.watching.client_timeout = _LONGEST_WATCH
    settings.queueing.idle_timeout = 0.1  # kopf keeps a full copy of each object for this time
    settings.persistence.diffbase_storage = _NoDiffBase()
    for resource, labels in WATCHED.items():
        if labels:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = labels
