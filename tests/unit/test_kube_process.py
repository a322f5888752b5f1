"""The operator's process: what a copy does that leads, and one that does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from elastic_operator.kube.api import Api
from elastic_operator.kube.options import OperatorSettings
from elastic_operator.kube.process import Operator
from elastic_operator.kube.resources import ELASTIC_JOBS, LEASES, PODS
from elastic_operator.store_mirror import StoreMirror
from tests.support.object_server import NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.store_mirror import Reach

SIDE_BY_SIDE = 500


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    async with ObjectServer() as server:
        yield server


@pytest.fixture
async def api(server: ObjectServer) -> AsyncIterator[Api]:
    async with Api(server.configuration, NAMESPACE) as api:
        yield api


async def test_a_leader_that_waits_for_many_answers_renews_its_lease(server: ObjectServer, api: Api) -> None:
    server.stuck.add(PODS.path(NAMESPACE))
    operator = Operator(OperatorSettings(), api)
    operator._listings.complete.set()
    async with asyncio.TaskGroup() as tasks:
        acts = tasks.create_task(operator._act())
        await server.until(lambda: bool(server.of_kind(LEASES)))
        pods = [tasks.create_task(api.create(PODS, NAMESPACE, {})) for _ in range(SIDE_BY_SIDE)]
        await server.until(lambda: server.times("POST", PODS) > 10 and server.times("PUT", LEASES) > 0)
        assert not any(pod.done() for pod in pods)
        for task in (acts, *pods):
            task.cancel()
    assert not server.get(LEASES, "elastic-operator")["spec"]["holderIdentity"]


async def test_a_copy_that_stands_by_gathers_no_work(server: ObjectServer, api: Api) -> None:
    job = {"minReplicas": 1, "maxReplicas": 1, "replicas": 1, "image": "i", "args": ["a.py"]}
    held = {"holderIdentity": "another", "leaseDurationSeconds": 10}
    server.put(LEASES, "elastic-operator", spec=held)
    operator = Operator(OperatorSettings(), api)
    operator._listings.complete.set()
    acts = asyncio.create_task(operator._act())
    await server.until(lambda: server.times("GET", LEASES) > 0)
    for name in ("one", "two"):
        operator._hear(ELASTIC_JOBS, "ADDED", server.put(ELASTIC_JOBS, name, spec=job))
    assert operator._queue.depth == 0

    server.put(LEASES, "elastic-operator", spec={**held, "holderIdentity": ""})
    await server.until(lambda: len(server.of_kind(PODS)) == 2)
    acts.cancel()
    await asyncio.wait({acts})
    assert operator._queue.depth == 0


class Readable(StoreMirror):
    """A mirror of a store that can be read until it is no longer followed."""

    async def run(self, settings: Reach, available: asyncio.Event | None) -> None:
        self.readable = True
        self._changed()
        try:
            await asyncio.Event().wait()
        finally:
            self.readable = False
            self._changed()


async def test_a_copy_that_leads_no_more_has_no_work_left(
    server: ObjectServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_operator.kube.stores.StoreMirror", Readable)
    job = {"minReplicas": 1, "maxReplicas": 1, "replicas": 1, "image": "i", "args": ["a.py"]}
    operator = Operator(OperatorSettings(leader_elect=False), api)
    operator._listings.complete.set()
    acts = asyncio.create_task(operator._act())
    for name in ("one", "two"):
        external = {**job, "etcd": {"endpoint": "127.9.9.9:2379"}}
        operator._hear(ELASTIC_JOBS, "ADDED", server.put(ELASTIC_JOBS, name, spec=external))
    await server.until(lambda: len(server.of_kind(PODS)) == 2)
    acts.cancel()
    await asyncio.wait({acts})
    assert operator._queue.depth == 0
