"""The operator's process: its lease under load, and the address that it serves on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.client import ELASTIC_JOBS, LEASES, PODS, Api
from elastic_operator.kubernetes.http_server import http_server
from elastic_operator.kubernetes.manager import Manager
from elastic_operator.kubernetes.metrics import OperatorMetrics
from elastic_operator.kubernetes.settings import OperatorSettings
from tests.support.object_server import NAMESPACE, ObjectServer

JOB = {"minReplicas": 1, "maxReplicas": 500, "replicas": 1, "image": "i", "args": ["a.py"]}


async def test_a_leader_with_many_pending_requests_renews_its_lease() -> None:
    spec = {**JOB, "etcd": {"endpoint": "127.9.9.9:2379"}}
    async with ObjectServer() as server, Api(server.configuration, NAMESPACE) as api:
        server.put(ELASTIC_JOBS, "one", spec=spec)
        stop = asyncio.Event()
        manager = asyncio.create_task(Manager(OperatorSettings(listen=("127.0.0.1", 0)), api).run(stop))
        try:
            await server.wait_for(lambda: len(server.of_kind(PODS)) == 1)
            server.unanswered.add(PODS.path(NAMESPACE))
            for number in range(200):
                server.put(ELASTIC_JOBS, f"more-{number}", spec=spec)
            await server.wait_for(lambda: server.count_requests("POST", PODS) > 10)
            renewals = server.count_requests("PUT", LEASES)
            await server.wait_for(lambda: server.count_requests("PUT", LEASES) > renewals)
            server.unanswered.clear()
            server.release()
        finally:
            stop.set()
            await manager
        assert not server.get(LEASES, "elastic-operator")["spec"]["holderIdentity"], "the lease is not released"


async def test_an_address_in_use_is_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        web = http_server(("127.0.0.1", port), metrics=OperatorMetrics().page, unready=str)
        with pytest.raises(BadInput, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*; choose another address"):
            async with web:
                pass
