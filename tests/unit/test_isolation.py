"""A node that reaches neither the store nor its peers must not train on by itself; one that reaches either goes on."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.nodes import PATIENCE, Clients, Meeting, all_with
from torchelastic.contract import NodePhase, RunKeys
from torchelastic.rendezvous.control import Control
from torchelastic.rendezvous.isolation import Isolation
from torchelastic.store import MemoryStore

LEASE = 0.4


@pytest.mark.parametrize("dying", ["a", "b"])
async def test_without_store_and_peers_the_workers_are_stopped_and_it_comes_back_later(dying: str) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        nodes = {name: await meeting.node(name, wanted=2) for name in "ab"}
        await all_with(*nodes.values())
        (left,) = set("ab") - {dying}
        cut_off = clients.all["ab".index(left)]
        cut_off.reachable = False
        await nodes[dying].crash()
        await nodes[left].until(lambda node: node.isolated)
        cut_off.reachable = True
        epoch = await all_with(nodes[left])
        assert epoch.number > 1
        assert epoch.restarts == 0


async def test_without_the_store_alone_training_goes_on_and_a_newcomer_is_taken_in_afterwards() -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, joining_window=0.5) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        clients.reach(False)
        for node in (a, b):
            await node.until_away()
        for node in (a, b):
            clients.data.expire(node.inner._session.lease)
        clients.reach(True)
        c = await meeting.node("c")
        epoch = await all_with(a, b, c)
        assert (epoch.number, epoch.nodes[:2]) == (2, first.nodes)
        assert not a.isolated
        assert not b.isolated


async def test_a_node_whose_workers_have_ended_waits_in_peace_though_it_reaches_nobody() -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        a, b = [await meeting.node(name, wanted=2) for name in "ab"]
        await all_with(a, b)
        leader, other = (a, b) if a.inner._leadership is not None else (b, a)
        await other.says(phase=NodePhase.DONE)
        clients.reach(False)
        await leader.crash()
        await asyncio.sleep(2 * LEASE)  # the passing of the lease's time is what this is about
        other.drain()
        assert not other.isolated


@pytest.mark.parametrize(
    ("answers", "told"), [("nobody", True), ("the store", False), ("a peer, at the second look", False)]
)
async def test_it_takes_more_than_one_look_and_neither_store_nor_peer_must_answer(answers: str, told: bool) -> None:
    store, keys = MemoryStore(), RunKeys.of("run")
    store.reachable = answers == "the store"
    control = Control(store, keys)
    looks: list[float] = []

    async def reaches_a_peer(within: float) -> bool:
        looks.append(within)
        return answers.startswith("a peer") and len(looks) > 1

    seen = asyncio.Event()
    isolation = Isolation(store, keys, control, LEASE, matters=lambda: True, reaches_a_peer=reaches_a_peer)
    watching = asyncio.create_task(isolation.watch(seen.set))
    try:
        async with asyncio.timeout(PATIENCE if told else 3 * LEASE):
            await seen.wait()
    except TimeoutError:
        pass
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert seen.is_set() == told
    assert set(looks) == {LEASE}
