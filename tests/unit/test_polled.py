"""A handler that is not ours, behind the interface of our node: what is agreed on, and when nodes meet again or end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.etcd import free_ports
from torchelastic.contract import EpochRecord, FailureRecord, NodePhase, OutcomeRecord, OutcomeState
from torchelastic.errors import RendezvousError
from torchelastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStateError
from torchelastic.rendezvous.node import EpochBegan, RunEnded
from torchelastic.rendezvous.polled import PolledNode, PolledSettings, _CallingThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT = 30.0
"""Seconds after which a test gives up."""


class Place:
    """Where nodes meet: so many of them, in a store like torch's, which may be the same one each time."""

    def __init__(self, size: int, *, fresh: bool = True) -> None:
        self.waiting = 0
        self._size = size
        self._fresh = fresh
        self._came: dict[int, int] = {}
        self._stores: dict[int, Store] = {}
        self._changed = threading.Condition()

    def meet(self, rank: int) -> tuple[Any, int, int]:
        """Come, and wait for the others."""
        with self._changed:
            self._came[rank] = self._came.get(rank, 0) + 1
            meeting = self._came[rank]
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: sum(count >= meeting for count in self._came.values()) == self._size, LIMIT
            ):
                raise RendezvousError("the others have not come")
            return self._stores.setdefault(meeting if self._fresh else 0, Store()), rank, self._size


class Store:
    """What all of torch's stores can do."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, LIMIT)
            return self._values[key].encode()

    def add(self, key: str, more: int) -> int:
        with self._changed:
            total = int(self._values.get(key, "0")) + more
            self._values[key] = str(total)
            return total


class Handler(RendezvousHandler):
    """A node's way to a place."""

    def __init__(self, place: Place, rank: int) -> None:
        self._place = place
        self._rank = rank

    def next_rendezvous(self) -> tuple[Any, int, int]:
        return self._place.meet(self._rank)

    def num_nodes_waiting(self) -> int:
        return self._place.waiting


class Node:
    """One node, and what it was told."""

    def __init__(self, inner: PolledNode) -> None:
        self.inner = inner
        self.epoch = EpochRecord(number=0)
        self.serves_store = False

    async def told(self) -> EpochBegan | RunEnded:
        async with asyncio.timeout(LIMIT):
            event = await self.inner.events.get()
        assert isinstance(event, EpochBegan | RunEnded)
        if isinstance(event, EpochBegan):
            self.epoch = event.record
            self.serves_store = event.store is not None
            if event.store is not None:
                event.store.close()
        return event

    async def began(self) -> EpochRecord:
        event = await self.told()
        assert isinstance(event, EpochBegan)
        return event.record

    async def ended(self) -> OutcomeRecord:
        event = await self.told()
        assert isinstance(event, RunEnded)
        return event.record

    def fails(self, *, final: bool = False) -> None:
        failure = FailureRecord(
            epoch=self.epoch.number, rank=0, local_rank=0, node=self.inner.node, exit_code=1, message="no", final=final
        )
        self.inner.report(self.epoch.number, failure=failure)

    def succeeds(self) -> None:
        self.inner.report(self.epoch.number, phase=NodePhase.DONE)


