"""The store on a real etcd with the API v2, and the peculiarities of v2."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from testbed.availability import EXHAUSTIVE
from tests.support import etcd_kinds
from tests.support.etcd import fake_etcd, http
from tests.support.etcd_conformance import EtcdBehavior
from tests.support.store_conformance import HANGS, ended, read_changes, watching
from torchelastic.errors import StoreRefused, StoreUnavailable
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import RunLease, connect
from torchelastic.store.etcd_v2 import EtcdV2Store
from torchelastic.store.etcd_v3 import EtcdV3Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Store

pytestmark = pytest.mark.integration

V2 = etcd_kinds.V2[0]
HISTORY = 1000
"""The number of changes that etcd v2 keeps."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=etcd_kinds.parameters(*(etcd_kinds.V2 if EXHAUSTIVE else etcd_kinds.V2[:1])),
)
async def etcd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdServer]:
    """An etcd with the API v2 that the tests share."""
    async with request.param.server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest_asyncio.fixture
async def own_etcd(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    """An etcd for one test."""
    async with V2.server(tmp_path) as server:
        yield server


@pytest.fixture
def each_etcd(etcd: EtcdServer) -> EtcdServer:
    """The server for the tests of every adapter."""
    return etcd


@pytest.fixture
async def store(etcd: EtcdServer) -> AsyncIterator[Store]:
    async with etcd.connected() as store:
        yield store


class TestEtcdV2Store(EtcdBehavior):
    api = 2
    wrong_password = denied = "does not accept the user name and password, or not for these keys"
    writes = 300

    async def require_authentication(self, server: EtcdServer) -> None:
        root = {"Authorization": aiohttp.encode_basic_auth("root", "s3cret")}

        async def ask(path: str, message: dict[str, Any] | None = None) -> None:
            async with session.put(f"{server.url}/v2/auth/{path}", json=message, headers=root) as response:
                assert response.status in {200, 201}, await response.text()

        keys, everything = ({"kv": {"read": [each], "write": [each]}} for each in ("/torchelastic/*", "/*"))
        async with aiohttp.ClientSession() as session:
            await ask("users/root", {"user": "root", "password": "s3cret"})
            await ask("roles/agents", {"role": "agents", "permissions": keys})
            await ask("users/alice", {"user": "alice", "password": "s3cret", "roles": ["agents"]})
            await ask("enable")
            await ask("roles/guest", {"role": "guest", "revoke": everything})


# The choice of the API


async def test_v3_is_preferred_if_both_apis_are_served_and_v2_can_be_requested(etcd: EtcdServer) -> None:
    for version, kind in ((None, EtcdV3Store), (3, EtcdV3Store), (2, EtcdV2Store)):
        store = await connect(dataclasses.replace(etcd.settings, version=version))
        await store.close()
        assert isinstance(store, kind)


async def test_a_v2_only_server_is_used_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "torchelastic")
    async with V2.server(tmp_path, args=["--enable-grpc-gateway=false"]) as server:
        store = await connect(dataclasses.replace(server.settings, version=None))
        await store.put("/a", b"")
        assert await store.get("/a") is not None
        await store.close()
        assert isinstance(store, EtcdV2Store)
        with pytest.raises(StoreRefused, match="etcd without its JSON gateway"):
            await connect(dataclasses.replace(server.settings, version=3))
    assert [record.levelname for record in caplog.records if "using etcd's API v2" in record.message] == ["DEBUG"]


async def test_a_server_with_neither_api_is_refused_in_one_sentence(tmp_path: Path) -> None:
    async with etcd_kinds.V3[1].server(tmp_path, args=["--enable-grpc-gateway=false"]) as server:
        with pytest.raises(StoreRefused, match=r"without its JSON gateway .*; nor does it serve the API v2: "):
            await connect(server.settings)
        with pytest.raises(StoreRefused, match=r"without its API v2 \(--enable-v2=true, until etcd 3\.5\)"):
            await connect(dataclasses.replace(server.settings, version=2))


async def test_a_missing_python_etcd_is_reported(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("torchelastic.store.etcd_v2")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "etcd", None)
    with pytest.raises(StoreRefused, match=r"^etcd's API v2 needs the package python-etcd: pip install python-etcd$"):
        await connect(etcd.settings)


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        ("500 Internal Server Error", '{"errorCode": 300, "message": "Raft Internal Error"}', StoreUnavailable),
        ("400 Bad Request", '{"errorCode": 209, "message": "Invalid field", "cause": "x"}', StoreRefused),
    ],
    ids=["no leader", "refused"],
)
async def test_an_error_contains_the_message_of_etcd(status: str, answer: str, error: type[Exception]) -> None:
    async with fake_etcd(http(status, answer)) as endpoint:
        with pytest.raises(error, match=r"Raft Internal Error|Invalid field x"):
            await connect(StoreSettings((endpoint,), version=2))


async def test_a_finished_run_leaves_no_empty_directory(own_etcd: EtcdServer) -> None:
    async with own_etcd.connected() as store, aiohttp.ClientSession() as session:
        lasting, lease = RunLease(store, "run"), await store.grant(60)
        await lasting.put("/torchelastic/run/c/round", b"")
        await store.put("/torchelastic/run/n/a", b"", lease=lease)
        await store.put("/torchelastic/run/n/b", b"")
        await lasting.end()
        await store.revoke(lease)
        await store.delete_prefix("/torchelastic/run/")
        async with session.get(f"{own_etcd.url}/v2/keys/torchelastic") as response:
            assert "nodes" not in (await response.json())["node"]


async def test_a_watch_that_falls_behind_ends_but_a_quiet_one_survives_unrelated_changes(
    etcd: EtcdServer, store: Store, prefix: str
) -> None:
    quick = await connect(dataclasses.replace(etcd.settings, silence_limit=2))
    async with watching(store, prefix) as slow, watching(quick, prefix) as quiet, asyncio.timeout(2 * HANGS):
        for _ in range(2):
            for _ in range(HISTORY * 3 // 4):
                await store.put("/elsewhere", b"")
            assert await anext(quiet) == ()  # an empty batch reports a newer revision
        await store.put(prefix + "a", b"")
        assert [change.key for change in await read_changes(quiet, 1)] == [prefix + "a"]
        await ended(slow)
    await quick.close()
