"""The nodes restore the round, the restart budget and the outcome to a store that lost its data."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.support.nodes import PATIENCE, Clients, Meeting, all_with
from tests.support.views import failure
from torchelastic.protocol import NodePhase, NodeRecord, OutcomeState, RunKeys, decode
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.nodes import TestNode
    from torchelastic.protocol import OutcomeRecord
    from torchelastic.store import Listing, Store

LEASE = 0.5


async def all_workers_succeed(nodes: list[TestNode], number: int) -> None:
    for node in nodes:
        node.inner.report(number, phase=NodePhase.DONE)


async def a_worker_fails(nodes: list[TestNode], number: int) -> None:
    nodes[1].inner.report(number, failure=failure(nodes[1].name, number=number, message="the data are broken"))


both_outcomes = pytest.mark.parametrize(
    ("end", "state"),
    [(all_workers_succeed, OutcomeState.SUCCEEDED), (a_worker_fails, OutcomeState.FAILED)],
)


async def outcome_of(node: TestNode) -> OutcomeRecord:
    await node.until(lambda node: node.outcome is not None)
    assert node.outcome is not None
    return node.outcome


@both_outcomes
async def test_a_run_that_ends_while_the_store_loses_its_data_has_its_outcome(
    end: Callable[[list[TestNode], int], Awaitable[None]], state: OutcomeState
) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, last_call_timeout=0.2, max_restarts=0) as meeting:
        nodes = [await meeting.node(name, wanted=2) for name in "ab"]
        round = await all_with(*nodes)
        clients.reach(False)
        await end(nodes, round.number)
        clients.data.wipe()
        clients.reach(True)
        for node in nodes:
            outcome = await outcome_of(node)
            assert (outcome.state, outcome.round) == (state, round.number)
            assert [record.number for record in node.rounds] == [round.number]
    assert state is OutcomeState.SUCCEEDED or "the data are broken" in outcome.message


@both_outcomes
async def test_a_node_that_missed_a_lost_outcome_learns_it_from_the_other_nodes(
    end: Callable[[list[TestNode], int], Awaitable[None]], state: OutcomeState
) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, last_call_timeout=0.2, max_restarts=0) as meeting:
        nodes = [await meeting.node(name, wanted=2) for name in "ab"]
        round = await all_with(*nodes)
        late = nodes[1] if nodes[0].inner.is_leader else nodes[0]
        (first,) = set(nodes) - {late}
        if state is OutcomeState.SUCCEEDED:
            await late.says(phase=NodePhase.DONE)
        clients.all[nodes.index(late)].reachable = False
        await end([late, first], round.number)
        expected = await outcome_of(first)
        clients.data.wipe()
        clients.reach(True)
        assert msgspec.structs.replace(await outcome_of(late), failure=None) == msgspec.structs.replace(
            expected, failure=None
        )
        assert [record.number for record in late.rounds] == [round.number]


class NamedCluster(MemoryStore):
    """A store client with a settable cluster id."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster_id = "1"
        self.was_listed = asyncio.Event()

    async def list(self, prefix: str) -> Listing:
        listing = await super().list(prefix)
        if prefix == RunKeys.of("run").control:
            self.was_listed.set()
        return dataclasses.replace(listing, cluster_id=self.cluster_id)


@pytest.mark.parametrize("cluster_id", ["1", "", "2"])
async def test_a_node_offers_another_port_to_another_cluster(cluster_id: str) -> None:
    store, keys = NamedCluster(), RunKeys.of("run")

    async def connect() -> Store:
        return store

    async def offered() -> int:
        [entry] = (await data.list(keys.nodes)).entries
        return decode(entry.value, NodeRecord).store

    data = store.another()
    async with Meeting(connect, "run", lease=600.0, last_call_timeout=0.2) as meeting:
        node = await meeting.node("a", wanted=1)
        await all_with(node)
        await node.inner.flush()
        before = await offered()
        store.was_listed.clear()
        store.cluster_id = cluster_id
        store.reachable = False
        store.reachable = True
        async with asyncio.timeout(PATIENCE):
            await store.was_listed.wait()
        await asyncio.sleep(0.01)
        await node.inner.flush()
        assert (await offered() != before) == (cluster_id == "2")
