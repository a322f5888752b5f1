"""The store on a real etcd: the conformance tests, and faults of the network and the server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support import etcd_kinds
from tests.support.answers import answering, http
from tests.support.certificates import Certificates, make_certificates
from tests.support.etcd import EtcdServer
from tests.support.etcd_conformance import EtcdFaults
from tests.support.store_conformance import StoreBehaviour, confirmed, ended, seen
from tests.support.tcp_proxy import TcpProxy
from torchelastic.errors import SettingsError, StoreRefused, StoreUnavailable
from torchelastic.protocol import run_lease
from torchelastic.store import StoreSettings, connect, etcd_v3
from torchelastic.store.etcd_v3 import EtcdV3Store
from torchelastic.store.run_lease import RunLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


pytestmark = pytest.mark.real


@contextlib.asynccontextmanager
async def opened(settings: StoreSettings, **changes: Any) -> AsyncIterator[EtcdV3Store]:
    """A store for the length of a block."""
    store = EtcdV3Store(dataclasses.replace(settings, **changes))
    try:
        yield store
    finally:
        await store.close()


async def ask(server: EtcdServer, path: str, message: dict[str, Any]) -> None:
    """Send etcd a request that the store has no method for."""
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=message) as response:
        assert response.status == 200, await response.text()


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=etcd_kinds.parameters(*etcd_kinds.V3))
async def each_etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EtcdServer]:
    """An etcd of each version."""
    async with request.param.server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class TestEtcdV3Store(StoreBehaviour):
    @pytest.fixture
    async def store(self, each_etcd: EtcdServer) -> AsyncIterator[EtcdV3Store]:
        async with opened(each_etcd.settings) as store:
            yield store

    @pytest.fixture
    async def other(self, each_etcd: EtcdServer) -> AsyncIterator[EtcdV3Store]:
        async with opened(each_etcd.settings) as store:
            yield store

    @pytest.fixture
    def second(self) -> float:
        return 1.0

    @pytest.fixture
    def compact(self, each_etcd: EtcdServer) -> Callable[[int], Awaitable[None]]:
        return lambda revision: ask(each_etcd, "/v3/kv/compaction", {"revision": revision})


class TestFaultsOfEtcdV3(EtcdFaults):
    adapter = EtcdV3Store
    start = 1
    watching = b"/v3/watch"
    without_data = (StoreUnavailable,)
    writers = 4
    writes = 600
    kill_after = (300, 1100, 1900)


# Faults of the network and the server


async def test_a_usable_server_is_connected_to(etcd: EtcdServer, prefix: str) -> None:
    store = await connect(etcd.settings)
    await store.put(prefix + "a", b"")
    assert await store.get(prefix + "a") is not None
    await store.close()


async def test_an_unreachable_server_error_names_the_address_and_the_reason() -> None:
    with pytest.raises(StoreUnavailable, match=r"^etcd at 127\.0\.0\.1:1 does not answer: connection refused$"):
        await connect(StoreSettings(endpoints=("127.0.0.1:1",)))
    with pytest.raises(StoreUnavailable, match=r"none of the etcd servers 127\.0\.0\.1:1, 127\.0\.0\.1:2 answers"):
        await connect(StoreSettings(endpoints=("127.0.0.1:1", "127.0.0.1:2")))


async def test_an_unknown_host_name_is_reported() -> None:
    with pytest.raises(StoreUnavailable, match=r"^etcd at etcd\.invalid:2379 cannot be found"):
        await connect(StoreSettings(endpoints=("etcd.invalid:2379",)))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            http("404 Not Found", "no such page"),
            "is not etcd, or etcd without its JSON gateway: .* status 404, 'no such pa",
        ),
        (http("302 Found", ""), "is not etcd, or etcd without its JSON gateway"),
        (http("200 OK", "<html>Welcome</html>"), "does not answer as etcd does: '<html>Welcome</html>'"),
        (http("200 OK", '{"version": 7}'), "does not answer as etcd does"),
        (http("200 OK", '{"etcdserver": "latest"}'), "is not etcd"),
        (http("200 OK", '{"etcdserver": "3.3.27"}'), r"has version 3\.3\.27, but 3\.4 or later is needed"),
        (lambda _: b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
    ],
    ids=["not found", "redirect", "a page", "other json", "odd version", "old version", "no http"],
)
async def test_a_server_that_is_not_a_usable_etcd_is_refused_in_one_sentence(
    answer: Callable[[str], bytes], sentence: str
) -> None:
    async with answering(answer) as endpoint:
        with pytest.raises(StoreRefused, match=sentence) as refused:
            await connect(StoreSettings(endpoints=(endpoint,)))
        assert endpoint in str(refused.value)


async def test_an_overloaded_server_may_be_retried() -> None:
    async with answering(http("503 Service Unavailable", "upstream is down")) as endpoint:
        with pytest.raises(StoreUnavailable, match="status 503: 'upstream is down'"):
            await connect(StoreSettings(endpoints=(endpoint,)))


async def test_an_etcd_without_its_gateway_is_refused(tmp_path: Path) -> None:
    async with EtcdServer(tmp_path, args=["--enable-grpc-gateway=false"]) as server:
        with pytest.raises(StoreRefused, match="does not serve its JSON gateway"):
            await connect(server.settings)


@pytest.mark.parametrize("endpoint", ["", "host", "host:port", "host:1/path", "user@host:1", ":2379", "a..b:2379"])
async def test_an_invalid_address_is_reported_before_any_request(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="is not the address of an etcd server"):
        EtcdV3Store(StoreSettings(endpoints=(endpoint,)))


# Watches that break


async def test_lost_watch_events_are_delivered_when_the_watch_restarts(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_v3, "QUIET_CHECKS", 3)
    async with (
        TcpProxy(etcd.endpoint) as proxy,
        opened(etcd.settings, endpoints=(proxy.endpoint,), silence_limit=1) as store,
    ):
        await store.put(prefix + "before", b"")
        async with contextlib.aclosing(store.watch(prefix, 0)) as watch:
            await confirmed(watch)
            await store.put(prefix + "1", b"")
            told = await seen(watch, 1)
            assert proxy.stall(having_sent=b"/v3/watch") == 1
            await store.put(prefix + "2", b"")
            told += await seen(watch, 1)
            await store.put(prefix + "3", b"")
            told += await seen(watch, 1)
        assert [change.key for change in told] == [prefix + "1", prefix + "2", prefix + "3"]


# Authentication


@pytest.fixture
async def guarded_etcd(own_etcd: EtcdServer) -> EtcdServer:
    """An etcd with authentication: root may do everything, alice may use keys below /alice/."""
    await ask(own_etcd, "/v3/auth/role/add", {"name": "root"})
    await ask(own_etcd, "/v3/auth/role/add", {"name": "alices"})
    first, end = (base64.b64encode(key).decode() for key in (b"/alice/", b"/alice0"))
    permission = {"permType": "READWRITE", "key": first, "range_end": end}
    await ask(own_etcd, "/v3/auth/role/grant", {"name": "alices", "perm": permission})
    for user, role in (("root", "root"), ("alice", "alices")):
        await ask(own_etcd, "/v3/auth/user/add", {"name": user, "password": "s3cret"})
        await ask(own_etcd, "/v3/auth/user/grant", {"user": user, "role": role})
    await ask(own_etcd, "/v3/auth/enable", {})
    return own_etcd


async def test_a_user_is_confined_to_the_permitted_prefix(guarded_etcd: EtcdServer) -> None:
    settings = dataclasses.replace(guarded_etcd.settings, username="alice", password="s3cret")
    store = await connect(settings)
    lease = await store.grant(60)
    revision = await store.put("/alice/a", b"", lease=lease)
    await store.keep_alive(lease)
    lasting = RunLease(store, "run")
    await lasting.put("/alice/lasting", b"")
    assert await store.grant(60, lease=run_lease("run")) == run_lease("run")
    await lasting.end()
    assert await store.get("/alice/lasting") is None
    async with contextlib.aclosing(store.watch("/alice/a", revision)) as watch:
        await confirmed(watch)
        assert len(await seen(watch, 1)) == 1
    with pytest.raises(StoreRefused, match="permission denied"):
        await store.put("/bob/a", b"")
    with pytest.raises(StoreRefused, match="permission denied"):
        await store.list("/")
    async with contextlib.aclosing(store.watch("/bob/", 1)) as watch:
        with pytest.raises(StoreRefused, match="permission denied"):
            await ended(watch)
    await store.close()


async def test_wrong_or_missing_credentials_are_refused_and_never_shown(guarded_etcd: EtcdServer) -> None:
    with pytest.raises(StoreRefused, match="wants a user name and a password"):
        await connect(guarded_etcd.settings)
    settings = dataclasses.replace(guarded_etcd.settings, username="alice", password="hunter2")
    with pytest.raises(StoreRefused, match="does not accept the user name and password") as refused:
        await connect(settings)
    assert "hunter2" not in f"{refused.value!r} {refused.value.__context__!r} {settings!r}"


async def test_an_expired_token_is_renewed(guarded_etcd: EtcdServer) -> None:
    async with opened(guarded_etcd.settings, username="alice", password="s3cret") as store:
        revision = await store.put("/alice/a", b"")
        await guarded_etcd.kill()  # it keeps its tokens in memory
        await guarded_etcd.start()
        await asyncio.gather(*(store.get("/alice/a") for _ in range(10)))
        await guarded_etcd.kill()
        await guarded_etcd.start()
        async with contextlib.aclosing(store.watch("/alice/", revision)) as watch:
            await confirmed(watch)
            assert len(await seen(watch, 1)) == 1


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def tls_etcd(tmp_path: Path, certificates: Certificates) -> AsyncIterator[EtcdServer]:
    """An etcd that serves TLS."""
    async with EtcdServer(tmp_path, protocol="https", args=certificates.etcd_flags) as server:
        yield server


async def test_tls_works_with_the_right_authority(
    tls_etcd: EtcdServer, certificates: Certificates, prefix: str
) -> None:
    store = await connect(dataclasses.replace(tls_etcd.settings, ca_cert=certificates.authority))
    revision = await store.put(prefix + "a", b"")
    async with contextlib.aclosing(store.watch(prefix, revision)) as watch:
        await confirmed(watch)
        assert len(await seen(watch, 1)) == 1
    await store.close()


async def test_a_certificate_without_a_trusted_authority_is_refused(tls_etcd: EtcdServer) -> None:
    with pytest.raises(StoreRefused, match=r"certificate of etcd at .* cannot be trusted"):
        await connect(tls_etcd.settings)


async def test_a_wrong_protocol_is_reported(tls_etcd: EtcdServer, etcd: EtcdServer) -> None:
    with pytest.raises(StoreRefused, match="speaks https only"):
        await connect(dataclasses.replace(tls_etcd.settings, protocol="http"))
    with pytest.raises(StoreRefused, match="speaks http only"):
        await connect(dataclasses.replace(etcd.settings, protocol="https"))


async def test_a_server_that_requires_client_certificates_gets_one(tmp_path: Path, certificates: Certificates) -> None:
    async with EtcdServer(tmp_path, protocol="https", args=certificates.etcd_flags_for_clients) as server:
        stranger = dataclasses.replace(server.settings, ca_cert=certificates.authority)
        with pytest.raises(StoreRefused, match="no TLS connection"):
            await connect(stranger)
        with pytest.raises(StoreRefused, match="speaks https only"):
            await connect(dataclasses.replace(server.settings, protocol="http"))
        known = dataclasses.replace(stranger, cert=certificates.client, key=certificates.client_key)
        await (await connect(known)).close()


async def test_unusable_certificates_are_reported_before_any_request(tmp_path: Path) -> None:
    settings = StoreSettings(endpoints=("127.0.0.1:1",), protocol="https")
    absent, nonsense = str(tmp_path / "absent.pem"), tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    with pytest.raises(SettingsError, match=r"the CA certificate .*absent\.pem"):
        EtcdV3Store(dataclasses.replace(settings, ca_cert=absent))
    with pytest.raises(SettingsError, match=r"the client certificate .*nonsense\.pem"):
        EtcdV3Store(dataclasses.replace(settings, cert=str(nonsense)))
    with pytest.raises(SettingsError, match="but no certificate"):
        EtcdV3Store(dataclasses.replace(settings, key=absent))
    with pytest.raises(SettingsError, match="use https"):
        EtcdV3Store(dataclasses.replace(settings, protocol="http", ca_cert=absent))
    with pytest.raises(SettingsError, match="'ftp' is not a protocol of etcd"):
        EtcdV3Store(dataclasses.replace(settings, protocol="ftp"))
