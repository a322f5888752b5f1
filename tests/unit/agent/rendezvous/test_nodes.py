"""Nodes of one run on a store in memory: partitions, lost data, new and paused nodes, another version."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from tests.support.nodes import TIMEOUT, Clients, NodeFactory, all_with
from tests.support.ports import free_range
from tests.support.views import failure
from torchelastic.config.settings import RendezvousSettings
from torchelastic.errors import StoreUnavailable
from torchelastic.protocol.codec import decode, decode_state, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import (
    PROTOCOL_VERSION,
    LeaderRecord,
    Member,
    NodePhase,
    NodeRecord,
    NoticeRecord,
    OutcomeState,
    RoundRecord,
    SizeRecord,
    StateRecord,
)
from torchelastic.rendezvous.node import RendezvousNode, RoundStarted, TCPStorePort
from torchelastic.rendezvous.peer_connection import ProbeResult
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests.support.nodes import TestNode
    from torchelastic.protocol.records import OutcomeRecord
    from torchelastic.store.api import Change, Listing, Store

KEYS = RunKeys("run")
LEASE = 0.4
OTHER = PROTOCOL_VERSION + 1
SUCCESSOR = LeaderRecord(node="b.9", address="127.0.0.1:1")
REQUESTS = 12
"""An upper bound on the requests that a leader sends from a failure to the end of the run."""


# -- partitions


@pytest.mark.parametrize("dying", ["a", "b"])
async def test_a_partitioned_node_stops_its_workers_and_rejoins_later(dying: str) -> None:
    clients = Clients()
    async with NodeFactory(clients.connect, "run", lease=LEASE) as factory:
        nodes = {name: await factory.node(name, wanted=2) for name in "ab"}
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
    async with NodeFactory(clients.connect, "run", lease=LEASE) as factory:
        a, b = [await factory.node(name, wanted=2) for name in "ab"]
        await all_with(a, b)
        leader, other = (a, b) if a.inner.is_leader else (b, a)
        await other.report(phase=NodePhase.DONE)
        clients.reach(False)
        await leader.crash()
        await asyncio.sleep(2 * LEASE)  # the lease has to expire
        other.drain()
        assert not other.partitioned


async def test_a_node_that_sees_the_store_again_during_an_unanswered_probe_is_not_partitioned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = Clients()
    async with NodeFactory(clients.connect, "run", lease=LEASE) as factory:
        a, b = [await factory.node(name, wanted=2) for name in "ab"]
        await all_with(a, b)
        member = b if a.inner.is_leader else a
        asked, given_up = asyncio.Event(), asyncio.Event()

        async def probe(_address: str, **_: object) -> ProbeResult:
            if asked.is_set():
                return ProbeResult.ALIVE
            asked.set()
            clients.reach(True)
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
            raise AssertionError

        monkeypatch.setattr("torchelastic.rendezvous.leader_election.probe", probe)
        monkeypatch.setattr("torchelastic.store.client.RETRY_MAX", LEASE / 10)
        clients.reach(False)
        async with asyncio.timeout(TIMEOUT):
            await given_up.wait()
        assert member.inner.run.unreachable_since is None
        await asyncio.sleep(LEASE / 10)
        member.drain()
        assert not member.partitioned


# -- new nodes


async def test_new_nodes_exclude_a_dead_member_whose_key_still_exists() -> None:
    async with NodeFactory(Clients().connect, "run", lease=1.5, last_call_timeout=0.2, unique_run=True) as factory:
        a, b = [await factory.node(name) for name in "ab"]
        first = await all_with(a, b)
        leader, other = (a, b) if a.inner.is_leader else (b, a)
        await asyncio.gather(leader.inner.election.leave(), other.crash())
        await leader.crash()

        c, d = [await factory.node(name) for name in "cd"]
        round = await all_with(c, d)
        for node in (c, d):
            # On a busy machine, one dead member may be detected after the other, and is then removed one round later.
            *between, last = [record.nodes for record in node.rounds if record.number > first.number]
            assert last == round.nodes
            assert between in ([], *([(dead.inner.node, *last)] for dead in (leader, other)))


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


# -- nodes of another version


async def test_a_node_waits_for_nodes_of_another_version_and_continues_after_their_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = Clients()
    data = clients.data
    old_lease = await data.grant(60)
    record = NodeRecord(name="old", address="127.0.0.1", workers=1, size=SizeRecord(min=1, max=8), protocol=OTHER)
    await data.put(KEYS.node("old.1"), encode(msgspec.structs.replace(record, round=4)), lease=old_lease)
    leader = LeaderRecord(node="old.1", address="127.0.0.1:1", protocol=OTHER)
    await data.put(KEYS.leader, encode(leader), lease=old_lease)
    await data.put(KEYS.state, b'{"round":{"number":4,"members":"in another form","protocol":%d}}' % OTHER)

    async with NodeFactory(clients.connect, "run", lease=LEASE, last_call_timeout=0.1, join_debounce=0.0) as factory:
        new = await factory.node("new")
        await new.until(lambda node: bool(node.rounds))
        assert (new.rounds[-1].number, new.rounds[-1].members) == (4, ())
        assert f"this process uses version {PROTOCOL_VERSION};" in new.rounds[-1].cause

        await data.revoke(old_lease)
        round = await new.until_with("new")
        assert (round.number, round.protocol) == (5, PROTOCOL_VERSION)
    assert "old.1 leads, and this node cannot take part" in caplog.text


# -- false records


async def test_false_numbers_of_a_stranger_do_not_prevent_scaling_or_the_next_round() -> None:
    clients = Clients()
    async with NodeFactory(clients.connect, "run", lease=LEASE, last_call_timeout=0.1, join_debounce=0.0) as factory:
        a = await factory.node("a", wanted=1)
        await a.until_with("a")
        false = SizeRecord(min=8, max=8, generation=2**53)
        stranger = NodeRecord("x", "127.0.0.1", 1, false, round=2**52, answered_notice=2**52, starting=True)
        await clients.data.put(KEYS.node("x.1"), encode(stranger))
        await clients.data.put(KEYS.size, encode(false))
        b = await factory.node("b", wanted=1)
        await clients.data.put(KEYS.size, encode(SizeRecord(min=2, max=2, desired=2, generation=1)))
        round = await all_with(a, b)
        assert round.number < 10
        state = msgspec.structs.replace(round, number=2**53)
        await clients.data.put(KEYS.state, encode(StateRecord(state)))
        c = await factory.node("c", wanted=1)
        await clients.data.put(KEYS.size, encode(SizeRecord(min=3, max=3, desired=3, generation=2)))
        round = await all_with(a, b, c)
        assert round.number < 10
        for node in (a, b, c):
            node.answers = True
            await node.report(notice=5.0)
        await clients.data.put(KEYS.notice, encode(NoticeRecord(round.number, 2**53)))
        d = await factory.node("d", wanted=1)
        await clients.data.put(KEYS.size, encode(SizeRecord(min=4, max=4, desired=4, generation=3)))
        assert (await a.until_noticed()).number < 10
        await all_with(a, b, c, d)


# -- a store that lost its data


async def all_workers_succeed(nodes: list[TestNode], number: int) -> None:
    for node in nodes:
        node.inner.report(number, phase=NodePhase.DONE)


async def a_worker_fails(nodes: list[TestNode], number: int) -> None:
    nodes[1].inner.report(number, failure=failure(nodes[1].name, number=number, message="the data are broken"))


async def outcome_of(node: TestNode) -> OutcomeRecord:
    await node.until(lambda node: node.outcome is not None)
    assert node.outcome is not None
    return node.outcome


@pytest.mark.parametrize(
    ("end", "state"),
    [(all_workers_succeed, OutcomeState.SUCCEEDED), (a_worker_fails, OutcomeState.FAILED)],
)
async def test_a_node_that_missed_a_lost_outcome_learns_it_from_the_other_nodes(
    end: Callable[[list[TestNode], int], Awaitable[None]], state: OutcomeState
) -> None:
    clients = Clients()
    async with NodeFactory(clients.connect, "run", lease=LEASE, last_call_timeout=0.2, max_restarts=0) as factory:
        nodes = [await factory.node(name, wanted=2) for name in "ab"]
        round = await all_with(*nodes)
        late = nodes[1] if nodes[0].inner.is_leader else nodes[0]
        (first,) = set(nodes) - {late}
        if state is OutcomeState.SUCCEEDED:
            await late.report(phase=NodePhase.DONE)
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
        if prefix == KEYS.control:
            self.was_listed.set()
        return dataclasses.replace(listing, cluster_id=self.cluster_id)


@pytest.mark.parametrize("cluster_id", ["1", "", "2"])
async def test_a_node_offers_another_port_to_another_cluster(cluster_id: str) -> None:
    store = NamedCluster()

    async def connect() -> Store:
        return store

    async def offered() -> int:
        [entry] = (await data.list(KEYS.nodes)).entries
        return decode(entry.value, NodeRecord).tcp_store_port

    data = store.another()
    async with NodeFactory(connect, "run", lease=600.0, last_call_timeout=0.2) as factory:
        node = await factory.node("a", wanted=1)
        await all_with(node)
        await node.inner.registration.flush()
        before = await offered()
        store.was_listed.clear()
        store.cluster_id = cluster_id
        store.reachable = False
        store.reachable = True
        async with asyncio.timeout(TIMEOUT):
            await store.was_listed.wait()
        await asyncio.sleep(0.01)
        await node.inner.registration.flush()
        assert (await offered() != before) == (cluster_id == "2")


def test_a_port_that_a_missed_round_may_have_used_is_not_offered_again() -> None:
    with closing(TCPStorePort("127.0.0.1", None)) as offer:
        first = offer.port
        elsewhere = RoundRecord(number=1, tcp_store="127.0.0.2:1")
        assert offer.take(elsewhere, is_member=True) is None
        assert offer.port == first, "no round has used it"
        assert offer.take(msgspec.structs.replace(elsewhere, number=3), is_member=True) is None
        second = offer.port
        assert second != first
        own = RoundRecord(number=4, tcp_store=f"127.0.0.1:{second}")
        with closing(cast("socket.socket", offer.take(own, is_member=True))) as listener:
            assert listener.getsockname()[1] == second
            assert offer.port not in {first, second}


class LateNodes:
    """A client whose watch of the nodes breaks later than its other watches."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.notices_loss = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        try:
            async for batch in self._store.watch(prefix):
                yield batch
        except StoreUnavailable:
            if prefix == KEYS.nodes:
                await self.notices_loss.wait()
            raise


