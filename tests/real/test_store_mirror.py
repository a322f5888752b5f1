"""The operator's mirror of a run's store, and the removal of the run's keys, on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from typing import TYPE_CHECKING

import msgspec
import pytest

from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.store_mirror import StoreMirror, store_at
from torchelastic.errors import StoreError
from torchelastic.protocol import (
    HistoryRecord,
    NodeRecord,
    PastRound,
    RoundRecord,
    RunKeys,
    RunState,
    SizeRecord,
    StateRecord,
    TimeBreakdown,
    encode,
    run_lease,
)
from torchelastic.store import StoreSettings, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.etcd import EtcdServer
    from torchelastic.store import Store

pytestmark = pytest.mark.real

PATIENCE = 90.0
SIZE = SizeRecord(min=1, max=8, desired=1)


@pytest.fixture
def run_id() -> str:
    return str(uuid.uuid4())


class Watched:
    """A mirror that runs within the block.

    Attributes:
        mirror: the mirror.
        changes: the number of changes that it reported.
        said: its messages about an unreachable store.
    """

    def __init__(self, run_id: str, *, remembered: int = 1000) -> None:
        self._happened = asyncio.Event()
        self.changes = 0
        self.said: list[str] = []
        self.mirror = StoreMirror(run_id, changed=self._changed, away=self._away, remembered=remembered)

    def _changed(self) -> None:
        self.changes += 1
        self._happened.set()

    def _away(self, sentence: str) -> None:
        self.said.append(sentence)
        self._happened.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not true():
                self._happened.clear()
                await self._happened.wait()

    @contextlib.asynccontextmanager
    async def follows(self, settings: Callable[[], StoreSettings]) -> AsyncIterator[StoreMirror]:
        task = asyncio.create_task(self.mirror.run(settings, None))
        try:
            yield self.mirror
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()


@contextlib.asynccontextmanager
async def reached(etcd: EtcdServer) -> AsyncIterator[Store]:
    store = await connect(etcd.settings)
    try:
        yield store
    finally:
        await store.close()


def node(name: str) -> bytes:
    return encode(NodeRecord(name=name, address="10.0.0.1", workers=1, size=SIZE))


@pytest.mark.parametrize(
    ("written", "protocol", "endpoints"),
    [
        ("etcd", "http", ("etcd:2379",)),
        ("http://a:1/", "http", ("a:1",)),
        ("https://a,https://[::1]:9", "https", ("a:2379", "[::1]:9")),
    ],
)
def test_the_operator_reads_an_endpoint_as_the_agents_do(
    written: str, protocol: str, endpoints: tuple[str, ...]
) -> None:
    assert store_at(written) == StoreSettings(endpoints=endpoints, protocol=protocol)


async def test_reports_about_the_past_are_read_and_wake_no_node(etcd: EtcdServer, run_id: str) -> None:
    keys = RunKeys.of(run_id)
    split = TimeBreakdown(until=1_700_000_000.5, seconds={RunState.TRAINING: 7.25}, joined=2)
    history = HistoryRecord(created=1_700_000_000.0, rounds=(PastRound(number=1, began=1_700_000_000.0, nodes=2),))
    watched = Watched(run_id)
    async with reached(etcd) as store, watched.follows(lambda: etcd.settings) as mirror:
        await watched.until(lambda: mirror.readable)
        before = watched.changes
        for _ in range(3):
            await store.put(keys.time_breakdown, encode(split))
            await store.put(keys.history, encode(history))
        await store.put(keys.state, encode(StateRecord(RoundRecord(number=1))))
        await watched.until(lambda: mirror.round is not None)
        assert (mirror.time_breakdown, mirror.history) == (split, history)
        assert watched.changes == before + 1
        await store.put(keys.time_breakdown, b"nonsense")
        await store.delete(keys.history)
        await store.put(keys.state, encode(StateRecord(RoundRecord(number=2))))
        await watched.until(lambda: mirror.round == RoundRecord(number=2))
        assert (mirror.time_breakdown, mirror.history) == (None, None)


async def test_the_operator_reads_a_store_at_every_form_of_endpoint(etcd: EtcdServer, run_id: str) -> None:
    written = "etcd:99999"
    watched = Watched(run_id)
    async with watched.follows(lambda: store_at(written)) as mirror:
        await watched.until(lambda: bool(watched.said))
        assert "a port is a number from 1 to 65535" in watched.said[0]
        written = f"http://{etcd.endpoint}/"
        await watched.until(lambda: mirror.readable)


async def test_progress_wakes_no_peer_but_every_other_change_does(etcd: EtcdServer, run_id: str) -> None:
    keys = RunKeys.of(run_id)
    record = NodeRecord(name="a", address="10.0.0.1", workers=1, size=SIZE)
    watched = Watched(run_id)
    async with reached(etcd) as store, watched.follows(lambda: etcd.settings) as mirror:
        await store.put(keys.node("a.1"), encode(record))
        await watched.until(lambda: mirror.nodes == {"a.1": record})
        before = watched.changes
        for kept in (10.0, 20.0):
            await store.put(
                keys.node("a.1"), encode(msgspec.structs.replace(record, first_step_at=5.0, last_checkpoint_at=kept))
            )
        told = msgspec.structs.replace(record, first_step_at=5.0, last_checkpoint_at=20.0, round=1)
        await store.put(keys.node("a.1"), encode(told))
        await watched.until(lambda: mirror.nodes == {"a.1": told})
        assert watched.changes == before + 1


async def test_the_keys_of_a_run_are_removed_even_if_its_lease_is_lost(etcd: EtcdServer, run_id: str) -> None:
    watched, keys = Watched(run_id), RunKeys.of(run_id)
    async with reached(etcd) as store, watched.follows(lambda: etcd.settings) as mirror:
        await watched.until(lambda: mirror.readable)
        await mirror.write_size(SIZE)
        await store.put(keys.node("a.1"), node("a"))
        await store.revoke(run_lease(run_id))
        await mirror.forget_run()
        assert (await store.list(keys.root)).entries == ()


async def test_a_store_outage_during_cleanup_is_reported(own_etcd: EtcdServer, run_id: str) -> None:
    watched = Watched(run_id)
    async with watched.follows(lambda: own_etcd.settings) as mirror:
        await mirror.forget_run()  # before it was ever reached, there is nothing to forget
        await watched.until(lambda: mirror.readable)
        own_etcd.pause()
        forgetting = asyncio.create_task(mirror.forget_run())
        await asyncio.sleep(0)
        await own_etcd.kill()
        with pytest.raises(StoreError):
            await asyncio.wait_for(forgetting, PATIENCE)


async def test_the_names_of_recent_nodes_are_kept(etcd: EtcdServer, run_id: str) -> None:
    watched, keys = Watched(run_id, remembered=4), RunKeys.of(run_id)
    async with reached(etcd) as store, watched.follows(lambda: etcd.settings) as mirror:
        await watched.until(lambda: mirror.readable)
        for number in range(30):
            await store.put(keys.node(f"n{number}.1"), node(f"n{number}"))
            await store.delete(keys.node(f"n{number}.1"))
        await store.put(keys.node("last.1"), node("last"))
        await watched.until(lambda: "last.1" in mirror.names)
        assert mirror.names.keys() == {"n27.1", "n28.1", "n29.1", "last.1"}


async def test_a_lasting_store_outage_is_reported_on_the_job(own_etcd: EtcdServer, run_id: str) -> None:
    woken = asyncio.Event()
    await own_etcd.kill()
    async with asyncio.timeout(PATIENCE), JobStores(lambda _: woken.set(), patience=0.0) as stores:
        mirror = stores.follow(run_id, "default/digits", own_etcd.endpoint, lasts=True, up=True)
        await woken.wait()
        assert own_etcd.endpoint in (stores.error(run_id) or "")
        await own_etcd.start()
        while not mirror.readable:
            woken.clear()
            await woken.wait()
        assert stores.error(run_id) is None


async def test_an_internal_error_while_leaving_is_logged_and_does_not_stop_other_steps(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = asyncio.Event()

    async def broken(_: StoreMirror) -> None:
        left.set()
        raise AttributeError("a defect")

    monkeypatch.setattr(StoreMirror, "forget_run", broken)
    with caplog.at_level(logging.ERROR), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with asyncio.timeout(PATIENCE), JobStores(lambda _: None) as stores:
            stores.follow(run_id, "default/digits", endpoint, lasts=True, up=True)
            stores.leave(run_id)
            await left.wait()
            stores.follow("another", "default/another", endpoint, lasts=True, up=True)
            assert stores.uids_of("default/another") == ("another",)
    assert "an unexpected error while its keys were removed" in caplog.text


async def test_a_hanging_store_is_waited_for_a_moment_and_gets_the_size_later(etcd: EtcdServer, run_id: str) -> None:
    woken = asyncio.Event()
    async with asyncio.timeout(PATIENCE), JobStores(lambda _: woken.set()) as stores:
        mirror = stores.follow(run_id, "team/digits", etcd.endpoint, lasts=True, up=True)
        while not mirror.readable:
            await woken.wait()
            woken.clear()
        with etcd.paused(), pytest.raises(StoreError, match="has not answered"):
            await stores.write_size(run_id, SIZE)
        later = SizeRecord(min=1, max=8, desired=1, generation=203)
        await stores.write_size(run_id, later)
        while mirror.size != later:
            await woken.wait()
            woken.clear()
