"""A node that reaches neither the store nor its peers stops its workers; a node that reaches either continues."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress

import pytest

from tests.support.nodes import PATIENCE, Clients, Meeting, all_with
from tests.support.views import SETTINGS
from torchelastic.protocol import NodePhase
from torchelastic.rendezvous.node import watch_for_partition
from torchelastic.rendezvous.peer_connection import Verdict
from torchelastic.rendezvous.run_state import RunStateWatch
from torchelastic.store import MemoryStore

LEASE = 0.4


@pytest.mark.parametrize("dying", ["a", "b"])
async def test_a_partitioned_node_stops_its_workers_and_rejoins_later(dying: str) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        nodes = {name: await meeting.node(name, wanted=2) for name in "ab"}
        await all_with(*nodes.values())
        (survivor,) = set("ab") - {dying}
        cut_off = clients.all["ab".index(survivor)]
        cut_off.reachable = False
        await nodes[dying].crash()
        await nodes[survivor].until(lambda node: node.partitioned)
        cut_off.reachable = True
        round = await all_with(nodes[survivor])
        assert round.number > 1
        assert round.restarts == 0


async def test_training_continues_without_the_store_and_a_new_node_joins_afterwards() -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE, last_call_timeout=0.5) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        clients.reach(False)
        for node in (a, b):
            await node.until_away()
        for node in (a, b):
            clients.data.expire(node.inner.registration.lease)
        clients.reach(True)
        c = await meeting.node("c")
        round = await all_with(a, b, c)
        assert (round.number, round.nodes[:2]) == (2, first.nodes)
        assert not a.partitioned
        assert not b.partitioned


async def test_a_node_whose_workers_have_exited_is_not_partitioned() -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        a, b = [await meeting.node(name, wanted=2) for name in "ab"]
        await all_with(a, b)
        leader, other = (a, b) if a.inner.is_leader else (b, a)
        await other.says(phase=NodePhase.DONE)
        clients.reach(False)
        await leader.crash()
        await asyncio.sleep(2 * LEASE)  # the lease has to expire
        other.drain()
        assert not other.partitioned


@pytest.mark.parametrize(
    ("answers", "partitioned"), [("nothing", True), ("the store", False), ("a peer, at the second probe", False)]
)
async def test_a_node_is_partitioned_after_repeated_probes_without_an_answer(answers: str, partitioned: bool) -> None:
    store = MemoryStore()
    store.reachable = answers == "the store"
    run = RunStateWatch("a.1", dataclasses.replace(SETTINGS, lease=LEASE), store)
    probes: list[float] = []

    async def reaches_a_peer(within: float) -> bool:
        probes.append(within)
        return answers.startswith("a peer") and len(probes) > 1

    seen = asyncio.Event()
    watching = asyncio.create_task(watch_for_partition(run, lambda: True, reaches_a_peer, partitioned=seen.set))
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE if partitioned else 3 * LEASE):
            await seen.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert seen.is_set() == partitioned
    assert set(probes) == {LEASE}


@pytest.mark.parametrize("answers", [True, False])
async def test_a_leader_without_the_store_asks_all_its_peers_at_once(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=600.0) as meeting:
        nodes = [await meeting.node(name, wanted=3) for name in "abc"]
        round = await all_with(*nodes)
        (leader,) = [node for node in nodes if node.inner.is_leader]
        mute, other = [node.inner.node for node in nodes if node is not leader]
        asked = set()
        both = asyncio.Event()

        async def probe(_address: str, *, peer: str, **_: object) -> Verdict:
            asked.add(peer)
            if len(asked) == 2:
                both.set()
            if peer == mute:
                await (asyncio.Event() if answers else both).wait()
            return Verdict.ALIVE if answers else Verdict.SILENT

        monkeypatch.setattr("torchelastic.rendezvous.leader.probe", probe)
        clients.reach(False)
        assert await leader.inner.is_current(round.number, timeout=PATIENCE) == answers
        assert asked == {mute, other}
