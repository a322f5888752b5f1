"""The rendezvous on a real etcd: nodes join, leave and crash, and survive every fault of etcd."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import msgspec
import pytest

from elastic_operator.store_mirror import StoreMirror
from tests.support.nodes import NodeFactory, all_with
from tests.support.store_conformance import read_changes, watching
from torchelastic.protocol.codec import encode
from torchelastic.protocol.keys import RunKeys, run_lease
from torchelastic.protocol.records import NodePhase, OutcomeState, SizeRecord, StateRecord
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Store

pytestmark = pytest.mark.integration

LEASE = 2.0


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4()}"


@pytest.fixture
async def factory(request: pytest.FixtureRequest, run_id: str, etcd: EtcdServer) -> AsyncIterator[NodeFactory]:
    """A factory of nodes of one run, on the test's own etcd if the test has one, otherwise on the shared etcd."""
    server = request.getfixturevalue("own_etcd") if "own_etcd" in request.fixturenames else etcd

    async def connect_client() -> Store:
        return await connect(server.settings)

    async with NodeFactory(connect_client, run_id, lease=LEASE, last_call_timeout=1.0) as node_factory:
        yield node_factory


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_crashed_node_is_noticed_long_before_its_lease_expires(factory: NodeFactory, rank: int) -> None:
    nodes = [await factory.node(name, wanted=3, lease=3600.0) for name in "abc"]
    first = await all_with(*nodes)
    dying = next(node for node in nodes if node.inner.node == first.nodes[rank])
    await dying.crash()
    second = await all_with(*(node for node in nodes if node is not dying))
    assert second.cause == f"{dying.name} died"


async def test_reports_of_a_past_round_are_ignored(factory: NodeFactory) -> None:
    a, b = [await factory.node(name, wanted=2) for name in "ab"]
    past = await all_with(a, b)
    await b.inner.leave()
    present = await all_with(a)
    a.inner.report(past.number, phase=NodePhase.DONE)
    assert a.inner.registration.record.phase is NodePhase.READY
    a.inner.report(present.number, phase=NodePhase.DONE)
    await a.until(lambda node: node.outcome is not None)
    assert a.outcome is not None
    assert a.outcome.round == present.number
    assert not await a.inner.is_current(present.number)


async def test_a_leaving_leaders_notice_is_delivered_by_the_next_leader(factory: NodeFactory) -> None:
    a, b, c = [await factory.node(name) for name in "abc"]
    round = await all_with(a, b, c)
    leader = next(node for node in (a, b, c) if node.inner.leader is not None)
    others = [node for node in (a, b, c) if node is not leader]
    await leader.report(notice=20.0)
    await leader.inner.leave()
    for node in (a, b, c):
        assert (await node.until_noticed()).seconds == 20.0
    leader.inner.report(round.number, answered_notice=1)
    assert (await all_with(*others)).cause == f"{leader.name} left"


async def test_nodes_that_all_leave_are_released_when_the_last_has_saved(factory: NodeFactory) -> None:
    nodes = [await factory.node(name) for name in "abc"]
    round = await all_with(*nodes)
    for node in nodes:
        await node.report(notice=600.0)
    await asyncio.gather(*(node.inner.leave() for node in nodes))
    for node in nodes:
        await node.until_noticed()
    for node in nodes:
        node.inner.report(round.number, answered_notice=1)
    for node in nodes:
        await node.until(lambda node: node.rounds[-1].number == 2)
        assert node.rounds[-1].members == ()
        await node.close()
    late = await factory.node("late", wanted=1)
    assert (await all_with(late)).number == 3


@pytest.mark.parametrize("loses_data", [False, True])
async def test_a_notice_survives_every_etcd_fault(own_etcd: EtcdServer, factory: NodeFactory, loses_data: bool) -> None:
    a, b = [await factory.node(name) for name in "ab"]
    round = await all_with(a, b)
    await a.report(notice=600.0)
    c = await factory.node("c")
    await a.until_noticed()
    await own_etcd.kill()
    if loses_data:
        own_etcd.wipe()
    await a.wait_until_store_lost()
    await own_etcd.start()
    a.inner.report(round.number, answered_notice=1)
    a.answers = True  # if etcd has lost the notice, the leader may give another one
    after = await all_with(a, b, c)
    assert (after.number, after.nodes[:2]) == (2, round.nodes)


