"""New nodes: leaders that exclude dead members and wait for members that return; nodes that cannot join."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from tests.support.nodes import Clients, Meeting, all_with
from tests.support.ports import free_range
from torchelastic.config.settings import RendezvousSettings
from torchelastic.errors import StoreRefused
from torchelastic.protocol import Member, NodeRecord, RoundRecord, RunKeys, SizeRecord, StateRecord, encode
from torchelastic.rendezvous.node import RendezvousNode
from torchelastic.store import MemoryStore

LEASE = 1.5


async def test_new_nodes_exclude_a_dead_member_whose_key_still_exists() -> None:
    async with Meeting(Clients().connect, "run", lease=LEASE, last_call_timeout=0.2, unique_run=True) as meeting:
        a, b = [await meeting.node(name) for name in "ab"]
        first = await all_with(a, b)
        leader, other = (a, b) if a.inner.is_leader else (b, a)
        await asyncio.gather(leader.inner.election.leave(), other.crash())
        await leader.crash()

        c, d = [await meeting.node(name) for name in "cd"]
        round = await all_with(c, d)
        for node in (c, d):
            # On a busy machine one dead member may be found a moment after the other, and then leaves one round later.
            *between, last = [record.nodes for record in node.rounds if record.number > first.number]
            assert last == round.nodes
            assert between in ([], *([(dead.inner.node, *last)] for dead in (leader, other)))


async def test_a_new_leader_waits_for_a_member_that_returns_late() -> None:
    clients, keys = Clients(), RunKeys.of("run")
    data = clients.data

    async def comes_back(name: str) -> None:
        size = SizeRecord(min=1, max=8)
        record = NodeRecord(name=name, address="127.0.0.1", workers=1, size=size, store=40000, round=4)
        await data.put(keys.node(f"{name}.1"), encode(record))

    # All leases have expired while the store was unavailable, and the members are reconnecting.
    members = (Member("a.1", "127.0.0.1", 1), Member("b.1", "127.0.0.1", 1))
    await data.put(keys.state, encode(StateRecord(RoundRecord(number=4, members=members, store="127.0.0.1:40000"))))
    async with Meeting(clients.connect, "run", lease=0.5, last_call_timeout=60.0) as meeting:
        c = await meeting.node("c")
        await c.inner.election.until_leader()
        await comes_back("b")
        while (leadership := c.inner.leader) is None:
            await c.inner.run.changed.after(c.inner.run.changed.count)
        while "b.1" not in leadership.membership.peers:
            await c.inner.run.changed.after(c.inner.run.changed.count)
        await comes_back("a")
        round = await c.until_with("a", "b", "c")
        assert (round.number, round.nodes[:2]) == (5, ("a.1", "b.1"))


async def test_a_node_that_gives_up_waiting_for_the_store_frees_its_ports() -> None:
    store = MemoryStore()
    store.reachable = False
    ports = free_range(2)
    size = SizeRecord(min=1, max=8)
    record = NodeRecord(name="a", address="127.0.0.1", workers=1, size=size)
    node = RendezvousNode(store, RendezvousSettings(run_id="run", size=size, ports=ports), node="a.1", record=record)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), node:
            pass
    for port in range(ports.first, ports.last + 1):
        with closing(socket.create_server(("127.0.0.1", port))):
            pass


async def test_a_refusal_at_startup_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise StoreRefused("etcd does not allow this user to use these keys: permission denied")

    monkeypatch.setattr(MemoryStore, "get", refuse)
    async with Meeting(Clients().connect, "run") as meeting:
        with pytest.raises(StoreRefused, match="permission denied"):
            await meeting.node("a")
