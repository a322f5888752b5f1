"""A store that comes back empty is filled again by the nodes: with the epoch, the budget, and how the run has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.support.nodes import Clients, Meeting, all_with
from tests.support.views import failure
from torchelastic.contract import NodePhase, OutcomeState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.nodes import TestNode
    from torchelastic.contract import OutcomeRecord

LEASE = 0.5


async def all_workers_end_with_0(nodes: list[TestNode], number: int) -> None:
    for node in nodes:
        node.inner.report(number, phase=NodePhase.DONE)


async def a_worker_fails(nodes: list[TestNode], number: int) -> None:
    nodes[1].inner.report(number, failure=failure(nodes[1].name, number=number, message="the data are broken"))


ENDS = pytest.mark.parametrize(
    ("end", "state"),
    [(all_workers_end_with_0, OutcomeState.SUCCEEDED), (a_worker_fails, OutcomeState.FAILED)],
)


async def outcome_of(node: TestNode) -> OutcomeRecord:
    await node.until(lambda node: node.outcome is not None)
    assert node.outcome is not None
    return node.outcome


@ENDS
async def test_a_run_that_ends_while_the_store_loses_everything_has_its_outcome_all_the_same(
    end: Callable[[list[TestNode], int], Awaitable[None]], state: OutcomeState
) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, joining_window=0.2, max_restarts=0) as meeting:
        nodes = [await meeting.node(name, wanted=2) for name in "ab"]
        epoch = await all_with(*nodes)
        clients.reach(False)
        await end(nodes, epoch.number)
        clients.data.wipe()
        clients.reach(True)
        for node in nodes:
            outcome = await outcome_of(node)
            assert (outcome.state, outcome.epoch) == (state, epoch.number)
            assert [record.number for record in node.epochs] == [epoch.number]
    assert state is OutcomeState.SUCCEEDED or "the data are broken" in outcome.message


@ENDS
async def test_whoever_has_not_heard_of_the_outcome_before_the_store_lost_it_hears_of_it_from_those_who_have(
    end: Callable[[list[TestNode], int], Awaitable[None]], state: OutcomeState
) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, joining_window=0.2, max_restarts=0) as meeting:
        nodes = [await meeting.node(name, wanted=2) for name in "ab"]
        epoch = await all_with(*nodes)
        late = nodes[1] if nodes[0].inner._leadership is not None else nodes[0]
        (first,) = set(nodes) - {late}
        if state is OutcomeState.SUCCEEDED:
            await late.says(phase=NodePhase.DONE)
        clients.all[nodes.index(late)].reachable = False
        await end([late, first], epoch.number)
        told = await outcome_of(first)
        clients.data.wipe()
        clients.reach(True)
        assert msgspec.structs.replace(await outcome_of(late), failure=None) == msgspec.structs.replace(
            told, failure=None
        )
        assert [record.number for record in late.epochs] == [epoch.number]
