"""The informer: lists and watches the objects that the operator needs, and keeps the cache up to date.

kopf watches. Its handlers only observe and return nothing, because kopf writes return values into the object.
All other features of kopf are off: events, peering, finalizers, annotations. Lists go into the cache, in pages. kopf
itself gets an empty list with the resource version from which it watches. Otherwise it would keep a task and a copy of
every object, which would take most of the operator's memory.

A namespace for which the operator lacks permissions does not block the others: its list is retried until it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast
from urllib.parse import urlsplit

import aiohttp
import kopf

from elastic_operator.api.constants import LABEL_JOB, LABEL_ROLE, ROLE_ETCD, ROLE_WORKER
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes import client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from elastic_operator.api.spec import Json
    from elastic_operator.kubernetes.object_cache import ObjectCache

_log: Final = logging.getLogger(__name__)

_WATCHED: Final[Mapping[client.Resource, str]] = {
    client.PODS: f"{LABEL_ROLE}={ROLE_WORKER}",
    client.SERVICES: f"{LABEL_ROLE}={ROLE_ETCD}",
    client.DEPLOYMENTS: f"{LABEL_ROLE}={ROLE_ETCD}",
    client.DISRUPTION_BUDGETS: LABEL_JOB,
    client.ELASTIC_JOBS: "",
}
"""The watched kinds with their label selectors."""
_BY_PLURAL: Final = {resource.plural: resource for resource in _WATCHED}

_MAX_DELAY: Final = 10.0
_RESTART_DELAY: Final = 3.0
_STOP_TIMEOUT: Final = 10.0
_REQUEST_BACKOFF: Final = (1.0, 1.0, 2.0, 3.0, 5.0)
_LONGEST_WATCH: Final = 300.0
"""Seconds after which a watch is opened again, because the watch may deliver no more changes."""
_POD_GROUPS_INTERVAL: Final = 300.0
_WATCH_INTERVAL: Final = 0.5
"""Minimum number of seconds between the starts of two watches of the same path: a proxy may end watches at once."""
_CONCURRENT_LISTS: Final = 4
"""Maximum number of concurrent lists: a page of large pods takes 50 MB, and each kind in each namespace has a list."""
_BATCH: Final = 100
"""Number of listed objects after which other tasks may run."""


class Informer:
    """Keeps the cache of objects up to date.

    Args:
        api: the connection.
        cache: the cache to keep up to date.
        namespaces: the namespaces to watch; empty for all.
        base_delay: seconds before the first retry of a list.
        handle_signals: called after each start of kopf, which sets its own signal handlers.

    Attributes:
        synced: an event that is set once the cache contains all objects that may be listed.
    """

    def __init__(
        self,
        api: client.Api,
        cache: ObjectCache,
        *,
        namespaces: Sequence[str] = (),
        base_delay: float = 0.2,
        handle_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._base_delay = base_delay
        self._handle_signals = handle_signals
        self._listed: set[tuple[client.Resource, str | None]] = set()
        self._list_slots = asyncio.Semaphore(_CONCURRENT_LISTS)
        self._progress = asyncio.Event()
        self._problems: dict[str | None, str] = {}
        """By namespace, why it cannot be listed; with the key None, why nothing can be listed."""
        self._watch_problem = ""
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
                await self._until_possible()
                why = await self._run_kopf()
                _log.warning(
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
                    others = {(each, namespace) for each in _WATCHED if each != client.ELASTIC_JOBS}
                    while not others <= self._listed:
                        self._progress.clear()
                        await self._progress.wait()
                    await self._list_pod_groups(namespace)
                version = await self._list_into_cache(resource, namespace, _WATCHED[resource])
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
                    self._cache.keep_only(group, (), sys.maxsize, namespace)
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
                    _log.info("the PodGroups could not be listed again: %s", error)

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
        self._cache.keep_only(resource, uids, int(version), namespace)
        return version

    def _has_listed(self, resource: client.Resource, namespace: str | None) -> None:
        self._listed.add((resource, namespace))
        if resource == client.ELASTIC_JOBS:
            if self._problems.pop(None, ""):
                _log.info("the objects can be listed now")
            if self._problems.pop(namespace, ""):
                _log.info("the namespace %s can be watched now", namespace)
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
            _log.log(logging.INFO if status == 429 else logging.WARNING, "%s; trying again until it succeeds", problem)
        self._problems[namespace] = problem
        self._update()

    def _update(self) -> None:
        self._progress.set()
        complete = {each for each in self._namespaces if (client.ELASTIC_JOBS, each) in self._listed}
        if complete and complete | self._problems.keys() >= set(self._namespaces):
            self.synced.set()

    async def _until_possible(self) -> None:
        """Wait until ElasticJobs are defined and may be listed in one of the namespaces.

        kopf never watches a kind that is defined after it has started.
        """
        for delay in client.backoff(self._base_delay, _MAX_DELAY):
            for namespace in self._namespaces:
                try:
                    await self._api.list(client.ELASTIC_JOBS, namespace, name="none")
                except ClusterError as error:
                    problem = error
                else:
                    return
            self._report(None, problem)
            await asyncio.sleep(delay)

    async def _run_kopf(self) -> str:
        """Watch until kopf ends; return why it ended."""
        namespaces = [each for each in self._namespaces if each is not None]
        registry = kopf.OperatorRegistry()
        for resource in _WATCHED:
            kopf.on.event(
                group=resource.group,
                version=resource.version,
                plural=resource.plural,
                id=resource.plural,
                registry=registry,
            )(self._handler(resource))
        sessions: list[WatchSession] = []
        watchers: set[asyncio.Task[Any]] = set()

        async def list_for_watcher(resource: client.Resource, namespace: str | None) -> str:
            if (task := asyncio.current_task()) is not None:
                watchers.add(task)  # each begins with a list; if one fails, kopf ends without canceling the others
            return await self.list(resource, namespace)

        @kopf.on.login(id="login", registry=registry)
        async def login(**_: object) -> kopf.AiohttpSession:
            # kopf asks for another login after a rejection, and ends if it gets the same session again.
            info = await self._api.access()
            if not sessions or sessions[-1].info != info:
                if sessions:
                    await sessions.pop().close()
                sessions.append(WatchSession(info, list_for_watcher, self._watch_failed))
            return kopf.AiohttpSession(server=info.server, aiohttp_session=cast("Any", sessions[-1]))

        # kopf.operator() would cancel all tasks of the event loop when it ends, not only its own.
        tasks = await kopf.spawn_tasks(
            registry=registry,
            settings=_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            # The default asks for the user's name, and in a container a user may have none.
            identity="elastic-operator",  # type: ignore[arg-type]  # a str; kopf does not export its NewType
        )
        self._handle_signals()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for group in (set(tasks), watchers):
                for task in group:
                    task.cancel()
                if group:
                    await asyncio.wait(group, timeout=_STOP_TIMEOUT)
            for session in sessions:
                await session.close()
        errors = (task.exception() for task in tasks if task.done() and not task.cancelled())
        return next((str(error) or type(error).__name__ for error in list(errors) if error is not None), "")

    def _handler(self, resource: client.Resource) -> Callable[..., Awaitable[None]]:
        async def handle(event: Mapping[str, Any], **_: object) -> None:
            try:
                (self._cache.remove if event["type"] == "DELETED" else self._cache.put)(resource, event["object"])
            except Exception:  # noqa: BLE001 - kopf's own log is off
                _log.exception("an unexpected error while a change was handled")

        return handle

    def _watch_failed(self, problem: str) -> None:
        """Log once, not at every attempt, why no watch can be opened; an empty problem means that one was opened."""
        if problem and problem != self._watch_problem:
            _log.warning("a watch cannot be opened; trying again: %s", problem)
        self._watch_problem = problem


class WatchSession:
    """The part of aiohttp's session that kopf uses; ``on_list`` makes the lists, and kopf gets empty lists.

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


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = _REQUEST_BACKOFF
    settings.watching.client_timeout = _LONGEST_WATCH
    settings.queueing.idle_timeout = 0.1  # kopf keeps a full copy of each object for this time
    settings.persistence.diffbase_storage = _NoDiffBase()
    for resource, labels in _WATCHED.items():
        if labels:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = labels
    return settings