class Nodes:
    """Makes nodes, and closes them."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def open(self, handler: Any, name: str, **settings: Any) -> Node:
        rules = {"workers": 2, "max_restarts": 1, "interval": 0.01, "patience": LIMIT, "address": "127.0.0.1"}
        return Node(
            await self._stack.enter_async_context(
                PolledNode(handler, PolledSettings(**{**rules, **settings}), node=name)
            )
        )

    async def two(self, place: Place, **settings: Any) -> list[Node]:
        nodes = [await self.open(Handler(place, rank), name, **settings) for rank, name in enumerate("ab")]
        await asyncio.gather(*(node.began() for node in nodes))
        return nodes

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    opened = Nodes()
    yield opened
    await opened.close()


async def test_nodes_agree_on_one_epoch_in_the_order_of_the_handlers_ranks(nodes: Nodes) -> None:
    a, b = await nodes.two(Place(2), workers=3)
    assert a.epoch == b.epoch
    assert a.epoch.nodes == ("a", "b")
    assert (a.epoch.number, a.epoch.world_size, a.epoch.restarts) == (1, 6, 0)
    assert a.epoch.store.startswith("127.0.0.1:")
    assert (a.serves_store, b.serves_store) == (True, False)


async def test_the_first_node_serves_the_store_where_it_was_told_to(nodes: Nodes) -> None:
    [port] = free_ports(1)
    node = await nodes.open(Handler(Place(1), 0), "a", store_host="node-a", store_port=port)
    assert (await node.began()).store == f"node-a:{port}"
    assert node.serves_store


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_failure_counts_once_for_the_run_whoever_noticed_it(nodes: Nodes, *, fresh: bool) -> None:
    pair = await nodes.two(Place(2, fresh=fresh), max_restarts=2)
    for number in (2, 3):
        for node in pair:
            node.fails()
        epochs = await asyncio.gather(*(node.began() for node in pair))
        assert epochs[0] == epochs[1]
        assert (epochs[0].number, epochs[0].restarts) == (number, number - 1)
        assert epochs[0].cause == "rank 0 on a: no"


async def test_when_no_restart_is_left_the_run_has_failed_with_the_failure(nodes: Nodes) -> None:
    node = await nodes.open(Handler(Place(1), 0), "a")
    await node.began()
    node.fails()
    await node.began()
    node.fails()
    outcome = await node.ended()
    assert (outcome.state, outcome.restarts, outcome.epoch) == (OutcomeState.FAILED, 1, 2)
    assert outcome.message == "rank 0 on a: no; no restart is left of the 1 that it may have"
    assert outcome.failure is not None


async def test_a_failure_that_is_final_ends_the_run_whatever_is_left(nodes: Nodes) -> None:
    node = await nodes.open(Handler(Place(1), 0), "a", max_restarts=9)
    await node.began()
    node.fails(final=True)
    assert "trying again is no use" in (await node.ended()).message


async def test_the_run_has_succeeded_when_the_workers_of_all_nodes_have(nodes: Nodes) -> None:
    a, b = await nodes.two(Place(2))
    a.succeeds()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await a.told()
    b.succeeds()
    assert [(await node.ended()).state for node in (a, b)] == [OutcomeState.SUCCEEDED] * 2


async def test_a_node_that_is_done_does_not_wait_for_the_others_for_ever(nodes: Nodes) -> None:
    a, _ = await nodes.two(Place(2), patience=0.05)
    a.succeeds()
    assert (await a.ended()).state is OutcomeState.SUCCEEDED


async def test_a_node_that_is_done_meets_the_others_again_when_they_do(nodes: Nodes) -> None:
    place = Place(2)
    a, b = await nodes.two(place)
    a.succeeds()
    b.fails()
    place.waiting = 1  # as a handler says that has been asked for the next rendezvous
    assert (await a.began()).members == ()
    assert (await a.began()).number == 2
    place.waiting = 0


async def test_when_somebody_waits_the_workers_are_stopped_before_the_nodes_meet_again(nodes: Nodes) -> None:
    place = Place(1)
    node = await nodes.open(Handler(place, 0), "a")
    first = await node.began()
    assert await node.inner.stands(1)
    place.waiting = 1
    between = await node.began()
    assert (between.number, between.members) == (1, ())
    assert not await node.inner.stands(1)
    place.waiting = 0
    second = await node.began()
    assert (second.number, second.nodes, second.restarts) == (2, first.nodes, 0)


async def test_what_is_said_of_an_epoch_that_is_over_is_dropped(nodes: Nodes) -> None:
    node = await nodes.open(Handler(Place(1), 0), "a", max_restarts=0)
    await node.began()
    node.inner.report(0, failure=FailureRecord(epoch=0, rank=0, local_rank=0, node="a", exit_code=1))
    node.succeeds()
    assert (await node.ended()).state is OutcomeState.SUCCEEDED


class Odd(RendezvousHandler):
    """Returns something, or raises it."""

    def __init__(self, returned: object) -> None:
        self._returned = returned

    def next_rendezvous(self) -> Any:
        if isinstance(self._returned, BaseException):
            raise self._returned
        return self._returned


@pytest.mark.parametrize("met", [None, (), (Store(), 1), (Store(), 1, 1), (Store(), -1, 1), (Store(), "0", "1")])
async def test_a_handler_that_returns_nonsense_is_told_so(nodes: Nodes, met: object) -> None:
    node = await nodes.open(Odd(met), "a")
    with pytest.raises(RendezvousStateError, match=r"next_rendezvous\(\) has to return \(store, rank, world size\)"):
        await node.inner.failed


@pytest.mark.parametrize("met", [(Store(), 0, 1), RendezvousInfo(Store(), 0, 1)])  # type: ignore[arg-type]
async def test_a_tuple_is_taken_as_well_as_an_info(nodes: Nodes, met: object) -> None:
    node = await nodes.open(Odd(met), "a")
    assert (await node.began()).world_size == 2


@pytest.mark.parametrize("error", [LookupError("nowhere"), SystemExit(3)])
async def test_what_a_handler_raises_is_the_nodes_error(nodes: Nodes, error: BaseException) -> None:
    node = await nodes.open(Odd(error), "a")
    with pytest.raises((LookupError, RendezvousError), match=r"nowhere|SystemExit\(3\)"):
        await node.inner.failed
    assert node.inner.error is not None


async def test_a_handler_that_never_returns_holds_up_nobody(nodes: Nodes) -> None:
    gate = threading.Event()

    class Endless(RendezvousHandler):
        def next_rendezvous(self) -> Any:
            gate.wait(LIMIT)
            raise RendezvousError("at last")

    await nodes.open(Endless(), "a")
    async with asyncio.timeout(LIMIT / 2):
        await nodes.close()
    gate.set()


async def test_what_a_call_has_returned_when_it_is_given_up_is_cleared_away() -> None:
    calls, cleared, given = _CallingThread(), list[int](), threading.Event()
    calls.start()
    waiting = asyncio.create_task(calls.do(lambda: 7, cleared.append))
    await asyncio.sleep(0)  # it asks
    calls._queue.put(given.set)
    assert given.wait(LIMIT)
    await asyncio.sleep(0)  # it has its answer, and has not gone on yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    calls.stop()
    assert cleared == [7]
