"""Writes that the API server rejects or answers with a conflict, and the Event objects of jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.api.constants import EventReason
from elastic_operator.api.status import JobStatus
from elastic_operator.controller.model import JobEvent
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, SERVICES, Api, ApiError
from elastic_operator.kubernetes.store import Store
from elastic_operator.kubernetes.writer import Writer, event_object
from tests.support import cluster_objects
from tests.support.answering import answering
from tests.support.builders import UID
from tests.support.cluster_objects import START
from tests.support.object_server import NAMESPACE as TEAM
from tests.support.object_server import ObjectServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource

NAMESPACE = "default"


class Server:
    """Answers each deletion with a conflict, and lists one object.

    Attributes:
        has: the UID of the object; None for no object.
        requests: the number of requests by method.
    """

    def __init__(self) -> None:
        self.has: str | None = UID
        self.requests: Counter[str] = Counter()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests[request.method] += 1
        if request.method == "DELETE":
            status = {"kind": "Status", "reason": "Conflict", "message": "the object has been modified"}
            return web.json_response(status, status=409)
        assert request.query["fieldSelector"] == "metadata.name=digits"
        items = [] if self.has is None else [an_object(self.has)]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})


def an_object(uid: str) -> dict[str, Any]:
    owner = {"apiVersion": ELASTIC_JOBS.api_version, "kind": "ElasticJob", "name": "digits", "uid": UID}
    about = {"name": "digits", "namespace": NAMESPACE, "uid": uid, "resourceVersion": "3"}
    return {"metadata": {**about, "ownerReferences": [{**owner, "controller": True}]}, "spec": {}, "status": {}}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with answering(server.answer) as configuration, Api(configuration) as api:
        yield api


@pytest.fixture
def store() -> Store:
    store = Store(changed=lambda _key: None)
    for resource in (PODS, SERVICES, ELASTIC_JOBS):
        store.put(resource, an_object(UID))
    return store


@pytest.mark.parametrize("resource", [PODS, SERVICES], ids=lambda resource: resource.plural)
async def test_a_conflict_on_deletion_does_not_mean_that_the_object_is_gone(
    server: Server, api: Api, store: Store, resource: Resource
) -> None:
    writer = Writer(api, store)
    with pytest.raises(ApiError, match="has been modified"):
        await writer.delete(resource, NAMESPACE, "digits", UID)
    assert len(store.owned_by(resource, NAMESPACE, UID)) == 1

    server.has = "a successor's"
    await writer.delete(resource, NAMESPACE, "digits", UID)
    assert store.owned_by(resource, NAMESPACE, UID) == ()
    assert server.requests == {"DELETE": 2, "GET": 2}


@pytest.mark.parametrize("resource", [PODS, ELASTIC_JOBS], ids=lambda resource: resource.plural)
async def test_a_successor_of_the_same_name_is_not_deleted(resource: Resource) -> None:
    async with ObjectServer() as server, Api(server.configuration) as api:
        store = Store(changed=lambda _key: None)
        writer = Writer(api, store)
        server.put(resource, "digits", metadata={"uid": "a successor's"})
        await writer.delete(resource, TEAM, "digits", UID)
        assert server.count_requests("DELETE", resource) == 1
        assert server.get(resource, "digits")["metadata"]["uid"] == "a successor's"


async def test_slow_writes_in_a_namespace_leave_connections_to_others() -> None:
    running, most = Counter[str](), Counter[str]()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        kind = "jobs" if "elasticjobs" in request.path else "pods"
        running[kind] += 1
        most[kind] = max(most[kind], running[kind])
        await asyncio.sleep(0.01)
        running[kind] -= 1
        return web.json_response({**an_object(UID), "kind": "Status"})

    async with answering(answer) as configuration, Api(configuration) as api:
        writer = Writer(api, Store(changed=lambda _key: None))
        statuses = (writer.write_status(an_object(UID), JobStatus()) for _ in range(100))
        deletions = (writer.delete(PODS, NAMESPACE, "digits", UID) for _ in range(100))
        await asyncio.gather(*statuses, *deletions)
    assert most == {"jobs": 16, "pods": 64}, "of 96 connections"


NEWS = JobEvent(EventReason.SCALED, "scaled from 2 to 3 pods")


def a_job(version: str = "7") -> dict[str, Any]:
    job = cluster_objects.job()
    job["metadata"]["resourceVersion"] = version
    return job


def test_the_same_event_has_the_same_name_and_another_one_has_another() -> None:
    def name(job: dict[str, Any], news: JobEvent) -> str:
        return str(event_object(job, news, identity="x", now=START)["metadata"]["name"])

    assert name(a_job(), NEWS) == name(a_job(), NEWS)
    assert name(a_job(), NEWS) != name(a_job("8"), NEWS)
    assert name(a_job(), NEWS) != name(a_job(), JobEvent(EventReason.SCALED, "scaled from 3 to 4 pods"))


def test_a_long_message_of_an_event_is_shortened_to_what_an_api_server_accepts() -> None:
    event = event_object(a_job(), JobEvent(EventReason.POD_DIED, "x" * 5000, warning=True), identity="x", now=START)
    assert (event["type"], len(event["message"])) == ("Warning", 1024)
