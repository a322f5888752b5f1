"""The operator's process: what a copy does that leads, and one that does not."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

import aiohttp
import pytest

from elastic_operator.kube.api import Api
from elastic_operator.kube.options import Address, OperatorSettings
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


def leads(page: str) -> str:
    """What a page says of whether this copy acts; empty where it says nothing."""
    return "".join(re.findall(r"^elastic_operator_leads (.*)$", page, re.MULTILINE))


async def test_a_copy_that_may_list_nothing_shows_that_it_does_not_act_and_says_why_once(
    server: ObjectServer, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = 'pods is forbidden: User "operator" cannot list resource "pods"'
    server.fault = lambda _method, _path: (403, "Forbidden", words)
    stop = asyncio.Event()
    running = asyncio.create_task(Operator(OperatorSettings(listen=Address("127.0.0.1", 0)), api).run(stop))
    await server.until(lambda: len(server.asked) > 1)
    [port] = re.findall(r"/metrics on port (\d+)", caplog.text)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as response:
        assert leads(await response.text()) == "0.0"
    [said] = [message for message in caplog.messages if words in message]
    assert said.startswith("what exists cannot be listed: ")
    stop.set()
    await running


@pytest.mark.parametrize("leader_elect", [True, False])
async def test_a_copy_shows_that_it_acts_as_long_as_it_does(leader_elect: bool, server: ObjectServer, api: Api) -> None:
    operator = Operator(OperatorSettings(leader_elect=leader_elect), api)
    operator._measure()

    def shown() -> str:
        return leads(operator._metrics.page("")[0].decode())

    assert shown() == "0.0"
    job = {"minReplicas": 1, "maxReplicas": 1, "replicas": 1, "image": "i", "args": ["a.py"]}
    operator._hear(ELASTIC_JOBS, "ADDED", server.put(ELASTIC_JOBS, "one", spec=job))
    operator._listings.complete.set()
    acts = asyncio.create_task(operator._act())
    await server.until(lambda: len(server.of_kind(PODS)) == 1)
    assert shown() == "1.0"
    acts.cancel()
    await asyncio.wait({acts})
    assert shown() == "0.0"
