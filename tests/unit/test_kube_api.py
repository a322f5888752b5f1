"""The connection to the API server: what it makes of what comes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import Api, ApiError
from elastic_operator.kube.resources import ELASTIC_JOBS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Server:
    """Answers every request with the same pieces.

    Attributes:
        answers: the pieces.
        url: where it listens.
    """

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.url = ""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in self.answers:
            await response.write(piece)
        return response


@pytest.fixture
async def server() -> AsyncGenerator[Server, None]:
    """A server for what a test has it answer."""
    server = Server()
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


def api_of(server: Server) -> Api:
    configuration = Configuration()
    configuration.host = server.url
    return Api(configuration)


async def test_an_object_of_megabytes_comes_through_a_watch_whole(server: Server) -> None:
    job = {"metadata": {"name": "large", "annotations": {"note": "x" * 3_000_000}}}
    line = json.dumps({"type": "ADDED", "object": job}).encode() + b"\n"
    server.answers += [line[:100], line[100:] + line[:5], line[5:]]
    async with api_of(server) as api:
        seen = [change async for change in api.watch(ELASTIC_JOBS, "default", start="1")]
    assert seen == [("ADDED", job), ("ADDED", job)]


async def test_a_watch_that_begins_too_far_back_says_so(server: Server) -> None:
    told = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old resource version"}}
    server.answers.append(json.dumps(told).encode() + b"\n")
    async with api_of(server) as api:
        with pytest.raises(ApiError, match="too old") as caught:
            _ = [change async for change in api.watch(ELASTIC_JOBS, "default", start="1")]
    assert caught.value.status == 410


async def test_what_is_no_api_server_is_called_that(server: Server) -> None:
    server.answers.append(b"<html>hello</html>")
    async with api_of(server) as api:
        with pytest.raises(ClusterError, match="no Kubernetes API server"):
            await api.get(ELASTIC_JOBS, "default", "digits")
