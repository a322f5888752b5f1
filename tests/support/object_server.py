"""A small API server that stores objects, with faults that a test chooses.

Some errors, such as those of a failing webhook or a concurrent creation, cannot be triggered on a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from kubernetes.aio.client import Configuration

from elastic_operator.kubernetes.client import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Resource,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

NAMESPACE = "team"
MADE = "2026-01-01T00:00:00Z"

Fault = tuple[int, str, str]
"""HTTP status, reason, and message."""


WATCHED: Sequence[Resource] = (PODS, SERVICES, DEPLOYMENTS, DISRUPTION_BUDGETS, NETWORK_POLICIES, ELASTIC_JOBS)
"""The kinds that the operator watches."""

_NAMESPACES = Resource("", "v1", "namespaces", "Namespace")


def discovered(path: str) -> dict[str, Any] | None:
    """Return the answer to a discovery request of kopf; None for any other path."""
    groups = {resource.group: resource.version for resource in WATCHED if resource.group}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {"groups": [_group(group, version) for group, version in groups.items()]}
    kinds = [each for each in (*WATCHED, _NAMESPACES) if path == each.path().rpartition("/")[0]]
    if not kinds:
        return None
    resources = [{"name": each.plural, "kind": each.kind, "singularName": ""} for each in kinds]
    return {"resources": [{**each, "namespaced": True, "verbs": ["list", "watch"]} for each in resources]}


def _group(group: str, version: str) -> dict[str, Any]:
    this = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [this], "preferredVersion": this}


@contextlib.asynccontextmanager
async def answering(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> AsyncIterator[Configuration]:
    """Answer each request with this function within the block, and yield the configuration of a client."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield configuration
    finally:
        await runner.cleanup()


