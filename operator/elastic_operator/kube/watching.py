"""The watches, by kopf: every change of what the operator looks at, as it happens.

kopf is used for this alone. Its handlers are of the kind that only looks on; each hands the object over and returns
nothing, since what it returned would be written into the object. Nothing else of kopf is on: no events, no peering, no
finalizers, no annotations, no look at namespaces and definitions. Which pods are watched, the API server selects.

kopf runs in a thread with an event loop of its own: when it stops, for whatever reason, it cancels every task of its
loop that it does not know. So it may stop, and be started anew, while all else goes on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import kopf

from elastic_operator.kube.listing import LOOKED_AT
from elastic_operator.kube.watch_session import Sessions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from elastic_operator.kube.api import Access
    from elastic_operator.kube.page import Page
    from elastic_operator.kube.resources import Resource
    from elastic_operator.spec import Json

_log: Final = logging.getLogger(__name__)

_PAGE: Final = 250
"""So many objects are listed at once as the watches begin."""
_PATIENCE: Final = (1.0, 1.0, 2.0, 3.0, 5.0)
"""Seconds between tries of a request; then the watches end, and are begun anew."""
_FIRST_DELAY: Final = 1.0
_LONGEST_DELAY: Final = 15.0
_ENDING: Final = 10.0
"""Seconds that the watches get to end; their thread does not keep the process."""
_HEALTHY: Final = 60.0
"""Seconds after which watches that end count as the first to end."""
_HELD: Final = 0.1
"""Seconds for which kopf keeps an object, whole, after it has told of it."""
_AT_ONCE: Final = 100
"""So many things that watches tell are heard before all else gets its turn."""


class Watches:
    """Watches of all that the operator looks at.

    Args:
        access: gives the way to the API server, with a fresh token.
        hear: called, in the loop in which :meth:`run` runs, with an object's kind, what has happened (ADDED, MODIFIED,
            DELETED; None: it is there, as a watch begins) and the object.
        possible: returns, when there is what is to be watched, the namespaces where it may be; empty for all.
        outdated: returns when other namespaces than these are to be watched.
        began: called when the watches begin or one of them begins anew, also with each page that it lists then.
    """

    def __init__(
        self,
        *,
        access: Callable[[], Awaitable[Access]],
        hear: Callable[[Resource, str | None, Json], None],
        possible: Callable[[], Awaitable[Sequence[str]]],
        outdated: Callable[[Sequence[str]], Coroutine[Any, Any, None]],
        began: Callable[[], None],
    ) -> None:
        self._access = access
        self._hear = hear
        self._possible = possible
        self._outdated = outdated
        self._began = began

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        delay = _FIRST_DELAY
        while True:
            namespaces = await self._possible()
            begun = loop.time()
            self._began()
            why = await self._until_outdated(namespaces)
            if why is None:
                _log.info("the namespaces that can be watched have changed; the watches begin anew")
                continue
            if loop.time() - begun >= _HEALTHY:
                delay = _FIRST_DELAY
            _log.warning("the watches have ended%s; they begin anew in %.0f s", why and f" ({why})", delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, _LONGEST_DELAY)

    async def _until_outdated(self, namespaces: Sequence[str]) -> str | None:
        """Watch these; gives back why the watches have ended, None where others are to be watched."""
        watching = asyncio.create_task(_in_a_thread(self._watch(asyncio.get_running_loop(), namespaces)))
        outdated = asyncio.create_task(self._outdated(namespaces))
        try:
            await asyncio.wait({watching, outdated}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            outdated.cancel()
            await asyncio.wait({watching, outdated})
        return None if watching.cancelled() else watching.result()

    def _watch(
        self, home: asyncio.AbstractEventLoop, namespaces: Sequence[str]
    ) -> Callable[[asyncio.Event], Coroutine[Any, Any, None]]:
        """What is to run in a loop of its own, until the event that it is given is set."""

        async def listed(resource: Resource, page: Page) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._hear_page(resource, page), home))

        async def watch(stop: asyncio.Event) -> None:
            async with Sessions(listed) as sessions:
                await kopf.operator(
                    registry=self._registry(home, sessions),
                    settings=_settings(),
                    standalone=True,
                    clusterwide=not namespaces,
                    namespaces=namespaces,
                    stop_flag=stop,
                    # It would ask for the user's name, and in a container a user may have none.
                    identity="elastic-operator",  # type: ignore[arg-type]  # a text; kopf keeps the type's name to itself
                )

        return watch

    def _registry(self, home: asyncio.AbstractEventLoop, sessions: Sessions) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: object) -> kopf.AiohttpSession:
            asked = asyncio.run_coroutine_threadsafe(_awaited(self._access), home)
            return await sessions.over(await asyncio.wrap_future(asked))

        kopf.on.login(id="login", registry=registry)(login)
        told = Told(home, self._hear)
        for resource in LOOKED_AT:
            kopf.on.event(
                group=resource.group,
                version=resource.version,
                plural=resource.plural,
                id=resource.plural,
                registry=registry,
            )(_handler(resource, told))
        return registry

    async def _hear_page(self, resource: Resource, page: Page) -> None:
        """Hear what is there as a watch begins; where nothing is, that is news, too."""
        self._began()
        for number, body in enumerate(page, start=1):
            _heard(self._hear, resource, None, body)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)


class Told:
    """What the thread of the watches has told and the loop of all else has not heard yet.

    However much comes while the loop is busy, it is woken once: to wake it costs more than to hear.

    Args:
        home: the loop.
        hear: called there with each thing.
    """

    def __init__(self, home: asyncio.AbstractEventLoop, hear: Callable[[Resource, str | None, Json], None]) -> None:
        self._home = home
        self._hear = hear
        self._news: collections.deque[tuple[Resource, str | None, Json]] = collections.deque()

    def tell(self, resource: Resource, kind: str | None, body: Json) -> None:
        """Called in the thread of the watches."""
        self._news.append((resource, kind, body))
        # Only now it is looked at how many wait: of those that are heard just now, the last one is still among them.
        if len(self._news) == 1:
            with contextlib.suppress(RuntimeError):  # it is over, and the loop is closed
                self._home.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        for _ in range(min(len(self._news), _AT_ONCE)):
            _heard(self._hear, *self._news[0])
            self._news.popleft()
            if not self._news:
                return
        self._home.call_soon(self._take)


def _heard(
    hear: Callable[[Resource, str | None, Json], None], resource: Resource, kind: str | None, body: Json
) -> None:
    try:
        hear(resource, kind, body)
    except Exception:  # noqa: BLE001 - a defect met in one object must not silence all others
        _log.exception("an unexpected error in what a watch has told")


def _handler(resource: Resource, told: Told) -> Callable[..., Awaitable[None]]:
    async def handle(event: Mapping[str, Any], **_: object) -> None:
        told.tell(resource, event["type"], event["object"])

    return handle


class _NoMemory(kopf.DiffBaseStorage):
    """kopf compares objects with what it has noted in them; here nothing is noted, and nothing compared."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        """Nothing of an object is compared."""
        del body, extra_fields
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """Nothing was noted."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is noted."""


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = _PATIENCE
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = _HELD
    settings.persistence.diffbase_storage = _NoMemory()
    for resource, labels in LOOKED_AT.items():
        if labels:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = labels
    return settings


async def _awaited(make: Callable[[], Awaitable[Access]]) -> Access:
    return await make()


async def _in_a_thread(make: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> str:
    """Run a coroutine in a thread with an event loop of its own.

    When this is cancelled, the event that the coroutine was given is set; this returns when the thread has ended.

    Returns:
        Why it ended, in words; empty where it ended by itself.
    """
    home = asyncio.get_running_loop()
    ended: asyncio.Future[str] = home.create_future()
    inside: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def within() -> None:
        stop = asyncio.Event()
        inside.append((asyncio.get_running_loop(), stop))
        ready.set()
        await make(stop)

    def thread() -> None:
        why = ""
        try:
            asyncio.run(within())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and all else goes on
            why = str(error) or type(error).__name__
        finally:
            ready.set()
            with contextlib.suppress(RuntimeError):
                home.call_soon_threadsafe(ended.set_result, why)

    threading.Thread(target=thread, name="watches", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        await asyncio.to_thread(ready.wait)
        for loop, stop in inside:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        await asyncio.wait([ended], timeout=_ENDING)
        raise
