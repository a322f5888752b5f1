"""The operator's process: leader, standby, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.client import ELASTIC_JOBS, LEASES, PODS, Api
from elastic_operator.kubernetes.main import Address, OperatorSettings
from elastic_operator.kubernetes.manager import Manager, http_server
from elastic_operator.kubernetes.metrics import OperatorMetrics
from tests.support.object_server import NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

JOB = {"minReplicas": 1, "maxReplicas": 500, "replicas": 1, "image": "i", "args": ["a.py"]}
EXTERNAL = {"etcd": {"endpoint": "127.9.9.9:2379"}}
HELD = {"holderIdentity": "another", "leaseDurationSeconds": 1000}


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    async with ObjectServer() as server:
        yield server


@contextlib.asynccontextmanager
async def running(
    server: ObjectServer, caplog: pytest.LogCaptureFixture, *, leader_elect: bool = True
) -> AsyncIterator[Callable[[str], object]]:
    """Run an operator within the block; yields a function that reads a series from /metrics."""
    caplog.set_level(logging.INFO)
    settings = OperatorSettings(listen=Address("127.0.0.1", 0), leader_elect=leader_elect)
    stop = asyncio.Event()
    async with Api(server.configuration, NAMESPACE) as api, aiohttp.ClientSession() as session:
        manager = asyncio.create_task(Manager(settings, api).run(stop))
        try:
            async with asyncio.timeout(30):
                await server.wait_for(lambda: bool(server.requests))
                [port] = re.findall(r"/metrics on port (\d+)", caplog.text)

                async def metric(name: str) -> str:
                    async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                        return "".join(re.findall(rf"^{name} (.*)$", await response.text(), re.MULTILINE))

                yield metric
        finally:
            stop.set()
            await manager


async def test_a_leader_with_many_pending_requests_renews_its_lease(
    server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(ELASTIC_JOBS, "one", spec={**JOB, **EXTERNAL})
    async with running(server, caplog) as metric:
        await server.wait_for(lambda: len(server.of_kind(PODS)) == 1)
        assert await metric("elastic_operator_leader") == "1.0"
        server.unanswered.add(PODS.path(NAMESPACE))
        for number in range(200):
            server.put(ELASTIC_JOBS, f"more-{number}", spec={**JOB, **EXTERNAL})
        await server.wait_for(lambda: server.count_requests("POST", PODS) > 10)
        renewals = server.count_requests("PUT", LEASES)
        await server.wait_for(lambda: server.count_requests("PUT", LEASES) > renewals)
        server.unanswered.clear()
        server.release()
    assert not server.get(LEASES, "elastic-operator")["spec"]["holderIdentity"], "the lease was released"


async def test_a_standby_lists_all_jobs_and_writes_nothing_until_it_is_the_leader(
    server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(LEASES, "elastic-operator", spec=HELD)
    server.put(ELASTIC_JOBS, "one", spec={**JOB, **EXTERNAL})
    async with running(server, caplog) as metric:
        await server.wait_for(lambda: server.count_requests("GET", LEASES) > 1)
        assert await metric("elastic_operator_leader") == "0.0"
        assert await metric("elastic_operator_elasticjobs") == "1.0"
        assert await metric("elastic_operator_queue_depth") == "0.0"
        server.put(LEASES, "elastic-operator", spec={**HELD, "holderIdentity": ""})
        await server.wait_for(lambda: len(server.of_kind(PODS)) == 1)
        assert await metric("elastic_operator_leader") == "1.0"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_health_and_readiness_name_the_problem(session: aiohttp.ClientSession) -> None:
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


async def test_an_address_in_use_is_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        web = http_server(Address("127.0.0.1", port), metrics=OperatorMetrics().page, unready=str)
        with pytest.raises(
            BadInput, match=rf"nothing can be served on 127\.0\.0\.1:{port}: .*; choose another address"
        ):
            async with web:
                pass
