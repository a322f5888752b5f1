"""Tests that the tests of each etcd adapter inherit: guarantees of the store, failures, credentials and TLS.

The module of the inheriting class defines the fixtures ``each_etcd`` and ``etcd`` (shared servers), ``own_etcd`` (a
server for one test) and ``prefix``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tests.support.certificates import make_certificates
from tests.support.etcd import fake_etcd, http
from tests.support.etcd_kinds import EtcdKind
from tests.support.store_conformance import HANGS, StoreBehavior, ended, read_changes, watching
from tests.support.tcp_proxy import TcpProxy
from torchelastic.errors import LeaseLost, SettingsError, StoreRefused, StoreUnavailable
from torchelastic.protocol.keys import run_lease
from torchelastic.store.api import Listing, StoreSettings
from torchelastic.store.client import RunLease, connect, follow_forever

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Store


class EtcdBehavior(StoreBehavior):
    """Tests that the tests of each etcd adapter inherit.

    Attributes:
        api: the version of etcd's API.
        wrong_password: the error message for a wrong password.
        denied: the error message for keys that the user may not access.
        writes: the number of writes of each writer while the server is killed.
    """

    api: ClassVar[int]
    wrong_password: ClassVar[str]
    denied: ClassVar[str]
    writes: ClassVar[int]

    async def require_authentication(self, server: EtcdServer) -> None:
        """Enable authentication: alice, with the password s3cret, may only use keys below /torchelastic/."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def opened(self, settings: StoreSettings, **changes: Any) -> AsyncIterator[Store]:
        """Open a store within the block."""
        store = await connect(dataclasses.replace(settings, version=self.api, **changes))
        try:
            yield store
        finally:
            await store.close()

    async def refused(self, settings: StoreSettings, **changes: Any) -> StoreRefused:
        """Return the permanent error of a server that rejects the client."""

        async def put() -> None:
            async with self.opened(settings, **changes) as store:
                await store.put("/torchelastic/run/a", b"")

        with pytest.raises(StoreRefused) as refused:
            await put()
        return refused.value

    @pytest.fixture
    async def store(self, each_etcd: EtcdServer) -> AsyncIterator[Store]:
        async with self.opened(each_etcd.settings) as store:
            yield store

    @pytest.fixture
    async def other(self, each_etcd: EtcdServer) -> AsyncIterator[Store]:
        async with self.opened(each_etcd.settings) as store:
            yield store

    @pytest.fixture
    def second(self) -> float:
        return 1.0

    # -- unavailable servers

    async def test_an_unreachable_server_error_names_the_address_and_the_reason(self) -> None:
        for endpoints, message in (
            (("127.0.0.1:1",), r"^etcd at 127\.0\.0\.1:1 does not answer: connection refused$"),
            (("127.0.0.1:1", "127.0.0.1:2"), r"none of the etcd servers 127\.0\.0\.1:1, 127\.0\.0\.1:2 answers"),
            (("etcd.invalid:2379",), r"^etcd at etcd\.invalid:2379 cannot be found"),
        ):
            with pytest.raises(StoreUnavailable, match=message):
                await connect(StoreSettings(endpoints=endpoints, version=self.api))

    async def test_another_server_is_used_if_one_hangs(
        self, etcd: EtcdServer, own_etcd: EtcdServer, prefix: str
    ) -> None:
        endpoints = (own_etcd.endpoint, etcd.endpoint)
        async with self.opened(etcd.settings, endpoints=endpoints, request_timeout=3.0) as store:
            with own_etcd.paused():
                assert await store.get(prefix + "a") is None
                await store.put(prefix + "a", b"")  # the hanging server is now the last in the order
                assert await store.get(prefix + "a") is not None

    async def test_a_server_that_hangs_is_reported_within_the_time_limit(
        self, own_etcd: EtcdServer, prefix: str
    ) -> None:
        async with self.opened(own_etcd.settings, request_timeout=1.5) as store, asyncio.timeout(HANGS):
            await store.put(prefix + "a", b"")
            with own_etcd.paused():
                for ask in (store.get(prefix + "a"), store.put(prefix + "a", b"")):
                    with pytest.raises(StoreUnavailable, match=r"gave no answer within 1\.5 seconds"):
                        await ask
            assert await store.get(prefix + "a") is not None

    async def test_a_watch_of_a_server_that_is_paused_or_stopped_ends(self, own_etcd: EtcdServer, prefix: str) -> None:
        async with self.opened(own_etcd.settings, silence_limit=1.5) as store:
            async with watching(store, prefix) as watch:
                with own_etcd.paused(), pytest.raises(StoreUnavailable):
                    await ended(watch)
            async with watching(store, prefix) as watch:
                await own_etcd.stop()
                with pytest.raises(StoreUnavailable):
                    await ended(watch)

    async def test_a_watch_whose_connection_is_cut_or_silent_ends(self, etcd: EtcdServer, prefix: str) -> None:
        async with (
            TcpProxy(etcd.endpoint) as proxy,
            self.opened(etcd.settings, endpoints=(proxy.endpoint,), silence_limit=1.5) as store,
        ):
            async with watching(store, prefix) as watch:
                ending = asyncio.create_task(ended(watch))
                while not ending.done():
                    proxy.cut()
                    await asyncio.sleep(0)
                with pytest.raises(StoreUnavailable, match=proxy.endpoint):
                    await ending
            async with watching(store, prefix) as watch:
                proxy.fall_silent()
                with pytest.raises(StoreUnavailable):
                    await ended(watch)

    async def test_an_idle_watch_reports_that_it_is_alive_and_continues(self, etcd: EtcdServer, prefix: str) -> None:
        async with self.opened(etcd.settings, silence_limit=2) as store, watching(store, prefix) as watch:
            async with asyncio.timeout(HANGS):
                for _ in range(2):
                    assert await anext(watch) == ()
            await store.put(prefix + "b", b"")
            assert [change.key for change in await read_changes(watch, 1)] == [prefix + "b"]

    async def test_no_write_is_lost_when_the_server_is_killed(self, own_etcd: EtcdServer, prefix: str) -> None:
        written = asyncio.Semaphore(0)

        async def write(store: Store, writer: int) -> None:
            for index in range(self.writes):
                while True:
                    with contextlib.suppress(StoreUnavailable):
                        await store.put(f"{prefix}{writer}", str(index).encode())
                        break
                    await asyncio.sleep(0.01)
                written.release()

        async def read(store: Store) -> dict[str, bytes]:
            values: dict[str, bytes] = {}
            async with contextlib.aclosing(follow_forever(store, prefix, lost=lambda _: None)) as news:
                async for each in news:
                    entries = each.entries if isinstance(each, Listing) else [change.entry for change in each]
                    values |= {entry.key: entry.value for entry in entries if entry is not None}
                    if prefix + "last" in values:
                        break
            return values

        async with self.opened(own_etcd.settings) as store, asyncio.timeout(3 * HANGS):
            reader = asyncio.create_task(read(store))
            async with asyncio.TaskGroup() as writers:
                for writer in range(2):
                    writers.create_task(write(store, writer))
                for _ in range(3):
                    for _ in range(self.writes // 3):
                        await written.acquire()
                    await own_etcd.kill()
                    await own_etcd.start()
            await store.put(prefix + "last", b"")
            assert await reader == {entry.key: entry.value for entry in (await store.list(prefix)).entries}

    async def test_watches_and_leases_end_if_etcd_loses_its_data(self, own_etcd: EtcdServer, prefix: str) -> None:
        async with self.opened(own_etcd.settings) as store:
            lease = await store.grant(60)
            for index in range(10):
                await store.put(f"{prefix}{index}", b"", lease=lease)
            async with watching(store, prefix) as watch:
                await own_etcd.kill()
                own_etcd.wipe()
                await own_etcd.start()
                with contextlib.suppress(StoreUnavailable):
                    await ended(watch)
            with pytest.raises(LeaseLost):
                await store.keep_alive(lease)

    # -- servers that are not a usable etcd

    @pytest.mark.parametrize(
        ("answer", "sentence"),
        [
            (http("404 Not Found", "no such page"), "is not etcd, or is etcd without .* status 404: 'no such page'"),
            (http("302 Found", ""), "is not etcd, or is etcd without its "),
            (http("200 OK", "<html>Welcome</html>"), "does not answer like etcd"),
            (http("200 OK", '{"action": "get", "node": 7}'), "does not answer like etcd"),
            (lambda _: b"SSH-2.0-OpenSSH_9.2\r\n", "does not support HTTP: .*SSH-2.0-OpenSSH_9.2"),
        ],
        ids=["not found", "redirect", "a page", "other json", "no http"],
    )
    async def test_a_server_that_is_not_a_usable_etcd_is_refused_in_one_sentence(
        self, answer: Callable[[str], bytes], sentence: str
    ) -> None:
        async with fake_etcd(answer) as endpoint:
            with pytest.raises(StoreRefused, match=f"^the server at {endpoint} .*{sentence}"):
                await connect(StoreSettings(endpoints=(endpoint,), version=self.api))

    @pytest.mark.parametrize(
        "answer",
        [
            http("503 Service Unavailable", "upstream is down"),
            lambda _: b"",
            lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        ],
        ids=["overloaded", "hangs up", "half an answer"],
    )
    async def test_a_temporarily_unavailable_server_may_be_retried(self, answer: Callable[[str], bytes]) -> None:
        async with fake_etcd(answer) as endpoint:
            with pytest.raises(StoreUnavailable, match=endpoint):
                await connect(StoreSettings(endpoints=(endpoint,), version=self.api))

    # -- credentials

    async def test_a_user_is_confined_to_the_permitted_prefix(self, own_etcd: EtcdServer) -> None:
        await self.require_authentication(own_etcd)
        async with self.opened(own_etcd.settings, username="alice", password="s3cret") as store:
            lasting = RunLease(store, "run")
            async with watching(store, "/torchelastic/run/") as watch:
                lease = await store.grant(60)
                await store.put("/torchelastic/run/a", b"", lease=lease)
                await store.keep_alive(lease)
                await lasting.put("/torchelastic/run/lasting", b"")
                assert len(await read_changes(watch, 2)) == 2
            assert await store.grant(60, lease=run_lease("run")) == run_lease("run")
            await lasting.end()
            assert await store.get("/torchelastic/run/lasting") is None
            for refused in (store.put("/bob/a", b""), store.list("/bob/"), ended(store.watch("/bob/"))):
                with pytest.raises(StoreRefused, match=self.denied):
                    await refused

    async def test_wrong_or_missing_credentials_are_refused_and_never_shown(self, own_etcd: EtcdServer) -> None:
        await self.require_authentication(own_etcd)
        settings = dataclasses.replace(own_etcd.settings, username="alice", password="hunter2")
        error = await self.refused(settings)
        assert self.wrong_password in str(error)
        assert "hunter2" not in f"{error!r} {error.__context__!r} {settings!r}"
        assert "requires a user name and a password" in str(await self.refused(own_etcd.settings))

    # -- TLS

    async def test_tls_requires_certificates_of_both_sides(self, tmp_path: Path, etcd: EtcdServer) -> None:
        files = make_certificates(tmp_path)
        flags = files.etcd_flags_for_clients
        async with EtcdKind("3.5", api=self.api).server(tmp_path, protocol="https", args=flags) as server:
            known = dataclasses.replace(
                server.settings, ca_cert=files.authority, cert=files.client, key=files.client_key
            )
            async with self.opened(known) as store, watching(store, "/a") as watch:
                await store.put("/a/b", b"")
                assert len(await read_changes(watch, 1)) == 1
            async with self.opened(known) as store:  # all certificates are renewed, by another authority
                (tmp_path / "renewed").mkdir()
                for old, new in zip(
                    dataclasses.astuple(files),
                    dataclasses.astuple(make_certificates(tmp_path / "renewed")),
                    strict=True,
                ):
                    Path(new).replace(old)
                await server.kill()
                await server.start()
                await store.put("/a/c", b"")
            elsewhere = server.endpoint.replace("127.0.0.1", "localhost")
            for message, changes in (
                (f"the certificate of etcd at {server.endpoint} cannot be trusted", {"ca_cert": None}),
                (f"the certificate of etcd at {elsewhere} cannot be trusted", {"endpoints": (elsewhere,)}),
                ("the TLS connection to", {"cert": None, "key": None}),
                ("accepts https only", {"protocol": "http"}),
            ):
                assert message in str(await self.refused(known, **changes))
        assert "accepts http only" in str(await self.refused(etcd.settings, protocol="https"))

    async def test_unusable_certificates_are_reported_before_any_request(self, tmp_path: Path) -> None:
        settings = StoreSettings(endpoints=("127.0.0.1:1",), protocol="https", version=self.api)
        nonsense = tmp_path / "nonsense.pem"
        nonsense.write_text("nonsense")
        with pytest.raises(SettingsError, match=r"the CA certificate .*absent\.pem"):
            await connect(dataclasses.replace(settings, ca_cert=str(tmp_path / "absent.pem")))
        with pytest.raises(SettingsError, match=r"the client certificate .*nonsense\.pem"):
            await connect(dataclasses.replace(settings, cert=str(nonsense)))
