"""The rendezvous while etcd is silent, down or replaced: the round stays, and changes continue afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support import etcd_kinds
from tests.support.etcd import fake_etcd, http
from tests.support.nodes import NodeFactory, all_with
from tests.support.tcp_proxy import TcpProxy
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from tests.support.nodes import TestNode
    from torchelastic.store.api import Store

pytestmark = pytest.mark.integration

LEASE = 1.0


@pytest_asyncio.fixture(params=etcd_kinds.chosen())
async def any_etcd(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EtcdServer]:
    """An etcd of one kind, for one test."""
    async with request.param.server(tmp_path) as server:
        yield server


@pytest.fixture
async def factory(any_etcd: EtcdServer) -> AsyncIterator[NodeFactory]:
    async def connect_client() -> Store:
        settings = replace(any_etcd.settings, silence_limit=LEASE, request_timeout=LEASE)
        return await connect(settings)

    async with NodeFactory(connect_client, f"away-{uuid.uuid4()}", lease=LEASE, last_call_timeout=1.0) as made:
        yield made


async def wait_until_store_lost(*nodes: TestNode) -> None:
    await asyncio.gather(*(node.wait_until_store_lost() for node in nodes))


async def test_a_replacement_etcd_is_filled_by_the_nodes(factory: NodeFactory, any_etcd: EtcdServer) -> None:
    a, b = [await factory.node(name) for name in "ab"]
    first = await all_with(a, b)
    await any_etcd.kill()
    await wait_until_store_lost(a, b)
    any_etcd.wipe()
    any_etcd.args.append("--initial-cluster-token=another")
    await any_etcd.start()
    c = await factory.node("c")
    second = await all_with(a, b, c)
    assert (second.number, second.nodes[:2]) == (2, first.nodes)
    for node in (a, b):
        assert [round.number for round in node.rounds] == [1, 2]


async def test_another_server_on_the_port_of_etcd_does_not_end_the_run_during_an_outage(
    factory: NodeFactory, any_etcd: EtcdServer
) -> None:
    a, b = [await factory.node(name) for name in "ab"]
    first = await all_with(a, b)
    await any_etcd.kill()
    answer = http("404 Not Found", "default backend - 404")  # the answer of a proxy without a backend
    async with fake_etcd(answer, int(any_etcd.endpoint.rpartition(":")[2])):
        await wait_until_store_lost(a, b)
        await asyncio.sleep(1.5 * LEASE)  # the nodes send requests during this time
    await any_etcd.start()
    c = await factory.node("c")
    second = await all_with(a, b, c)
    assert (second.number, second.nodes[:2]) == (2, first.nodes)
    assert not any(node.partitioned or node.inner.failed.done() for node in (a, b, c))


async def test_a_node_with_only_a_silent_connection_stays_in_the_round(
    factory: NodeFactory, any_etcd: EtcdServer
) -> None:
    async with contextlib.AsyncExitStack() as lines:

        async def joined(name: str, own: TcpProxy) -> TestNode:
            settings = replace(any_etcd.settings, endpoints=(own.endpoint,), silence_limit=0.5, request_timeout=0.5)
            return await factory.node(name, connect=lambda: connect(settings))

        lines_of = {name: await lines.enter_async_context(TcpProxy(any_etcd.endpoint)) for name in "ab"}
        nodes = {name: await joined(name, lines_of[name]) for name in "ab"}
        first = await all_with(*nodes.values())
        follower = nodes[first.nodes[1].partition(".")[0]]
        lines_of[follower.name].fall_silent()
        await follower.wait_until_store_lost()
        await asyncio.sleep(1.5 * LEASE)  # the lease of the node expires, but the connection stays
        lines_of[follower.name].speak_again()
        c = await factory.node("c")
        second = await all_with(*nodes.values(), c)
        assert (second.number, second.nodes[:2]) == (2, first.nodes)
        assert not any(node.partitioned for node in nodes.values())