async def test_a_round_after_the_loss_of_all_data_has_a_tcp_store() -> None:
    data = MemoryStore()
    clients = []

    async def connect() -> Store:
        clients.append(LateNodes(data.another()))
        return cast("Store", clients[-1])

    async with NodeFactory(connect, "run", lease=LEASE) as factory:
        nodes = [await factory.node(name, wanted=2) for name in "ab"]
        await all_with(*nodes)
        await asyncio.gather(*(node.inner.registration.flush() for node in nodes))
        data.wipe()
        await data.put(KEYS.size, encode(SizeRecord(min=1, max=8, generation=2, desired=1)))
        await asyncio.gather(*(node.until(lambda node: len(node.rounds) == 2) for node in nodes))
        assert {len(node.members) for node in nodes} == {1}
        assert [node.serves for node in nodes if node.name in node.members] == [True]
        for client in clients:
            client.notices_loss.set()


# -- paused leaders


class PausedStore:
    """A store client that pauses before one of its requests until it is resumed."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._left: int | None = None
        self._running = asyncio.Event()
        self._running.set()
        self.paused = asyncio.Event()

    def pause_before(self, request: int) -> None:
        self._left = request

    def resume(self) -> None:
        self._left = None
        self._running.set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def request(*args: Any, **options: Any) -> Any:
            if self._left is not None:
                self._left -= 1
                if self._left < 0 and not self.paused.is_set():
                    self.paused.set()
                    self._running.clear()
            await self._running.wait()
            return await method(*args, **options)

        return request

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        async for batch in self._store.watch(prefix):
            await self._running.wait()
            yield batch

    async def close(self) -> None:
        await self._store.close()


async def state_of(store: Store) -> StateRecord:
    entry = await store.get(KEYS.state)
    return StateRecord() if entry is None else decode_state(entry.value)


async def take_over(data: MemoryStore, before: RoundRecord) -> bool:
    """Commit the next round as the paused leader's successor; return False if the state has changed."""
    leader, state = await data.get(KEYS.leader), await data.get(KEYS.state)
    assert leader is not None
    assert state is not None
    await data.put(KEYS.leader, encode(SUCCESSOR))
    if decode_state(state.value) != StateRecord(before):
        return False
    member = Member("b.9", "127.0.0.1", 1)
    after = RoundRecord(before.number + 1, "successor", (member,), "127.0.0.1:1", restarts=1)
    return await data.compare_and_swap(KEYS.state, encode(StateRecord(after)), expected=state.mod_revision) is not None


