"""Writes that the API server rejects or answers with a conflict, and the Event objects of jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.api.constants import Reason
from elastic_operator.api.status import JobStatus
from elastic_operator.controller.model import JobEvent
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, SERVICES, Api, ApiError
from elastic_operator.kubernetes.object_cache import ObjectCache
from elastic_operator.kubernetes.writer import Writer, event_object
from tests.support import cluster_objects
from tests.support.builders import UID
from tests.support.cluster_objects import START
from tests.support.object_server import NAMESPACE, ObjectServer, answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    async with ObjectServer() as server:
        yield server


@pytest.fixture
async def api(server: ObjectServer) -> AsyncIterator[Api]:
    async with Api(server.configuration) as api:
        yield api


@pytest.mark.parametrize("resource", [PODS, SERVICES], ids=lambda resource: resource.plural)
async def test_a_conflict_on_deletion_does_not_mean_that_the_object_is_gone(
    server: ObjectServer, api: Api, resource: Resource
) -> None:
    cache = ObjectCache(changed=lambda _key: None)
    owner = {"apiVersion": ELASTIC_JOBS.api_version, "kind": "ElasticJob", "name": "digits", "uid": UID}
    about = {"uid": UID, "ownerReferences": [{**owner, "controller": True}]}
    cache.put(resource, server.put(resource, "digits", metadata=about))
    conflict = 409, "Conflict", "the object has been modified"
    server.fault = lambda method, _path: conflict if method == "DELETE" else None
    writer = Writer(api, cache)
    with pytest.raises(ApiError, match="has been modified"):
        await writer.delete(resource, NAMESPACE, "digits", UID)
    assert len(cache.owned_by(resource, NAMESPACE, UID)) == 1

    server.put(resource, "digits", metadata={"uid": "a successor's"})
    await writer.delete(resource, NAMESPACE, "digits", UID)
    assert cache.owned_by(resource, NAMESPACE, UID) == ()


@pytest.mark.parametrize("resource", [PODS, ELASTIC_JOBS], ids=lambda resource: resource.plural)
async def test_a_successor_of_the_same_name_is_not_deleted(server: ObjectServer, api: Api, resource: Resource) -> None:
    server.put(resource, "digits", metadata={"uid": "a successor's"})
    await Writer(api, ObjectCache(changed=lambda _key: None)).delete(resource, NAMESPACE, "digits", UID)
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
        return web.json_response({**a_job(), "kind": "Status"})

    async with answering(answer) as configuration, Api(configuration) as api:
        writer = Writer(api, ObjectCache(changed=lambda _key: None))
        statuses = (writer.write_status(a_job(), JobStatus()) for _ in range(100))
        deletions = (writer.delete(PODS, NAMESPACE, "digits", UID) for _ in range(100))
        await asyncio.gather(*statuses, *deletions)
    assert most == {"jobs": 16, "pods": 64}, "there are 96 connections"


NEWS = JobEvent(Reason.SCALED, "scaled from 2 to 3 pods")


def a_job(version: str = "7") -> dict[str, Any]:
    job = cluster_objects.job()
    job["metadata"]["resourceVersion"] = version
    return job


def test_equal_events_have_the_same_name_and_different_events_have_different_names() -> None:
    def name(job: dict[str, Any], news: JobEvent) -> str:
        return str(event_object(job, news, identity="x", now=START)["metadata"]["name"])

    assert name(a_job(), NEWS) == name(a_job(), NEWS)
    assert name(a_job(), NEWS) != name(a_job("8"), NEWS)
    assert name(a_job(), NEWS) != name(a_job(), JobEvent(Reason.SCALED, "scaled from 3 to 4 pods"))


def test_a_long_message_of_an_event_is_shortened_to_the_limit_of_the_api_server() -> None:
    event = event_object(a_job(), JobEvent(Reason.POD_DIED, "x" * 5000, warning=True), identity="x", now=START)
    assert (event["type"], len(event["message"])) == ("Warning", 1024)
