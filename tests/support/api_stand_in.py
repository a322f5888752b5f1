"""A stand-in for an API server with kubelets: it has the objects that a test puts there, and logs of pods.

Some faults of logs cannot be caused at will on a real one: a stream that breaks in the middle of a line, a pod that
prints a line at the moment when its successor starts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACE = "team"
START = 1_700_000_000
"""The time of the first line; each further line is half a second later."""

_COLLECTIONS = {
    f"/api/v1/namespaces/{NAMESPACE}/pods": "Pod",
    f"/api/v1/namespaces/{NAMESPACE}/configmaps": "ConfigMap",
    f"/api/v1/namespaces/{NAMESPACE}/events": "Event",
    f"/api/v1/namespaces/{NAMESPACE}/services": "Service",
    f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments": "Deployment",
    f"/apis/elastic.pytorch.org/v1alpha1/namespaces/{NAMESPACE}/elasticjobs": "ElasticJob",
    "/apis/elastic.pytorch.org/v1alpha1/elasticjobs": "ElasticJob",
    "/api/v1/pods": "Pod",
}


class _Output:
    """The output of a pod's container."""

    def __init__(self) -> None:
        self.data = b""
        self.ended = False
        self.cuts = 0
        self.followers = 0
        self.grown = asyncio.Condition()


class ApiStandIn:
    """Serves on loopback within ``async with``.

    Attributes:
        requests: the requests: method and path with query.
        asked: set by every request.
        failing: paths that are answered with this status and this message.
        pages: the metrics pages of pods, by the API server's proxy path.
    """

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in _COLLECTIONS.values()}
        self._now = itertools.count(START * 2)
        self._outputs: dict[str, _Output] = {}
        self._stopped = False
        self.requests: list[str] = []
        self.asked = asyncio.Event()
        self.failing: dict[str, tuple[int, str]] = {}
        self.pages: dict[str, str] = {}
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        for output in self._outputs.values():
            async with output.grown:
                output.grown.notify_all()
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig for this server, with the namespace :data:`NAMESPACE`."""
        path = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}}],
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
        }
        path.write_text(json.dumps(config))
        return path

    async def put(self, kind: str, obj: dict[str, Any]) -> None:
        """Create or change an object."""
        self._objects[kind][obj["metadata"]["uid"]] = obj

    async def remove(self, kind: str, uid: str) -> None:
        """Delete an object."""
        del self._objects[kind][uid]

    async def print(self, pod: str, text: str) -> None:
        """Have a pod print lines; text without a final newline is an unfinished line."""
        stamp = ""
        for part in text.splitlines(keepends=True):
            second, half = divmod(next(self._now), 2)
            at = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            stamp += f"{at}.{half * 5}00000000Z {part}"
        await self._grow(pod, stamp.encode())

    async def print_raw(self, pod: str, data: bytes) -> None:
        """Append raw bytes to a pod's log."""
        await self._grow(pod, data)

    async def end(self, pod: str) -> None:
        """End a pod's log."""
        output = self._output(pod)
        async with output.grown:
            output.ended = True
            output.grown.notify_all()

    async def cut(self, pod: str) -> None:
        """Break all streams of a pod's log."""
        output = self._output(pod)
        async with output.grown:
            output.cuts += 1
            output.grown.notify_all()

    async def followed(self, pod: str, times: int = 1) -> None:
        """Wait until a pod's log has been followed this many times in all."""
        output = self._output(pod)
        async with output.grown:
            await output.grown.wait_for(lambda: output.followers >= times)

    async def _grow(self, pod: str, data: bytes) -> None:
        output = self._output(pod)
        async with output.grown:
            output.data += data
            output.grown.notify_all()

    def _output(self, pod: str) -> _Output:
        return self._outputs.setdefault(pod, _Output())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        self.asked.set()
        if request.path in self.failing:
            return _status(*self.failing[request.path])
        if request.path in self.pages:
            return web.Response(text=self.pages[request.path])
        if request.path.endswith("/log"):
            return await self._log(request)
        collection, _, name = request.path.rpartition("/")
        if request.path in _COLLECTIONS:
            return self._list(request, _COLLECTIONS[request.path])
        kind = _COLLECTIONS.get(collection, "")
        for obj in self._objects.get(kind, {}).values():
            if obj["metadata"]["name"] == name:
                return web.json_response(obj)
        return (
            _status(404, f'{kind} "{name}" not found') if kind else web.Response(status=404, text="404 page not found")
        )

    def _list(self, request: web.Request, kind: str) -> web.Response:
        found = [obj for obj in self._objects[kind].values() if _selected(request, obj)]
        return web.json_response({"kind": f"{kind}List", "metadata": {"resourceVersion": "1"}, "items": found})

    async def _log(self, request: web.Request) -> web.StreamResponse:
        assert request.query["container"] == "worker"
        output = self._output(request.path.split("/")[-2])
        response = web.StreamResponse()
        await response.prepare(request)
        cuts, follow = output.cuts, "follow" in request.query
        at = _first_since(output.data, request.query.get("sinceTime", ""))
        if follow:
            async with output.grown:
                output.followers += 1
                output.grown.notify_all()
        while True:
            data = output.data[at:]
            at += len(data)
            if data:
                await response.write(data)
                continue
            async with output.grown:
                while (
                    follow and not self._stopped and len(output.data) == at and output.cuts == cuts and not output.ended
                ):
                    await output.grown.wait()
            if output.cuts > cuts and request.transport:
                request.transport.abort()
            if len(output.data) == at:
                return response


def _selected(request: web.Request, obj: dict[str, Any]) -> bool:
    labels = obj["metadata"].get("labels") or {}
    for term in filter(None, request.query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        found: Any = obj
        for key in path.split("."):
            found = found.get(key, {})
        if found != value:
            return False
    return True


def _first_since(data: bytes, since: str) -> int:
    """The offset of the first line of this second or later."""
    at = 0
    for line in data.splitlines(keepends=True):
        if line[:19] >= since.removesuffix("Z").encode():
            return at
        at += len(line)
    return at


def _status(code: int, words: str) -> web.Response:
    reason = {403: "Forbidden", 404: "NotFound", 400: "BadRequest"}.get(code, "InternalError")
    return web.json_response({"kind": "Status", "code": code, "reason": reason, "message": words}, status=code)