def fail(node: TestNode, number: int, *, final: bool) -> None:
    node.inner.report(number, failure=failure(node.name, number=number, final=final))


def succeed(node: TestNode, number: int) -> None:
    node.inner.report(number, phase=NodePhase.DONE)


@pytest.mark.parametrize("what", ["it fails", "a worker fails", "it succeeds"])
async def test_a_paused_leader_changes_nothing_after_its_successor(what: str) -> None:
    was_paused = []
    for request in range(REQUESTS):
        data = MemoryStore()
        store = PausedStore(data.another())

        async def connect(store: PausedStore = store) -> Store:
            return store

        async with NodeFactory(connect, "run", lease=600.0, unique_run=True) as factory:
            a = await factory.node("a", wanted=1)
            first = await all_with(a)
            await a.inner.registration.flush()
            store.pause_before(request)
            if what == "it succeeds":
                succeed(a, first.number)
            else:
                fail(a, first.number, final=what == "it fails")
            next_event = asyncio.create_task(a.inner.events.get())
            paused = asyncio.create_task(store.paused.wait())
            async with asyncio.timeout(TIMEOUT):
                await asyncio.wait((next_event, paused), return_when=asyncio.FIRST_COMPLETED)
            if took_over := store.paused.is_set() and await take_over(data, first):
                was_paused.append(request)
                committed = await state_of(data)
            store.resume()
            async with asyncio.timeout(TIMEOUT):
                event = await next_event
            if isinstance(event, RoundStarted) and event.tcp_store_listener is not None:
                event.tcp_store_listener.close()
            if took_over:
                assert event.record == committed.round  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
                assert await state_of(data) == committed
            paused.cancel()
    assert len(was_paused) >= 2
