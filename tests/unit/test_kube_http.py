"""The HTTP server for probes and Prometheus."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.main import Address
from elastic_operator.kubernetes.manager import http_server
from elastic_operator.kubernetes.metrics import OperatorMetrics
from tests.support.ports import free_range

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_health_and_readiness_say_what_is_wrong(session: aiohttp.ClientSession) -> None:
    wrong = ["not everything has been listed yet"]
    web = http_server(
        Address("127.0.0.1", 0),
        metrics=OperatorMetrics().page,
        unready=lambda: wrong[-1],
    )
    async with web as port:
        root = f"http://127.0.0.1:{port}"

        async def ask(path: str) -> tuple[int, str]:
            async with session.get(root + path) as response:
                return response.status, await response.text()

        assert await ask("/healthz") == (200, "ok\n")
        assert await ask("/readyz") == (503, "not everything has been listed yet\n")
        wrong.append("")
        assert await ask("/readyz") == (200, "ok\n")
        assert (await ask("/secret"))[0] == 404
        status, page = await ask("/metrics")
        assert status == 200
        assert "process_resident_memory_bytes" in page


async def test_without_a_host_it_serves_on_all_addresses(session: aiohttp.ClientSession) -> None:
    port = free_range(1).first
    web = http_server(Address("", port), metrics=OperatorMetrics().page, unready=str)
    async with web, session.get(f"http://127.0.0.1:{port}/healthz") as response:
        assert response.status == 200


async def test_an_address_in_use_is_reported_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        web = http_server(Address("127.0.0.1", port), metrics=OperatorMetrics().page, unready=str)
        with pytest.raises(
            BadInput, match=rf"nothing can be served on 127\.0\.0\.1:{port}: .*; choose another address"
        ):
            async with web:
                pass
