"""A node that reaches neither the store nor its peers stops its workers; a node that reaches either continues."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.nodes import PATIENCE, Clients, Meeting, all_with
from torchelastic.protocol import NodePhase
from torchelastic.rendezvous.peer_connection import Verdict

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


async def test_a_node_whose_leader_answers_a_later_probe_is_not_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        a, b = [await meeting.node(name, wanted=2) for name in "ab"]
        await all_with(a, b)
        member = b if a.inner.is_leader else a
        probes = asyncio.Queue[float]()

        async def probe(_address: str, *, timeout: float, **_: object) -> Verdict:  # noqa: ASYNC109
            probes.put_nowait(timeout)
            return Verdict.SILENT if probes.qsize() == 1 else Verdict.ALIVE

        monkeypatch.setattr("torchelastic.rendezvous.leader_election.probe", probe)
        clients.reach(False)
        async with asyncio.timeout(PATIENCE):
            while probes.qsize() < 3:
                await member.inner.run.changed.after(member.inner.run.changed.count, timeout=LEASE)
        member.drain()
        assert not member.partitioned
        assert {probes.get_nowait() for _ in range(3)} == {LEASE}


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
