"""Writes that the API server rejects or answers with a conflict."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, SERVICES, Api, ApiError
from elastic_operator.kubernetes.store import Store
from elastic_operator.kubernetes.writer import Writer
from tests.support.answering import answering
from tests.support.builders import UID
from tests.support.object_server import NAMESPACE as TEAM
from tests.support.object_server import ObjectServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource

NAMESPACE = "default"


class Server:
    """Answers each deletion with a conflict, and lists what it has.

    Attributes:
        has: the UID of the object that it has; None for none.
        asked: how often, by method.
    """

    def __init__(self) -> None:
        self.has: str | None = UID
        self.asked: Counter[str] = Counter()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked[request.method] += 1
        if request.method == "DELETE":
            told = {"kind": "Status", "reason": "Conflict", "message": "the object has been modified"}
            return web.json_response(told, status=409)
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
    assert server.asked == {"DELETE": 2, "GET": 2}


@pytest.mark.parametrize("resource", [PODS, ELASTIC_JOBS], ids=lambda resource: resource.plural)
async def test_a_successor_of_the_same_name_is_not_deleted(resource: Resource) -> None:
    async with ObjectServer() as server, Api(server.configuration) as api:
        store = Store(changed=lambda _key: None)
        writer = Writer(api, store)
        server.put(resource, "digits", metadata={"uid": "a successor's"})
        await writer.delete(resource, TEAM, "digits", UID)
        assert server.times("DELETE", resource) == 1
        assert server.get(resource, "digits")["metadata"]["uid"] == "a successor's"
