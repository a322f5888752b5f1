"""Tests of every etcd adapter for failures of servers and the network, to be inherited.

The module of the inheriting class has the fixtures ``etcd`` (a shared server), ``own_etcd`` (one for one test) and
``prefix``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tests.support.store_conformance import HANGS, confirmed, ended, seen
from tests.support.tcp_proxy import TcpProxy
from torchelastic.errors import HistoryCompacted, LeaseLost, StoreUnavailable
from torchelastic.store import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.etcd import EtcdServer
    from torchelastic.store import Change, StoreSettings
    from torchelastic.store.etcd_v2 import EtcdV2Store
    from torchelastic.store.etcd_v3 import EtcdV3Store

    EtcdStore = EtcdV2Store | EtcdV3Store


class EtcdFaults:
    """Tests to be inherited.

    Attributes:
        adapter: creates a store.
        start: the revision at which a watch of a new server begins.
        watching: bytes that a watching client sends.
        without_data: the error of a watch when its server comes back without its data.
        writers: the number of concurrent writers while the server is killed.
        writes: the number of writes of each.
        kill_after: the number of watched changes after which the server is killed.
    """

    adapter: ClassVar[type[EtcdStore]]
    start: ClassVar[int]
    watching: ClassVar[bytes]
    without_data: ClassVar[tuple[type[Exception], ...]]
    writers: ClassVar[int]
    writes: ClassVar[int]
    kill_after: ClassVar[tuple[int, ...]]

    @contextlib.asynccontextmanager
    async def opened(self, settings: StoreSettings, **changes: Any) -> AsyncIterator[EtcdStore]:
        """A store for the length of a block."""
        store = self.adapter(dataclasses.replace(settings, **changes))
        try:
            yield store
        finally:
            await store.close()

    async def test_another_server_is_asked_where_one_does_not_listen(self, etcd: EtcdServer, prefix: str) -> None:
        store = await connect(dataclasses.replace(etcd.settings, endpoints=("127.0.0.1:1", etcd.endpoint)))
        assert isinstance(store, self.adapter)
        lease = await store.grant(60)
        revision = await store.put(prefix + "a", b"", lease=lease)
        async with contextlib.aclosing(store.watch(prefix, revision)) as watch:
            await confirmed(watch)
            assert len(await seen(watch, 1)) == 1
        await store.close()

    async def test_another_server_is_asked_where_one_hangs(
        self, etcd: EtcdServer, own_etcd: EtcdServer, prefix: str
    ) -> None:
        endpoints = (own_etcd.endpoint, etcd.endpoint)
        async with self.opened(etcd.settings, endpoints=endpoints, request_timeout=3.0) as store:
            with own_etcd.paused():
                assert await store.get(prefix + "a") is None
                await store.put(prefix + "a", b"")  # the server that hung is now the last in the order
                assert await store.get(prefix + "a") is not None

    async def test_a_server_that_hangs_is_told_within_the_time_limit(self, own_etcd: EtcdServer, prefix: str) -> None:
        async with self.opened(own_etcd.settings, request_timeout=1.5) as store, asyncio.timeout(HANGS):
            await store.put(prefix + "a", b"")
            with own_etcd.paused():
                for ask in (store.get(prefix + "a"), store.put(prefix + "a", b""), store.check()):
                    with pytest.raises(StoreUnavailable, match=r"gave no answer within 1\.5 seconds"):
                        await ask
            assert await store.get(prefix + "a") is not None

    async def test_a_watch_of_a_server_that_stands_still_ends(self, own_etcd: EtcdServer, prefix: str) -> None:
        async with (
            self.opened(own_etcd.settings, silence_limit=1.5) as store,
            contextlib.aclosing(store.watch(prefix, self.start)) as watch,
        ):
            await confirmed(watch)
            with own_etcd.paused(), pytest.raises(StoreUnavailable):
                await ended(watch)

    async def test_a_quiet_watch_says_that_it_is_alive_and_goes_on(self, etcd: EtcdServer, prefix: str) -> None:
        async with self.opened(etcd.settings, silence_limit=2) as store:
            last = await store.put(prefix + "a", b"")
            async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch, asyncio.timeout(HANGS):
                for _ in range(2):
                    assert await anext(watch) == ()
                await store.put(prefix + "b", b"")
                assert [change.key for change in await seen(watch, 1)] == [prefix + "b"]

    async def test_a_watch_of_a_server_that_stops_in_order_ends(self, own_etcd: EtcdServer, prefix: str) -> None:
        async with (
            self.opened(own_etcd.settings) as store,
            contextlib.aclosing(store.watch(prefix, self.start)) as watch,
        ):
            await confirmed(watch)
            await own_etcd.stop()
            with pytest.raises(StoreUnavailable):
                await ended(watch)

    async def test_a_watch_whose_connection_is_cut_ends(self, etcd: EtcdServer, prefix: str) -> None:
        async with TcpProxy(etcd.endpoint) as proxy, self.opened(etcd.settings, endpoints=(proxy.endpoint,)) as store:
            last = await store.put(prefix + "a", b"")
            async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
                await confirmed(watch)
                ending = asyncio.create_task(ended(watch))
                await proxy.until_sent(self.watching)
                proxy.cut()
                with pytest.raises(StoreUnavailable, match=proxy.endpoint):
                    await ending

    async def test_a_watch_whose_line_falls_silent_ends(self, etcd: EtcdServer, prefix: str) -> None:
        async with (
            TcpProxy(etcd.endpoint) as proxy,
            self.opened(etcd.settings, endpoints=(proxy.endpoint,), silence_limit=1.5) as store,
        ):
            last = await store.put(prefix + "a", b"")
            async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
                await confirmed(watch)
                proxy.fall_silent()
                with pytest.raises(StoreUnavailable):
                    await ended(watch)

    async def test_nothing_is_lost_or_told_twice_over_kills_of_the_server(
        self, own_etcd: EtcdServer, prefix: str
    ) -> None:
        told: list[Change] = []
        due = [asyncio.Event() for _ in self.kill_after]

        async def read(store: EtcdStore, start: int) -> None:
            while not told or told[-1].key != prefix + "last":
                with contextlib.suppress(StoreUnavailable):
                    async with contextlib.aclosing(store.watch(prefix, start)) as watch:
                        async for changes in watch:
                            told.extend(changes)
                            start = told[-1].revision + 1 if told else start
                            for count, event in zip(self.kill_after, due, strict=True):
                                if len(told) >= count:
                                    event.set()
                            if told and told[-1].key == prefix + "last":
                                break
                await asyncio.sleep(0.01)  # as a caller backs off

        async def write(store: EtcdStore, writer: int) -> None:
            for index in range(self.writes):
                while True:
                    with contextlib.suppress(StoreUnavailable):
                        await store.put(f"{prefix}{writer}", str(index).encode())
                        break
                    await asyncio.sleep(0.01)

        async with self.opened(own_etcd.settings) as store, asyncio.timeout(3 * HANGS):
            first = await store.put(prefix + "first", b"") + 1
            reader = asyncio.create_task(read(store, first))
            async with asyncio.TaskGroup() as writers:
                for writer in range(self.writers):
                    writers.create_task(write(store, writer))
                for event in due:
                    await event.wait()
                    await own_etcd.kill()
                    await own_etcd.start()
            await store.put(prefix + "last", b"")
            await reader
            async with contextlib.aclosing(store.watch(prefix, first)) as watch:
                await confirmed(watch)
                truth = await seen(watch, len(told))
        assert len(told) > self.writers * self.writes
        assert told == truth
        assert truth[-1].key == prefix + "last"

    async def test_an_etcd_that_came_back_without_its_data_does_not_leave_a_watch_waiting(
        self, own_etcd: EtcdServer, prefix: str
    ) -> None:
        async with self.opened(own_etcd.settings) as store:
            lease = await store.grant(60)
            for index in range(10):
                last = await store.put(f"{prefix}{index}", b"", lease=lease)
            async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
                await confirmed(watch)
                await own_etcd.kill()
                own_etcd.wipe()
                await own_etcd.start()
                with pytest.raises(self.without_data):
                    await ended(watch)
            async with contextlib.aclosing(store.watch(prefix, last + 1)) as watch:
                with pytest.raises(HistoryCompacted, match="has lost its data"):
                    await ended(watch)
            with pytest.raises(LeaseLost):
                await store.keep_alive(lease)

    async def test_credentials_do_no_harm_where_nobody_asks_for_them(self, etcd: EtcdServer, prefix: str) -> None:
        async with self.opened(etcd.settings, username="alice", password="s3cret") as store:
            await store.check()
            assert await store.get(prefix + "a") is None
