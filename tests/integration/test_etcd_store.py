"""The store on a real etcd with the API v3."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support import etcd_kinds
from tests.support.etcd import fake_etcd, http
from tests.support.etcd_conformance import EtcdBehavior
from tests.support.store_conformance import ended, read_changes, watching
from tests.support.tcp_proxy import TcpProxy
from torchelastic.errors import StoreUnavailable
from torchelastic.store import etcd_v3
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.etcd import EtcdServer


pytestmark = pytest.mark.integration


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=etcd_kinds.parameters(*etcd_kinds.V3))
async def each_etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EtcdServer]:
    """An etcd of each version."""
    async with request.param.server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class TestEtcdV3Store(EtcdBehavior):
    api = 3
    wrong_password = "does not accept the user name and password, or the secret of the run"
    denied = "permission denied"
    writes = 600

    async def require_authentication(self, server: EtcdServer) -> None:
        await server.require_authentication()

    async def test_an_expired_token_is_renewed(self, own_etcd: EtcdServer, prefix: str) -> None:
        await self.require_authentication(own_etcd)
        async with self.opened(own_etcd.settings, username="alice", password="s3cret") as store:
            await store.put(prefix + "a", b"")
            await own_etcd.kill()  # a restarted etcd has lost its tokens
            await own_etcd.start()
            await asyncio.gather(*(store.get(prefix + "a") for _ in range(10)))
            await own_etcd.kill()
            await own_etcd.start()
            async with watching(store, prefix) as watch:
                await store.put(prefix + "a", b"")
                assert len(await read_changes(watch, 1)) == 1

    @pytest.mark.parametrize("compacted", [False, True])
    async def test_a_watch_delivers_the_changes_that_a_silent_connection_lost_or_ends(
        self, etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch, compacted: bool
    ) -> None:
        monkeypatch.setattr(etcd_v3, "QUIET_CHECKS", 3)
        async with (
            TcpProxy(etcd.endpoint) as proxy,
            self.opened(etcd.settings) as direct,
            self.opened(etcd.settings, endpoints=(proxy.endpoint,), silence_limit=1) as store,
            watching(store, prefix) as watch,
        ):
            await direct.put(prefix + "1", b"")
            changes = await read_changes(watch, 1)
            proxy.fall_silent(new_too=False)
            lost = [await direct.put(prefix + number, b"") for number in "23"]
            if compacted:
                await etcd.post("kv/compaction", revision=lost[-1])
                await ended(watch)
                return
            changes += await read_changes(watch, 2)
            await direct.put(prefix + "4", b"")
            changes += await read_changes(watch, 1)
        assert [change.key for change in changes] == [prefix + number for number in "1234"]


async def test_a_watch_moves_to_another_server_if_the_first_server_refuses_watches() -> None:
    reads = http("200 OK", '{"header": {"cluster_id": "1", "revision": "7"}}')
    fails = http("503 Service Unavailable", "")
    watches = http("200 OK", '{"result": {"header": {"revision": "7"}, "created": true}}\n')
    async with (
        fake_etcd(lambda line: fails(line) if "/v3/watch" in line else reads(line)) as first,
        fake_etcd(lambda line: watches(line) if "/v3/watch" in line else reads(line)) as second,
    ):
        store = await connect(StoreSettings((first, second)))
        with pytest.raises(StoreUnavailable, match="status 503"):
            await anext(store.watch("/run/"))
        async with watching(store, "/run/"):
            pass
        await store.close()
