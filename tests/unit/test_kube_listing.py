"""Listings where not every namespace is open to the operator."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.kube.api import Api
from elastic_operator.kube.cache import Cache
from elastic_operator.kube.listing import Listings, ListingSettings
from elastic_operator.kube.resources import ELASTIC_JOBS
from tests.support.answering import answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HANGS = 30.0
SOON = ListingSettings(retry_closed=0.02, settling=0.02, first_retry=0.02, longest_retry=0.02, stumbling=())


class Server:
    """Has a job in every namespace, and refuses what is closed.

    Attributes:
        closed: a part of the path, with the status that it is answered with.
        requests: the paths that were asked for.
    """

    def __init__(self) -> None:
        self.closed: dict[str, int] = {}
        self.requests: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.put_nowait(request.path)
        for part, status in self.closed.items():
            if part in request.path:
                told = {"kind": "Status", "reason": "Forbidden", "message": f"{request.path} is not for you"}
                return web.json_response(told, status=status)
        namespace = request.path.split("/")[-2]
        jobs = [a_job(namespace)] if request.path.endswith(ELASTIC_JOBS.plural) else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": jobs})


def a_job(namespace: str) -> dict[str, Any]:
    return {"metadata": {"name": "digits", "namespace": namespace, "uid": namespace, "resourceVersion": "3"}}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with answering(server.answer) as configuration, Api(configuration) as api:
        yield api


@pytest.fixture
def cache() -> Cache:
    return Cache(changed=lambda _key: None)


@pytest.mark.parametrize("status", [403, 404])
async def test_a_closed_namespace_keeps_no_other_from_being_listed_and_is_complained_about_once(
    server: Server, api: Api, cache: Cache, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server.closed["/namespaces/a/"] = status
    listings = Listings(api, cache, namespaces=("a", "b"), settings=SOON)
    assert await listings.list_all() == ("b",)
    assert await listings.list_all() == ("b",)

    assert listings.complete.is_set()
    assert listings.complaint == ""
    assert cache.keys == ("b/digits",)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the namespace a cannot be looked after: ")
    assert said.endswith(
        "; grant the operator its rights there (the chart's role has them), or take it out of --namespace"
    )


async def test_what_was_known_of_a_namespace_stays_known_when_it_is_closed(
    server: Server, api: Api, cache: Cache
) -> None:
    listings = Listings(api, cache, namespaces=("a", "b"), settings=SOON)
    assert await listings.list_all() == ("a", "b")
    server.closed["/namespaces/a/"] = 403
    assert await listings.list_all() == ("b",)
    assert set(cache.keys) == {"a/digits", "b/digits"}


async def test_a_job_whose_pods_may_not_be_listed_is_not_taken_for_one_without_pods(
    server: Server, api: Api, cache: Cache
) -> None:
    server.closed["/namespaces/a/pods"] = 403
    assert await Listings(api, cache, namespaces=("a", "b"), settings=SOON).list_all() == ("b",)
    assert cache.keys == ("b/digits",)


async def test_a_namespace_that_is_opened_is_noticed(
    server: Server, api: Api, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.closed["/namespaces/a/"] = 403
    listings = Listings(api, cache, namespaces=("a", "b"), settings=SOON)
    await listings.list_all()
    running = asyncio.create_task(listings.run())
    try:
        async with asyncio.timeout(HANGS):
            await listings.others_than(("a", "b"))
            server.closed.clear()
            await listings.others_than(("b",))
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert listings.namespaces == ("a", "b")
    assert set(cache.keys) == {"a/digits", "b/digits"}
    assert "the namespace a can be looked after now" in caplog.messages


@pytest.mark.parametrize(
    ("namespaces", "status", "words"),
    [
        (("a",), 403, "is not for you; grant the operator its rights there"),
        ((), 403, "is not for you; grant the operator its rights there"),
        (("a", "b"), 404, "this cluster does not know the ElasticJob: install the definition"),
        (("a", "b"), 500, "what exists cannot be listed: the API server refused (500"),
    ],
)
async def test_where_nothing_can_be_listed_it_is_not_complete_and_says_why(
    server: Server,
    api: Api,
    cache: Cache,
    caplog: pytest.LogCaptureFixture,
    namespaces: tuple[str, ...],
    status: int,
    words: str,
) -> None:
    server.closed["/"] = status
    listings = Listings(api, cache, namespaces=namespaces, settings=SOON)
    listing = asyncio.create_task(listings.list_all())
    async with asyncio.timeout(HANGS):
        for _ in range(len(namespaces) + 2):  # the first try is over
            await server.requests.get()
    assert words in listings.complaint
    assert not listings.complete.is_set()

    server.closed.clear()
    async with asyncio.timeout(HANGS):
        assert await listing == namespaces
    assert listings.complaint == ""
    assert listings.complete.is_set()
    assert len(caplog.records) == 1


async def test_a_listing_at_which_the_server_stumbles_is_made_again_alone(
    server: Server, api: Api, cache: Cache
) -> None:
    server.closed["deployments"] = 500
    stumbling = replace(SOON, stumbling=(0.01,) * 1000, first_retry=HANGS)
    listing = asyncio.create_task(Listings(api, cache, settings=stumbling).list_all())
    asked: Counter[str] = Counter()
    async with asyncio.timeout(HANGS):
        while asked["deployments"] < 2:
            asked[(await server.requests.get()).split("/")[-1]] += 1
        server.closed.clear()
        await listing
    assert asked["pods"] == 1
    assert cache.keys
