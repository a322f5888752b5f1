"""kopf, as far as it is told anything: how to reach the API server; and how what it tells comes to be heard."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from elastic_operator.kube.api import Access, Api
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.watch_session import Sessions, connection
from elastic_operator.kube.watching import Told, Watches
from tests.support.answering import answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import pytest

    from elastic_operator.kube.page import Page
    from elastic_operator.kube.resources import Resource
    from elastic_operator.spec import Json

PATIENCE = 30.0


def test_a_token_is_handed_on_with_its_scheme() -> None:
    info = connection(Access("https://server:6443", authority="PEM", authorization="bearer abc", proxy="http://proxy"))
    assert info.server == "https://server:6443"
    assert info.as_http_headers() == {"Authorization": "bearer abc"}
    assert (info.ca_data, info.proxy_url) == ("PEM", "http://proxy")
    assert connection(Access("https://server", authorization="abc")).as_http_headers() == {
        "Authorization": "Bearer abc"
    }


def test_without_a_token_no_header_claims_that_there_is_one() -> None:
    info = connection(Access("https://server", certificate_file="/cert", key_file="/key", insecure=True))
    assert info.as_http_headers() == {}
    assert (info.certificate_path, info.private_key_path, info.insecure) == ("/cert", "/key", True)


def test_a_token_is_not_shown_where_the_way_is_printed() -> None:
    assert "secret" not in repr(Access("https://server", authorization="Bearer secret"))


async def test_all_that_another_thread_tells_is_heard_in_its_order() -> None:
    heard: list[int] = []
    done = asyncio.Event()
    count = 20_000

    def hear(_resource: Resource, _kind: str | None, body: Json) -> None:
        heard.append(body["number"])
        if body["number"] == count - 1:
            done.set()

    told = Told(asyncio.get_running_loop(), hear)

    def tell() -> None:
        for number in range(count):
            told.tell(PODS, "MODIFIED", {"number": number})

    async with asyncio.timeout(PATIENCE):
        await asyncio.to_thread(tell)
        await done.wait()
    assert heard == list(range(count))


async def test_what_cannot_be_understood_keeps_nothing_else_from_being_heard(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    done = asyncio.Event()

    def hear(_resource: Resource, _kind: str | None, body: Json) -> None:
        heard.append(body["metadata"]["name"])
        done.set()

    told = Told(asyncio.get_running_loop(), hear)
    told.tell(PODS, "ADDED", {})
    told.tell(PODS, "ADDED", {"metadata": {"name": "good"}})
    async with asyncio.timeout(PATIENCE):
        await done.wait()
    assert heard == ["good"]
    assert "an unexpected error in what a watch has told" in caplog.text


KINDS = ({"name": "namespaces", "kind": "Namespace"}, {"name": "pods", "kind": "Pod"})
DISCOVERY: dict[str, dict[str, Any]] = {
    "/apis": {"groups": []},
    "/api": {"versions": ["v1"]},
    "/api/v1": {
        "resources": [{**kind, "singularName": "", "namespaced": True, "verbs": ["list", "watch"]} for kind in KINDS]
    },
}


class Pods:
    """A server that has pods and nothing else: they are listed one to a page, and are watched after that.

    Attributes:
        there: the names of those that are listed.
        listed: how many pages of them were asked for.
        news: what the watch tells next; None ends it.
    """

    def __init__(self, *there: str) -> None:
        self.there = list(there)
        self.listed = 0
        self.news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if request.query.get("watch"):
            return await self._tell(request)
        self.listed += 1
        number = int(request.query.get("continue", "0"))
        about = {"resourceVersion": "5", "continue": str(number + 1) if number + 1 < len(self.there) else ""}
        return web.json_response({"metadata": about, "items": [a_pod(name) for name in self.there[number:][:1]]})

    async def _tell(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (news := await self.news.get()) is not None:
            await response.write(json.dumps(news).encode() + b"\n")
        return response


def a_pod(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "namespace": "team", "resourceVersion": "3"}}


@contextlib.asynccontextmanager
async def watched(pods: Pods) -> AsyncIterator[tuple[asyncio.Queue[tuple[str | None, str, int]], list[int]]]:
    """Watch; what is heard of pods with how many pages were asked for by then, and how many were when one began."""
    heard: asyncio.Queue[tuple[str | None, str, int]] = asyncio.Queue()
    began: list[int] = []

    async def possible() -> Sequence[str]:
        return ()

    async def outdated(_namespaces: Sequence[str]) -> None:
        await asyncio.Event().wait()

    async with answering(pods.answer) as configuration, Api(configuration) as api:
        watches = Watches(
            access=api.access,
            hear=lambda _resource, kind, body: heard.put_nowait((kind, body["metadata"]["name"], pods.listed)),
            possible=possible,
            outdated=outdated,
            began=lambda: began.append(pods.listed),
        )
        running = asyncio.create_task(watches.run())
        try:
            async with asyncio.timeout(PATIENCE):
                yield heard, began
        finally:
            running.cancel()
            await asyncio.wait([running])
            pods.news.put_nowait(None)


async def test_what_is_there_as_a_watch_begins_is_heard_page_by_page_and_then_what_happens() -> None:
    pods = Pods("a", "b", "c")
    pods.news.put_nowait({"type": "MODIFIED", "object": a_pod("b")})
    async with watched(pods) as (heard, _):
        # No page is asked for before the one before it was heard: however many there are, one at a time is held.
        assert [await heard.get() for _ in range(4)] == [
            (None, "a", 1),
            (None, "b", 2),
            (None, "c", 3),
            ("MODIFIED", "b", 3),
        ]


async def test_a_watch_that_begins_anew_says_so_though_nothing_is_left() -> None:
    pods = Pods("a")
    async with watched(pods) as (heard, began):
        assert await heard.get() == (None, "a", 1)
        pods.there.clear()
        for news in ({"type": "ERROR", "object": {"code": 410}}, None, {"type": "ADDED", "object": a_pod("b")}):
            pods.news.put_nowait(news)
        assert await heard.get() == ("ADDED", "b", 2)
        assert 2 in began


async def test_who_asks_for_another_connection_with_the_same_credentials_gets_the_same_and_so_learns_it() -> None:
    async with Sessions(nobody_lists) as sessions:
        old = await sessions.over(Access("https://server:6443", authorization="Bearer old"))
        assert await sessions.over(Access("https://server:6443", authorization="Bearer old")) == old
        new = await sessions.over(Access("https://server:6443", authorization="Bearer new"))
        assert new != old
        assert new.aiohttp_session.headers["Authorization"] == "Bearer new"


async def test_a_connection_that_was_closed_opens_again_when_it_is_used() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(request.headers["Authorization"])

    async with answering(answer) as configuration, Sessions(nobody_lists) as sessions:
        session = (await sessions.over(Access(configuration.host, authorization="Bearer it"))).aiohttp_session
        for _ in range(2):
            async with await session.request(method="get", url=f"{configuration.host}/api") as response:
                assert await response.json() == "Bearer it"
            await session.close()
            assert not session.closed


async def test_what_ends_watches_at_once_is_not_asked_without_end() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(request.path)

    now = asyncio.get_running_loop().time
    async with answering(answer) as configuration, Sessions(nobody_lists) as sessions:
        session = (await sessions.over(Access(configuration.host))).aiohttp_session
        begun = now()
        for path in ("pods?watch=true", "pods?watch=true&resourceVersion=5"):
            async with await session.request(method="get", url=f"{configuration.host}/api/v1/{path}") as response:
                assert await response.json() == "/api/v1/pods"
        assert now() - begun >= 0.4
        await session.close()


async def nobody_lists(_resource: Resource, _page: Page) -> None:
    raise AssertionError("nothing was asked for")
