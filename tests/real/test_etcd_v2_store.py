"""The store on a real etcd with API v2: the conformance tests, and the peculiarities of v2."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support import etcd_kinds
from tests.support.answers import answering, http
from tests.support.certificates import make_certificates
from tests.support.etcd_conformance import EtcdFaults
from tests.support.store_conformance import HANGS, StoreBehaviour, confirmed, ended, seen
from tests.support.testbed.availability import EXHAUSTIVE
from torchelastic.errors import HistoryCompacted, SettingsError, StoreRefused, StoreUnavailable
from torchelastic.protocol import run_lease
from torchelastic.store import StoreSettings, connect
from torchelastic.store.etcd_v2 import EtcdV2Store
from torchelastic.store.etcd_v3 import EtcdV3Store
from torchelastic.store.run_lease import RunLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real

V2 = etcd_kinds.V2[0]
HISTORY = 1000
"""The number of changes that etcd v2 keeps."""


@contextlib.asynccontextmanager
async def opened(settings: StoreSettings, **changes: Any) -> AsyncIterator[EtcdV2Store]:
    """A store for the length of a block."""
    store = EtcdV2Store(dataclasses.replace(settings, **changes))
    try:
        yield store
    finally:
        await store.close()


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


class TestEtcdV2Store(StoreBehaviour):
    @pytest.fixture
    async def store(self, etcd: EtcdServer) -> AsyncIterator[EtcdV2Store]:
        async with opened(etcd.settings) as store:
            yield store

    @pytest.fixture
    async def other(self, etcd: EtcdServer) -> AsyncIterator[EtcdV2Store]:
        async with opened(etcd.settings) as store:
            yield store

    @pytest.fixture
    def second(self) -> float:
        return 1.0

    @pytest.fixture
    def compact(self, store: EtcdV2Store) -> Callable[[int], Awaitable[None]]:
        async def forget(_: int) -> None:
            for _ in range(HISTORY + 1):
                await store.put("/elsewhere", b"")

        return forget


class TestFaultsOfEtcdV2(EtcdFaults):
    adapter = EtcdV2Store
    start = 0
    watching = b"wait=true"
    without_data = (StoreUnavailable, HistoryCompacted)
    writers = 2
    writes = 200
    kill_after = (100, 200, 300)


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
        with pytest.raises(StoreRefused, match="does not serve its JSON gateway"):
            await connect(dataclasses.replace(server.settings, version=3))
    assert [record.levelname for record in caplog.records if "the API v2 of etcd is used" in record.message] == [
        "DEBUG"
    ]


async def test_a_server_with_neither_api_is_refused_in_one_sentence(tmp_path: Path) -> None:
    async with etcd_kinds.V3[1].server(tmp_path, args=["--enable-grpc-gateway=false"]) as server:
        with pytest.raises(StoreRefused, match=r"JSON gateway: start it with .*; nor does it serve the API v2$"):
            await connect(server.settings)
        with pytest.raises(StoreRefused, match=r"without its API v2 \(--enable-v2=true, until etcd 3\.5\)"):
            await connect(dataclasses.replace(server.settings, version=2))


async def test_a_missing_python_etcd_is_named(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("torchelastic.store.etcd_v2")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "etcd", None)
    with pytest.raises(StoreRefused, match=r"^etcd's API v2 needs the package python-etcd: pip install python-etcd$"):
        await connect(etcd.settings)


# Faults of the network and the server


async def test_an_unreachable_server_error_names_the_address_and_the_reason() -> None:
    settings = StoreSettings(endpoints=("127.0.0.1:1",), version=2)
    with pytest.raises(StoreUnavailable, match=r"^etcd at 127\.0\.0\.1:1 does not answer: connection refused$"):
        await connect(settings)
    with pytest.raises(StoreUnavailable, match=r"none of the etcd servers 127\.0\.0\.1:1, 127\.0\.0\.1:2 answers"):
        await connect(dataclasses.replace(settings, endpoints=("127.0.0.1:1", "127.0.0.1:2")))
    with pytest.raises(StoreUnavailable, match=r"^etcd at etcd\.invalid:2379 cannot be found"):
        await connect(dataclasses.replace(settings, endpoints=("etcd.invalid:2379",)))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            http("404 Not Found", "no such page"),
            r"is not etcd, or etcd without its API v2 .* status 404, 'no such page'",
        ),
        (http("302 Found", ""), "is not etcd, or etcd without its API v2"),
        (http("200 OK", "<html>Welcome</html>"), "does not answer as etcd's API v2 does"),
        (http("200 OK", '{"action": "get", "node": 7}'), "does not answer as etcd's API v2 does"),
        (http("400 Bad Request", '{"errorCode": 209, "message": "Invalid field", "cause": "x"}'), "Invalid field x"),
        (lambda _: b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP: 'SSH-2.0-OpenSSH_9.2'"),
    ],
    ids=["not found", "redirect", "a page", "other json", "a refusal", "no http"],
)
async def test_a_server_that_is_not_a_usable_etcd_is_refused_in_one_sentence(
    answer: Callable[[str], bytes], sentence: str
) -> None:
    async with answering(answer) as endpoint:
        with pytest.raises(StoreRefused, match=sentence) as refused:
            await connect(StoreSettings(endpoints=(endpoint,), version=2))
        assert endpoint in str(refused.value)


@pytest.mark.parametrize(
    "answer",
    [
        http("503 Service Unavailable", "upstream is down"),
        http("500 Internal Server Error", '{"errorCode": 300, "message": "Raft Internal Error", "cause": "timed out"}'),
        lambda _: b"",
        lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
    ],
    ids=["overloaded", "no leader", "hangs up", "half an answer"],
)
async def test_a_temporarily_unavailable_server_may_be_retried(answer: Callable[[str], bytes]) -> None:
    async with answering(answer) as endpoint:
        with pytest.raises(StoreUnavailable, match=endpoint):
            await connect(StoreSettings(endpoints=(endpoint,), version=2))


async def test_a_key_with_invalid_fields_is_harmless() -> None:
    node = '{"action": "get", "node": {"key": ["a"], "value": 7, "modifiedIndex": "x", "createdIndex": null}}'
    async with answering(http("200 OK", node)) as endpoint, opened(StoreSettings(endpoints=(endpoint,))) as store:
        with pytest.raises(StoreRefused, match="does not answer as etcd's API v2 does"):
            await store.get("/a")


async def test_foreign_keys_below_the_prefix_are_ignored(etcd: EtcdServer, prefix: str) -> None:
    async with opened(etcd.settings) as store, aiohttp.ClientSession() as session:
        async with contextlib.aclosing(store.watch(prefix, 0)) as watch:
            await confirmed(watch)
            async with session.put(f"{etcd.url}/v2/keys{prefix}byhand", data={"value": "x"}) as response:
                assert response.status == 201
            await store.put(prefix + "a", b"")
            assert [change.key for change in await seen(watch, 1)] == [prefix + "a"]
        assert [entry.key for entry in (await store.list(prefix)).entries] == [prefix + "a"]


async def test_a_directory_in_place_of_a_key_is_reported_in_one_sentence(etcd: EtcdServer, prefix: str) -> None:
    async with opened(etcd.settings) as store, aiohttp.ClientSession() as session:
        async with session.put(f"{etcd.url}/v2/keys{prefix}a~?dir=true") as response:
            assert response.status == 201
        with pytest.raises(StoreRefused, match=rf"^etcd at {etcd.endpoint} refuses: Not a file"):
            await store.put(prefix + "a", b"")


async def test_server_names_are_used_as_written(etcd: EtcdServer, prefix: str) -> None:
    endpoint = etcd.endpoint.replace("127.0.0.1", "LocalHost")
    async with (
        opened(etcd.settings, endpoints=(endpoint,)) as store,
        contextlib.aclosing(store.watch(prefix, 0)) as watch,
    ):
        await confirmed(watch)
        await store.put(prefix + "a", b"")
        assert len(await seen(watch, 1)) == 1


async def test_watchers_of_a_removed_directory_list_again(etcd: EtcdServer, prefix: str) -> None:
    async with opened(etcd.settings) as store, aiohttp.ClientSession() as session:
        await store.put(prefix + "n/a", b"")
        async with contextlib.aclosing(store.watch(prefix + "n/", 0)) as watch:
            await confirmed(watch)
            async with session.delete(f"{etcd.url}/v2/keys{prefix}?recursive=true") as response:
                assert response.status == 200
            with pytest.raises(HistoryCompacted, match=r"was removed .* list again"):
                await ended(watch)


async def test_a_finished_run_leaves_no_empty_directory(own_etcd: EtcdServer) -> None:
    async with opened(own_etcd.settings) as store, aiohttp.ClientSession() as session:
        lasting, lease = RunLease(store, "run"), await store.grant(60)
        await lasting.put("/torchelastic/run/c/round", b"")
        await store.put("/torchelastic/run/n/a", b"", lease=lease)
        await store.put("/torchelastic/run/n/b", b"")
        await lasting.end()
        await store.revoke(lease)
        await store.delete_prefix("/torchelastic/run/")
        async with session.get(f"{own_etcd.url}/v2/keys/torchelastic") as response:
            assert "nodes" not in (await response.json())["node"]


async def test_a_cancelled_waiter_blocks_nothing(own_etcd: EtcdServer, prefix: str) -> None:
    async with opened(own_etcd.settings, request_timeout=3600.0) as store, asyncio.timeout(HANGS):
        await store.put(prefix + "a", b"")
        with own_etcd.paused():
            asking = [asyncio.create_task(store.get(prefix + "a")) for _ in range(3)]
            done, _ = await asyncio.wait(asking, timeout=0.1)
            assert not done
            for task in asking:
                task.cancel()
        assert await store.get(prefix + "a") is not None


async def test_python_etcd_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with opened(StoreSettings(endpoints=("127.0.0.1:1",))) as store:
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.get("/a")
    assert [record for record in caplog.records if record.name.startswith("etcd")] == []


# Watches that break


async def test_a_quiet_watch_survives_more_unrelated_changes_than_etcd_keeps(etcd: EtcdServer, prefix: str) -> None:
    async with (
        opened(etcd.settings, silence_limit=2) as store,
        contextlib.aclosing(store.watch(prefix, 0)) as watch,
        asyncio.timeout(HANGS),
    ):
        await confirmed(watch)
        for _ in range(2):
            for _ in range(HISTORY * 3 // 4):
                await store.put("/elsewhere", b"")
            assert await anext(watch) == ()  # it has moved on
        await store.put(prefix + "a", b"")
        assert [change.key for change in await seen(watch, 1)] == [prefix + "a"]


# Authentication


@pytest.fixture
async def guarded_etcd(own_etcd: EtcdServer) -> EtcdServer:
    """An etcd with authentication: root may do everything, alice may use keys below /torchelastic/, others nothing."""
    root = {"Authorization": aiohttp.encode_basic_auth("root", "s3cret")}

    async def ask(path: str, message: dict[str, Any] | None = None) -> None:
        async with session.put(f"{own_etcd.url}/v2/auth/{path}", json=message, headers=root) as response:
            assert response.status in {200, 201}, await response.text()

    keys = {"kv": {"read": ["/torchelastic/*"], "write": ["/torchelastic/*"]}}
    async with aiohttp.ClientSession() as session:
        await ask("users/root", {"user": "root", "password": "s3cret"})
        await ask("roles/agents", {"role": "agents", "permissions": keys})
        await ask("users/alice", {"user": "alice", "password": "s3cret", "roles": ["agents"]})
        await ask("enable")
        everything = {"kv": {"read": ["/*"], "write": ["/*"]}}
        await ask("roles/guest", {"role": "guest", "revoke": everything})
    return own_etcd


async def test_a_user_is_confined_to_the_permitted_prefix(guarded_etcd: EtcdServer) -> None:
    store = await connect(dataclasses.replace(guarded_etcd.settings, username="alice", password="s3cret"))
    lease = await store.grant(60)
    revision = await store.put("/torchelastic/run/a", b"", lease=lease)
    await store.keep_alive(lease)
    lasting = RunLease(store, "run")
    await lasting.put("/torchelastic/run/lasting", b"")
    assert await store.grant(60, lease=run_lease("run")) == run_lease("run")
    await lasting.end()
    assert await store.get("/torchelastic/run/lasting") is None
    async with contextlib.aclosing(store.watch("/torchelastic/run/a", revision)) as watch:
        await confirmed(watch)
        assert len(await seen(watch, 1)) == 1
    refusal = "does not accept the user name and password, or not for these keys"
    for refused in (store.put("/bob/a", b""), store.list("/bob/"), ended(store.watch("/bob/", 1))):
        with pytest.raises(StoreRefused, match=refusal):
            await refused
    await store.close()


async def test_wrong_or_missing_credentials_are_refused_and_never_shown(guarded_etcd: EtcdServer) -> None:
    with pytest.raises(StoreRefused, match="wants a user name and a password"):
        await connect(guarded_etcd.settings)
    settings = dataclasses.replace(guarded_etcd.settings, username="alice", password="hunter2")
    async with opened(settings) as store:
        with pytest.raises(StoreRefused, match="does not accept the user name and password") as refused:
            await store.put("/torchelastic/run/a", b"")
    assert "hunter2" not in f"{refused.value!r} {refused.value.__context__!r} {settings!r}"


# TLS


async def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    async with V2.server(tmp_path, protocol="https", args=certificates.etcd_flags_for_clients) as server:
        known = dataclasses.replace(
            server.settings,
            ca_cert=certificates.authority,
            cert=certificates.client,
            key=certificates.client_key,
        )
        store = await connect(known)
        revision = await store.put("/a", b"")
        async with contextlib.aclosing(store.watch("/a", revision)) as watch:
            await confirmed(watch)
            assert len(await seen(watch, 1)) == 1
        await store.close()
        with pytest.raises(StoreRefused, match=r"certificate of etcd at .* cannot be trusted"):
            await connect(dataclasses.replace(known, ca_cert=None))
        elsewhere = server.endpoint.replace("127.0.0.1", "localhost")
        with pytest.raises(StoreRefused, match=r"certificate of etcd at localhost:\d+ cannot be trusted"):
            await connect(dataclasses.replace(known, endpoints=(elsewhere,)))
        with pytest.raises(StoreRefused, match="no TLS connection"):
            await connect(dataclasses.replace(known, cert=None, key=None))
        with pytest.raises(StoreRefused, match="speaks https only"):
            await connect(dataclasses.replace(server.settings, protocol="http"))


async def test_a_wrong_protocol_and_unusable_files_are_reported(etcd: EtcdServer, tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="speaks http only"):
        await connect(dataclasses.replace(etcd.settings, protocol="https"))
    with pytest.raises(SettingsError, match=r"the CA certificate .*absent\.pem"):
        await connect(dataclasses.replace(etcd.settings, protocol="https", ca_cert=str(tmp_path / "absent.pem")))
    with pytest.raises(SettingsError, match="is not the address of an etcd server"):
        await connect(dataclasses.replace(etcd.settings, endpoints=("host",)))