async def test_a_round_is_current_until_the_next_is_committed_or_the_run_has_ended(factory: NodeFactory) -> None:
    a, b = [await factory.node(name, wanted=2) for name in "ab"]
    first = await all_with(a, b)
    assert await a.inner.is_current(first.number)
    assert not await a.inner.is_current(first.number + 1)
    assert not await a.inner.is_current(first.number - 1)
    store = await factory.connect()
    entry = await store.get(a.inner.run.keys.state)
    assert entry is not None
    # The store is checked directly, because the node may not have read the change yet.
    later = msgspec.structs.replace(first, number=7)
    a.inner.run.changed.send = lambda: None  # type: ignore[method-assign]
    await store.put(a.inner.run.keys.state, encode(StateRecord(later)))
    assert not await a.inner.is_current(first.number)
    await store.close()


async def test_a_round_stays_current_without_etcd_while_its_peers_are_connected(
    own_etcd: EtcdServer, factory: NodeFactory
) -> None:
    a, b = [await factory.node(name, wanted=2) for name in "ab"]
    round = await all_with(a, b)
    await own_etcd.kill()
    assert await a.inner.is_current(round.number, timeout=1.0)
    assert await b.inner.is_current(round.number, timeout=1.0)
    await b.crash()
    assert not await a.inner.is_current(round.number, timeout=1.0)
    await own_etcd.start()


async def test_a_node_that_finishes_early_can_leave_and_the_run_succeeds(factory: NodeFactory) -> None:
    a, b = [await factory.node(name, wanted=2) for name in "ab"]
    round = await all_with(a, b)
    for node in (a, b):
        await node.report(notice=20.0)
    leaving = next(node for node in (a, b) if node.inner.leader is None)
    staying = a if leaving is b else b
    await leaving.inner.leave()
    await staying.until_noticed()
    leaving.inner.report(round.number, phase=NodePhase.DONE)
    staying.inner.report(round.number, phase=NodePhase.DONE)
    await staying.until(lambda node: node.outcome is not None)
    assert staying.outcome is not None
    assert staying.outcome.state is OutcomeState.SUCCEEDED


RUN_LEASE = 2.0


async def wait_by_etcds_clock(store: Store, seconds: float) -> None:
    """Wait until this number of seconds has passed on etcd's clock."""
    key = f"/clock/{uuid.uuid4()}"
    async with watching(store, "/clock/") as watch:
        await store.put(key, b"", lease=await store.grant(seconds))
        await read_changes(watch, 2)


async def test_run_keys_exist_while_an_agent_or_the_operator_runs_and_are_removed_afterwards(
    own_etcd: EtcdServer, factory: NodeFactory, run_id: str
) -> None:
    store, keys = await factory.connect(), RunKeys(run_id)
    readable = asyncio.Event()
    mirror = StoreMirror(run_id, changed=readable.set, away=pytest.fail, run_lease=RUN_LEASE)
    following = asyncio.create_task(mirror.run(lambda: own_etcd.settings, None))
    await readable.wait()
    await mirror.write_size(SizeRecord(min=1, max=8, desired=2, generation=1))
    lasting = {keys.state, keys.leader, keys.size}
    a, b = [await factory.node(name, wanted=2, run_lease=RUN_LEASE) for name in "ab"]
    await all_with(a, b)
    following.cancel()
    await wait_by_etcds_clock(store, 2 * RUN_LEASE)
    assert {entry.key for entry in (await store.list(keys.control)).entries} == lasting, (
        "agents keep the keys of the run"
    )

    following = asyncio.create_task(mirror.run(lambda: own_etcd.settings, None))
    for node in (a, b):
        await node.crash()
    await wait_by_etcds_clock(store, 2 * RUN_LEASE)
    past = {keys.time_breakdown, keys.history}
    assert {entry.key for entry in (await store.list(keys.root)).entries} == lasting - {keys.leader} | past

    following.cancel()
    await wait_by_etcds_clock(store, 2 * RUN_LEASE)
    assert (await store.list(keys.root)).entries == ()
    await store.close()


async def test_a_run_with_a_lost_lease_continues_and_its_nodes_keep_their_leases(
    factory: NodeFactory, run_id: str
) -> None:
    a, b = [await factory.node(name) for name in "ab"]
    first = await all_with(a, b)
    store = await factory.connect()
    own_leases = {node.inner.registration.lease for node in (a, b)}
    await store.revoke(run_lease(run_id))
    c = await factory.node("c")
    round = await all_with(a, b, c)
    assert round.nodes[:2] == first.nodes
    assert [record.number for record in a.rounds] == [1, 2]
    assert own_leases == {node.inner.registration.lease for node in (a, b)}
    await store.keep_alive(run_lease(run_id))
    await store.close()
