"""A proxy in front of a real API server that injects network and server faults, and counts writes.

A function of the test chooses the fault of each request; :class:`RandomFaults` chooses at random, from a seed.
The proxy sends its own credentials to the API server for every client.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self

import aiohttp
from aiohttp import web

from testbed.control_plane_config import kubeconfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    import kopf

_PASSED_ON: Final = ("Content-Type", "Content-Encoding", "Retry-After")
_REMEMBERED: Final = 6
"""The number of listings of one kind that are kept for later repetition."""
_LONGEST_DELAY: Final = 0.5
_LONGEST_WATCH: Final = 3.0
"""Maximum number of seconds until :attr:`Fault.CUT` breaks the connection of a watch."""


class Fault(enum.StrEnum):
    """A fault of a request."""

    NONE = enum.auto()
    SLOW = enum.auto()
    """The answer is late. For a watch: each line is late."""
    LOST = enum.auto()
    """The request does not reach the server; the connection breaks."""
    UNANSWERED = enum.auto()
    """The request is executed, and the connection breaks before the answer."""
    REPEATED = enum.auto()
    """The request is executed twice, and the second answer is sent. For a watch: each line is sent twice."""
    CONFLICT = enum.auto()
    """The request is not executed, and answered with 409."""
    TOO_MANY = enum.auto()
    """The request is not executed, and answered with 429."""
    BROKEN = enum.auto()
    """The request is not executed, and answered with 500."""
    BROKEN_AFTERWARDS = enum.auto()
    """The request is executed, and answered with 500."""
    STALE = enum.auto()
    """For a listing: an earlier listing is repeated."""
    CUT = enum.auto()
    """For a watch: the connection breaks after a while."""
    EXPIRED = enum.auto()
    """For a watch: the answer is that its resource version is too old."""


Request = Literal["read", "list", "write", "watch"]

_OF_ALL: Final = (Fault.SLOW, Fault.LOST, Fault.UNANSWERED, Fault.TOO_MANY, Fault.BROKEN)
_FAULTS: Final[Mapping[Request, Sequence[Fault]]] = {
    "read": _OF_ALL,
    "list": (*_OF_ALL, Fault.STALE, Fault.STALE),
    "write": (*_OF_ALL, Fault.REPEATED, Fault.CONFLICT, Fault.BROKEN_AFTERWARDS),
    "watch": (Fault.SLOW, Fault.LOST, Fault.TOO_MANY, Fault.BROKEN, Fault.REPEATED, Fault.CUT, Fault.EXPIRED),
}
"""The possible faults of each kind of request."""

_ERRORS: Final = {
    Fault.CONFLICT: (409, "Conflict", "Operation cannot be fulfilled: the object has been modified"),
    Fault.TOO_MANY: (429, "TooManyRequests", "too many requests, please try again later"),
    Fault.BROKEN: (500, "InternalError", "etcdserver: leader changed"),
    Fault.BROKEN_AFTERWARDS: (500, "InternalError", "etcdserver: request timed out"),
}


class RandomFaults:
    """Chooses the fault of each request at random; an instance is called with the request.

    Args:
        seed: the seed of the choices.
        share: the share of requests with a fault; may be changed at any time.

    Attributes:
        chosen: the number of times that each fault was chosen.
    """

    def __init__(self, seed: int, share: float) -> None:
        self.share = share
        self.chosen: Counter[Fault] = Counter()
        self._random = random.Random(seed)

    def __call__(self, request: Request) -> Fault:
        if self._random.random() >= self.share:
            return Fault.NONE
        fault = self._random.choice(_FAULTS[request])
        self.chosen[fault] += 1
        return fault


class ApiProxy:
    """Proxies an API server within ``async with``.

    Args:
        access: the access to the API server.
        fault: chooses the fault of a request.
        on_write: called after each write of a job's object, before the client gets the answer, with the number of such
            writes so far. Writes of events and leases do not count.

    Attributes:
        writes: the number of writes of jobs' objects.
    """

    def __init__(
        self,
        access: kopf.ConnectionInfo,
        *,
        fault: Callable[[Request], Fault] = lambda _request: Fault.NONE,
        on_write: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self.writes = 0
        self._access = access
        self._fault = fault
        self._on_write = on_write
        self._random = random.Random(0)
        self._listed: defaultdict[str, list[_Answer]] = defaultdict(list)
        self._stack = contextlib.AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._access.as_ssl_context())
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        session = aiohttp.ClientSession(connector=connector, timeout=limit, auto_decompress=False)
        self._session = await self._stack.enter_async_context(session)
        runner = web.ServerRunner(web.Server(self._serve, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def write_kubeconfig(self, file: Path) -> Path:
        """Write a kubeconfig for clients of this proxy, and return its path."""
        file.write_text(kubeconfig(f"http://127.0.0.1:{self._port}", token="of-no-use"))
        return file

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        kind: Request = "write"
        if request.query.get("watch") == "true":
            kind = "watch"
        elif request.method == "GET":
            kind = "list" if request.path.rstrip("/").endswith("s") else "read"
        fault = self._fault(kind)
        if fault is Fault.LOST:
            return _broken_off(request)
        if fault in (Fault.CONFLICT, Fault.TOO_MANY, Fault.BROKEN):
            return _Answer.refusal(fault).response()
        if fault is Fault.STALE and (remembered := self._listed[request.path_qs]):
            return self._random.choice(remembered).response()
        try:
            return await (self._watch(request, fault) if kind == "watch" else self._answer(request, kind, fault))
        except (aiohttp.ClientError, ConnectionError):
            return _broken_off(request)

    async def _answer(self, request: web.BaseRequest, kind: Request, fault: Fault) -> web.StreamResponse:
        answer = await self._ask(request)
        of_a_job = "/leases" not in request.path and not request.path.rstrip("/").endswith("/events")
        if kind == "write" and of_a_job and answer.status < 300:
            self.writes += 1
            self._on_write(self.writes)
        match fault:
            case Fault.UNANSWERED:
                return _broken_off(request)
            case Fault.BROKEN_AFTERWARDS:
                return _Answer.refusal(fault).response()
            case Fault.REPEATED:
                answer = await self._ask(request)
            case Fault.SLOW:
                await asyncio.sleep(self._random.uniform(0, _LONGEST_DELAY))
        if kind == "list" and answer.status == 200:
            self._listed[request.path_qs] = [*self._listed[request.path_qs], answer][-_REMEMBERED:]
        return answer.response()

    async def _watch(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse:
        if fault is Fault.EXPIRED:
            status = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}
            return web.Response(body=json.dumps({"type": "ERROR", "object": status}), content_type="application/json")
        seconds = self._random.uniform(0, _LONGEST_WATCH) if fault is Fault.CUT else None
        async with self._begin(request) as upstream:
            response = web.StreamResponse(status=upstream.status, headers=_headers(upstream))
            await response.prepare(request)
            try:
                async with asyncio.timeout(seconds):
                    async for line in _lines(upstream.content):
                        if fault is Fault.SLOW:
                            await asyncio.sleep(self._random.uniform(0, _LONGEST_DELAY))
                        await response.write(line * 2 if fault is Fault.REPEATED else line)
            except TimeoutError:
                return _broken_off(request)
            await response.write_eof()
        return response

    async def _ask(self, request: web.BaseRequest) -> _Answer:
        async with self._begin(request) as upstream:
            return _Answer(upstream.status, _headers(upstream), await upstream.read())

    @contextlib.asynccontextmanager
    async def _begin(self, request: web.BaseRequest) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("used outside of its `async with` block")
        headers = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        headers |= self._access.as_http_headers()
        url = f"{self._access.server}{request.path_qs}"
        body = await request.read()
        async with self._session.request(request.method, url, data=body or None, headers=headers) as upstream:
            yield upstream


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of the API server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def refusal(cls, fault: Fault) -> Self:
        code, reason, words = _ERRORS[fault]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
        headers = {"Content-Type": "application/json"} | ({"Retry-After": "1"} if code == 429 else {})
        return cls(code, headers, json.dumps({**status, "message": words}).encode())

    def response(self) -> web.Response:
        return web.Response(status=self.status, headers=self.headers, body=self.body)


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a watch as they arrive; they can have any length."""
    begun = b""
    async for piece in stream.iter_any():
        *whole, begun = (begun + piece).split(b"\n")
        for line in whole:
            yield line + b"\n"


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}


def _broken_off(request: web.BaseRequest) -> web.Response:
    """Abort the connection, and return a response that cannot be sent."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
