"""The informer: lists, watches and their errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import aiohttp
import kopf
import pytest
from aiohttp import web

from elastic_operator.kubernetes.client import PODS, VOLCANO_GROUPS, Api
from elastic_operator.kubernetes.informer import Informer
from elastic_operator.kubernetes.kopf_session import WatchSession
from elastic_operator.kubernetes.object_cache import ObjectCache
from tests.support.object_server import WATCHED, answering, discovered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from elastic_operator.kubernetes.client import Resource

TIMEOUT = 20.0


async def test_a_watch_session_can_be_reopened_throttles_watches_and_reports_errors() -> None:
    statuses = iter([200, 200, 200, 403, 429, 500])

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"message": request.headers["Authorization"]}, status=next(statuses))

    now = asyncio.get_running_loop().time
    errors: list[str] = []

    async def no_list(_resource: Resource, _namespace: str | None) -> str:
        raise AssertionError("a list was requested")

    async with answering(answer) as configuration:
        session = WatchSession(kopf.ConnectionInfo(server=configuration.host, token="it"), no_list, errors.append)
        begun = now()
        for query in ("", "?watch=true", "?watch=true&resourceVersion=5"):
            url = f"{configuration.host}/api/v1/things{query}"
            async with await session.request(method="get", url=url) as response:
                assert (await response.json())["message"] == "Bearer it"
            await session.close()
            assert not session.closed
        assert now() - begun >= 0.4
        for _ in range(3):
            (await session.request(method="get", url=configuration.host)).close()
        assert errors == ["", "", "", *(f"the API server refused ({status} ): Bearer it" for status in (403, 500))]
        await session.close()
    with pytest.raises(aiohttp.ClientError):
        await session.request(method="get", url=configuration.host)
    await session.close()
    assert errors[-1].startswith("the API server cannot be reached: ")


class Server:
    """An API server with one job in every namespace, and with pods.

    Attributes:
        failing: the error status of failing requests, by a part of their path.
        pods: the names of the pods.
        lists: the kinds of all lists so far.
        watches: the number of watches of pods so far.
        changes: the next changes for the watch of pods; None ends the watch.
    """

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.pods: list[str] = []
        self.lists: list[str] = []
        self.watches = 0
        self.changes: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.closing = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if (found := discovered(request.path)) is not None:
            return web.json_response(found)
        for part, status in self.failing.items():
            if part in request.path:
                status_object = {"kind": "Status", "reason": "Forbidden", "message": f"{request.path} is not for you"}
                return web.json_response(status_object, status=status)
        kind = request.path.rpartition("/")[2]
        if request.query.get("watch"):
            return await self._watch(request, kind)
        if "fieldSelector" in request.query:
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": []})
        self.lists.append(kind)
        items: list[dict[str, Any]] = []
        if kind == "elasticjobs":
            namespace = request.path.split("/")[-2]
            items = [an_object("digits", namespace if "/namespaces/" in request.path else "team")]
        if kind == "pods":
            items = [an_object(name, "team") for name in self.pods]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def _watch(self, request: web.BaseRequest, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if kind != "pods":
            await self.closing.wait()
            return response
        self.watches += 1
        while (change := await self.changes.get()) is not None:
            await response.write(json.dumps(change).encode() + b"\n")
        return response


def an_object(name: str, namespace: str, version: int = 3) -> dict[str, Any]:
    about = {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}", "resourceVersion": str(version)}
    return {"metadata": about, "spec": {}}


@pytest.fixture
def server() -> Server:
    return Server()


@contextlib.asynccontextmanager
async def running_informer(server: Server, *namespaces: str) -> AsyncIterator[tuple[Informer, ObjectCache]]:
    """Run an informer within the block."""
    changes = asyncio.Event()
    cache = ObjectCache(changed=lambda _key: changes.set())
    async with answering(server.answer) as configuration, Api(configuration) as api:
        informer = Informer(api, cache, namespaces=namespaces, base_delay=0.02)
        running = asyncio.create_task(informer.run())
        try:
            async with asyncio.timeout(TIMEOUT):
                yield informer, cache
        finally:
            running.cancel()
            server.closing.set()
            for _ in range(4):  # None ends one watch of pods
                server.changes.put_nowait(None)
            await asyncio.wait({running})


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - some conditions have no event
        await asyncio.sleep(0.01)


async def test_each_kind_is_listed_once_and_then_watched_despite_errors(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.pods = ["a", "b"]
    async with running_informer(server) as (informer, cache):
        await informer.synced.wait()
        assert (cache.count(PODS), cache.keys, informer.problem) == (2, ("team/digits",), "")
        server.changes.put_nowait({"type": "ADDED", "object": {"metadata": {"name": "odd"}}})
        server.changes.put_nowait({"type": "DELETED", "object": an_object("b", "team", 10)})
        server.changes.put_nowait({"type": "ADDED", "object": an_object("c", "team", 11)})
        server.changes.put_nowait({"type": "ADDED", "object": an_object("d", "team", 12)})
        await until(lambda: cache.count(PODS) == 3)
        assert sorted(server.lists) == sorted([*(each.plural for each in WATCHED), "podgroups", "podgroups"])
    assert caplog.text.count("an unexpected error while a change was handled") == 1


async def test_a_watch_without_events_is_reopened(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_operator.kubernetes.kopf_session._LONGEST_WATCH", 0.1)
    async with running_informer(server) as (informer, _):
        await informer.synced.wait()
        await until(lambda: server.watches >= 3)
        assert server.lists.count("pods") == 1


async def test_after_a_failed_watch_each_kind_is_watched_exactly_once_and_signals_are_handled_as_before(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    spawn_tasks = kopf.spawn_tasks

    async def spawn_and_signal(**settings: Any) -> Any:
        tasks = await spawn_tasks(**settings)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # kopf has set its handlers
        return tasks

    monkeypatch.setattr(kopf, "spawn_tasks", spawn_and_signal)
    monkeypatch.setattr("elastic_operator.kubernetes.informer._RESTART_DELAY", 0.0)
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        async with running_informer(server) as (informer, _):
            await informer.synced.wait()
            await until(lambda: server.watches == 1)
            server.changes.put_nowait({"type": "ERROR", "object": {"code": 500}})
            await until(lambda: server.watches == 2)
            watchers = [each for each in asyncio.all_tasks() if each.get_name().startswith("watcher for ")]
            assert len(watchers) == len(WATCHED)
            assert received == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_the_deletion_of_a_pod_group_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_operator.kubernetes.informer._POD_GROUPS_INTERVAL", 0.05)
    async with running_informer(server) as (informer, cache):
        await informer.synced.wait()
        cache.put(VOLCANO_GROUPS, an_object("digits", "team"))
        await until(lambda: cache.count(VOLCANO_GROUPS) == 0)
        assert server.lists.count("elasticjobs") == 1


@pytest.mark.parametrize(
    ("namespaces", "status", "words"),
    [
        (("a",), 403, "is not for you; grant the operator its permissions"),
        (("a", "b"), 404, "this cluster does not know the ElasticJob: install the definition"),
        (("a", "b"), 429, "the objects cannot be listed: the API server refused (429"),
    ],
)
async def test_if_nothing_can_be_listed_the_reason_is_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture, namespaces: tuple[str, ...], status: int, words: str
) -> None:
    caplog.set_level("INFO")
    server.failing["/"] = status
    async with running_informer(server, *namespaces) as (informer, _):
        await until(lambda: words in informer.problem)
        await asyncio.sleep(0.1)
        assert not informer.synced.is_set()
        [level] = [record.levelname for record in caplog.records if words in record.getMessage()]
        assert level == ("INFO" if status == 429 else "WARNING"), "429 is logged as an error"
        server.failing.clear()
        await informer.synced.wait()
        assert informer.problem == ""
