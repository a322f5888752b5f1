"""A fake API server with kubelets: it stores the objects of a test, and serves logs and metrics of pods.

Some faults of logs cannot be triggered on a real API server, such as a stream that breaks in the middle of a line.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from elastic_operator.kubernetes.client import CONFIG_MAPS, DEPLOYMENTS, ELASTIC_JOBS, EVENTS, PODS, SERVICES
from testbed.control_plane_config import kubeconfig
from tests.support.object_server import NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from pathlib import Path

START = 1_700_000_000
"""The time of the first line; each further line is half a second later."""

_KINDS = {each.kind: each for each in (PODS, CONFIG_MAPS, EVENTS, SERVICES, DEPLOYMENTS, ELASTIC_JOBS)}
_REASONS = {403: "Forbidden", 404: "NotFound", 400: "BadRequest"}


@dataclass
class _Output:
    """The output of a pod's container."""

    data: bytes = b""
    ended: bool = False
    cuts: int = 0
    followers: int = 0


class FakeApiServer(ObjectServer):
    """A fake API server, which serves on loopback within ``async with``.

    Attributes:
        failing: the status and the message of failing requests, by path.
        pages: the metrics pages of pods, by the API server's proxy path.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = itertools.count(START * 2)
        self._outputs: defaultdict[str, _Output] = defaultdict(_Output)
        self._grown = asyncio.Condition()
        self.failing: dict[str, tuple[int, str]] = {}
        self.pages: dict[str, str] = {}
        self.fault = self._failure

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        async with self._grown:
            self._grown.notify_all()
        await super().__aexit__()

    def kubeconfig(self, folder: Path) -> Path:
        """Return a kubeconfig for this server, with the namespace :data:`NAMESPACE`."""
        path = folder / "kubeconfig"
        path.write_text(kubeconfig(self.configuration.host, token="secret", namespace=NAMESPACE))
        return path

    def add(self, obj: dict[str, Any]) -> None:
        """Create or change an object."""
        self._store(_KINDS[obj["kind"]].path(NAMESPACE, obj["metadata"]["name"]), obj)

    def remove(self, uid: str) -> None:
        """Delete an object."""
        self.objects = {path: obj for path, obj in self.objects.items() if obj["metadata"]["uid"] != uid}

    async def print(self, pod: str, text: str) -> None:
        """Append lines to a pod's log; text without a final newline is an unfinished line."""
        stamped = ""
        for part in text.splitlines(keepends=True):
            second, half = divmod(next(self._now), 2)
            at = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            stamped += f"{at}.{half * 5}00000000Z {part}"
        await self.print_raw(pod, stamped.encode())

    async def print_raw(self, pod: str, data: bytes) -> None:
        """Append raw bytes to a pod's log."""
        async with self._grown:
            self._outputs[pod].data += data
            self._grown.notify_all()

    async def end(self, pod: str) -> None:
        """End a pod's log."""
        async with self._grown:
            self._outputs[pod].ended = True
            self._grown.notify_all()

    async def cut(self, pod: str) -> None:
        """Break all streams of a pod's log."""
        async with self._grown:
            self._outputs[pod].cuts += 1
            self._grown.notify_all()

    async def followed(self, pod: str, times: int = 1) -> None:
        """Wait until this number of requests has followed a pod's log."""
        async with self._grown:
            await self._grown.wait_for(lambda: self._outputs[pod].followers >= times)

    def _failure(self, _method: str, path: str) -> tuple[int, str, str] | None:
        if path not in self.failing:
            return None
        status, words = self.failing[path]
        return status, _REASONS.get(status, "InternalError"), words

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in self.pages and request.path not in self.failing:
            return web.Response(text=self.pages[request.path])
        if request.path.endswith("/log") and request.path not in self.failing:
            return await self._log(request)
        return await super()._answer(request)

    async def _log(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.query["container"] == "worker"
        output = self._outputs[request.path.split("/")[-2]]
        response = web.StreamResponse()
        await response.prepare(request)
        cuts, follow = output.cuts, "follow" in request.query
        at = _first_since(output.data, request.query.get("sinceTime", ""))
        if follow:
            async with self._grown:
                output.followers += 1
                self._grown.notify_all()
        while True:
            data = output.data[at:]
            at += len(data)
            if data:
                await response.write(data)
                continue
            async with self._grown:
                while follow and not self._closed and len(output.data) == at and output.cuts == cuts:
                    if output.ended:
                        break
                    await self._grown.wait()
            if output.cuts > cuts and request.transport:
                request.transport.abort()
            if len(output.data) == at:
                return response


def _first_since(data: bytes, since: str) -> int:
    """Return the offset of the first line of this second or a later one."""
    at = 0
    for line in data.splitlines(keepends=True):
        if line[:19] >= since.removesuffix("Z").encode():
            return at
        at += len(line)
    return at