class ObjectServer:
    """An API server on loopback, which serves within ``async with``.

    Attributes:
        objects: the objects by path.
        requests: the method and path of each request.
        fault: returns the failure of a request with this method and path; None for success.
        unanswered: the paths of collections in which creations get no answer.
        max_concurrent: the maximum number of concurrent requests by method.
        configuration: the configuration of a client.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Fault | None] = lambda _method, _path: None
        self.unanswered: set[str] = set()
        self._closing = asyncio.Event()
        self.max_concurrent: dict[str, int] = {}
        self._there: dict[str, int] = {}
        self._news = asyncio.Event()
        self._versions = itertools.count(1)
        self._changes: list[tuple[int, str, str, dict[str, Any]]] = []
        self._closed = False
        self._something = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._serving = answering(self._answer)
        self.configuration = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._closing.set()
        self._news.set()
        await self._serving.__aexit__(None, None, None)

    async def wait_for(self, condition: Callable[[], bool], *, limit: float = 30.0) -> None:
        """Wait until a condition is met; the condition is checked after each request."""
        async with asyncio.timeout(limit), self._something:
            await self._something.wait_for(condition)

    def put(self, resource: Resource, name: str, **body: Any) -> dict[str, Any]:
        """Store an object, and return a copy of it."""
        path = resource.path(NAMESPACE, name)
        about = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}-{next(self._versions)}"}
        former = self.objects.get(path, {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": about})
        metadata = {"generation": 1, "creationTimestamp": MADE, **former["metadata"], **body.pop("metadata", {})}
        if "spec" in former and former["spec"] != body.get("spec", former["spec"]):
            metadata["generation"] += 1
        return self._store(path, {**former, **body, "metadata": metadata})

    def pop(self, resource: Resource, name: str) -> None:
        """Remove an object without an event."""
        del self.objects[resource.path(NAMESPACE, name)]

    def get(self, resource: Resource, name: str) -> dict[str, Any]:
        """Return an object."""
        return self.objects[resource.path(NAMESPACE, name)]

    def of_kind(self, resource: Resource) -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        folder = resource.path(NAMESPACE)
        return [body for path, body in self.objects.items() if path.rpartition("/")[0] == folder]

    def count_requests(self, method: str, resource: Resource) -> int:
        """Return the number of requests for a kind with a method."""
        return sum(verb == method and path.startswith(resource.path(NAMESPACE)) for verb, path in self.requests)

    def _store(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(json.dumps(body))
        change = "MODIFIED" if path in self.objects else "ADDED"
        self.objects[path] = kept
        self._publish(change, path, kept)
        copied: dict[str, Any] = json.loads(json.dumps(kept))
        return copied

    def _publish(self, change: str, path: str, body: dict[str, Any]) -> None:
        """Give an object its next version, and send the change to the watches."""
        version = next(self._versions)
        body["metadata"]["resourceVersion"] = str(version)
        self._changes.append((version, change, path, body))
        self._news.set()
        self._news = asyncio.Event()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.path
        if (found := discovered(path)) is not None:
            return web.json_response(found)
        if request.query.get("watch"):
            return await self._watch(request)
        body = json.loads(await request.read() or b"null")
        self.requests.append((method, path))
        self._there[method] = self._there.get(method, 0) + 1
        self.max_concurrent[method] = max(self.max_concurrent.get(method, 0), self._there[method])
        await asyncio.sleep(0)  # so that concurrent requests arrive
        if method == "POST" and path in self.unanswered:
            await self._closing.wait()
        failure = self.fault(method, path)
        status, answer = _status(*failure) if failure is not None else self._do(request, body)
        self._there[method] -= 1
        async with self._something:
            self._something.notify_all()
        return web.json_response(answer, status=status)

    def release(self) -> None:
        """Answer the pending requests to unanswered collections."""
        self._closing.set()
        self._closing = asyncio.Event()

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        known = int(request.query["resourceVersion"])
        while not self._closed:
            news = self._news
            for version, change, path, body in self._changes:
                if version > known and _is_selected(request, path, body):
                    await response.write(json.dumps({"type": change, "object": body}).encode() + b"\n")
            known = max((change[0] for change in self._changes), default=known)
            await news.wait()
        return response

    def _do(self, request: web.BaseRequest, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match request.method:
            case "GET":
                return self._read(request)
            case "POST":
                return self._create(request.path, body)
            case "PATCH" | "PUT":
                return self._change(request.path, body)
            case "DELETE":
                return self._delete(request.path, body)
        raise AssertionError(request.method)

    def _read(self, request: web.BaseRequest) -> tuple[int, dict[str, Any]]:
        folder, _, last = request.path.rpartition("/")
        if folder.count("/") - folder.startswith("/apis/") == 5:  # the path of a kind; a name follows
            there = self.objects.get(request.path)
            return (200, there) if there is not None else _status(404, "NotFound", f"there is no {last}")
        items = [body for path, body in self.objects.items() if _is_selected(request, path, body)]
        return 200, {"metadata": {"resourceVersion": str(next(self._versions))}, "items": items}

    def _create(self, folder: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        path = f"{folder}/{body['metadata']['name']}"
        if path in self.objects:
            return _status(409, "AlreadyExists", f"{path} already exists")
        if folder.endswith("/services"):
            body["spec"]["clusterIP"] = "127.9.9.9"  # an address without a listener
        body["metadata"] |= {"uid": f"uid-{next(self._versions)}", "generation": 1, "creationTimestamp": MADE}
        return 201, self._store(path, body)

    def _change(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path.endswith("/status"):
            path = path.removesuffix("/status")
            body = {**self.objects[path], "status": body["status"]}
        path = path.removesuffix("/scale")
        there = self.objects.get(path)
        if "metadata" not in body and there is not None:  # a merge patch of its spec
            body = {"metadata": {}, "spec": {**there["spec"], **body["spec"]}}
        uid = body["metadata"].get("uid")
        if uid is not None and (there is None or there["metadata"]["uid"] != uid):
            if there is None:
                return _status(409, "Conflict", f"uid mismatch: it says {uid}, and there is no such object")
            return _status(422, "Invalid", f'metadata.uid: Invalid value: "{uid}": field is immutable')
        if there is None:
            folder, _, _ = path.rpartition("/")
            return self._create(folder, body)
        metadata = {**there["metadata"], **body["metadata"]}
        if "annotations" in body["metadata"]:
            metadata["annotations"] = {**there["metadata"].get("annotations", {}), **body["metadata"]["annotations"]}
        return 200, self._store(path, {**there, **body, "metadata": metadata})

    def _delete(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        there = self.objects.get(path)
        if there is None:
            return _status(404, "NotFound", "not found")
        if body.get("preconditions", {}).get("uid") not in (None, there["metadata"]["uid"]):
            return _status(409, "Conflict", "the UID in the precondition is not that of the object")
        del self.objects[path]
        self._publish("DELETED", path, {**there, "metadata": {**there["metadata"]}})
        return 200, there


def _is_selected(request: web.BaseRequest, path: str, body: dict[str, Any]) -> bool:
    """Return whether an object is of the kind and the namespace of a request, and meets its selectors."""
    if _without_namespace(path.rpartition("/")[0]) != _without_namespace(request.path):
        return False
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, request.query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        keys, _, value = term.partition("=")
        found: Any = body
        for key in keys.split("."):
            found = found.get(key, {})
        if found != value:
            return False
    return True


def _without_namespace(path: str) -> str:
    return path.replace(f"/namespaces/{NAMESPACE}/", "/")


def _status(status: int, reason: str, words: str) -> tuple[int, dict[str, Any]]:
    return status, {"kind": "Status", "code": status, "reason": reason, "message": words}
