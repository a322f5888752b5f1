"""The HTTP server for probes and Prometheus."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.main import Address
from elastic_operator.kubernetes.manager import HttpServer
from elastic_operator.kubernetes.metrics import OperatorMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_health_and_readiness_say_what_is_wrong(session: aiohttp.ClientSession) -> None:
    wrong = {"unhealthy": "", "unready": "not everything has been listed yet"}
    web = HttpServer(
        Address("127.0.0.1", 0),
        metrics=OperatorMetrics().page,
        unhealthy=lambda: wrong["unhealthy"],
        unready=lambda: wrong["unready"],
    )
    async with web:
        root = f"http://127.0.0.1:{web.port}"

        async def ask(path: str) -> tuple[int, str]:
            async with session.get(root + path) as response:
                return response.status, await response.text()

        assert await ask("/healthz") == (200, "ok\n")
        assert await ask("/readyz") == (503, "not everything has been listed yet\n")
        wrong |= {"unhealthy": "a job has been worked on for 601 s", "unready": ""}
        assert await ask("/healthz") == (503, "a job has been worked on for 601 s\n")
        assert await ask("/readyz") == (200, "ok\n")
        assert (await ask("/secret"))[0] == 404
        status, page = await ask("/metrics")
        assert status == 200
        assert "process_resident_memory_bytes" in page


@pytest.mark.parametrize("dual_stack", [True, False])
async def test_without_a_host_it_serves_on_all_addresses(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, *, dual_stack: bool
) -> None:
    both = dual_stack and socket.has_dualstack_ipv6()
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: both)
    async with HttpServer(Address("", 0), metrics=OperatorMetrics().page, unhealthy=str, unready=str) as web:
        for host in ("127.0.0.1", "[::1]") if both else ("127.0.0.1",):
            async with session.get(f"http://{host}:{web.port}/healthz") as response:
                assert response.status == 200


async def test_an_address_in_use_is_reported_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        web = HttpServer(Address("127.0.0.1", port), metrics=OperatorMetrics().page, unhealthy=str, unready=str)
        with pytest.raises(
            BadInput, match=rf"nothing can be served on 127\.0\.0\.1:{port}: .*; choose another address"
        ):
            async with web:
                pass
