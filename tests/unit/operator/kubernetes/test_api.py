"""The client of the API server: invalid answers, credentials, proxies and error hints."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import ELASTIC_JOBS, Api, ApiError, with_hint
from tests.support.object_server import answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def answered_with(body: bytes) -> AsyncIterator[Api]:
    """Yield a client of a server that answers every request with this body."""

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body)

    async with answering(answer) as configuration, Api(configuration) as api:
        yield api


@pytest.mark.parametrize("answer", [b"<html>hello</html>", b'{"title": "Anmeldung f\xfcr alle"}'])
async def test_an_answer_of_another_server_is_an_error(answer: bytes) -> None:
    async with answered_with(answer) as api:
        with pytest.raises(ClusterError, match="is not a Kubernetes API server"):
            await api.get(ELASTIC_JOBS, "default", "digits")


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b'{"items": []}', b'{"metadata": {}, "items": []}'])
async def test_an_invalid_list_is_an_error(answer: bytes) -> None:
    async with answered_with(answer) as api:
        with pytest.raises(ClusterError, match="is not a Kubernetes API server"):
            _ = [page async for page in api.pages(ELASTIC_JOBS, None)]


@pytest.mark.parametrize(
    ("authorization", "header"), [("bearer abc", "bearer abc"), ("abc", "Bearer abc"), (None, None)]
)
async def test_kopf_gets_the_same_credentials(authorization: str | None, header: str | None) -> None:
    configuration = Configuration()
    configuration.host, configuration.proxy, configuration.ca_cert_data = "https://server:6443", "http://proxy", "PEM"
    if authorization is not None:
        configuration.api_key["BearerToken"] = authorization
    info = await Api(configuration).access()
    assert (info.server, info.ca_data, info.proxy_url) == ("https://server:6443", "PEM", "http://proxy")
    assert info.as_http_headers().get("Authorization") == header


async def test_the_proxy_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        for name in ("https_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        configuration = Configuration()
        configuration.host = "https://api.example.org:6443"
        configuration.proxy = None
        async with Api(configuration) as api:
            with pytest.raises(ClusterError):
                await api.get(ELASTIC_JOBS, "default", "digits")
    assert asked[0].startswith(b"CONNECT api.example.org:6443 ")


async def test_each_connection_uses_the_current_credentials() -> None:
    seen: list[str | None] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    def refresh(configuration: Configuration) -> None:
        configuration.api_key["BearerToken"] = f"bearer {len(seen)}"

    async with answering(answer) as configuration:
        configuration.api_key["BearerToken"] = "bearer of old"
        configuration.refresh_api_key_hook = refresh
        async with Api(configuration, "team") as api, api.another() as other:
            assert other.namespace == "team"
            for each in (api, other, api, other):
                await each.get(ELASTIC_JOBS, "team", "digits")
    assert seen == ["bearer 0", "bearer 1", "bearer 2", "bearer 3"]


async def test_only_the_beginning_of_an_endless_error_body_is_read() -> None:
    gone = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(status=403)
        await response.prepare(request)
        await response.write(b"no! " * (1 << 19))
        await gone.wait()
        return response

    async with answering(answer) as configuration, Api(configuration) as api, asyncio.timeout(20):
        with pytest.raises(ApiError) as refused:
            await anext(api.stream("/metrics", {}))
        gone.set()
    assert (refused.value.status, len(refused.value.message)) == (403, 499)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('error looking up service account team/x: serviceaccount "x" not found', "spec.serviceAccountName"),
        ('User "operator" cannot create resource "pods" in API group ""', "grant the operator its permissions"),
        ("the certificate of etcd at a:2379 cannot be trusted: self-signed certificate", "spec.etcd.tlsSecret"),
        ('pods "digits-etcd-5" is forbidden: exceeded quota: few.', "raise that quota"),
        ("failed quota: compute: must specify limits.cpu for: worker", "spec.template.spec.containers"),
        ('violates PodSecurity "restricted:latest": runAsNonRoot != true', "set it in spec.template.spec"),
    ],
)
def test_frequent_errors_get_a_hint(message: str, hint: str) -> None:
    hinted = with_hint(message)
    assert hinted.startswith(f"{message.removesuffix('.')}; ")
    assert hint in hinted


def test_other_errors_get_no_hint() -> None:
    denied = 'admission webhook "gate.example.org" denied the request: not today.'
    assert with_hint(denied) == denied
