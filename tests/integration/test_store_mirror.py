"""The operator's mirror of a run's store, and the stores of all jobs, on a real etcd."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import itertools
import socket
import tracemalloc
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trustme
from aiohttp import web
from cryptography import x509
from kubernetes.aio.client import Configuration

from elastic_operator.kubernetes.client import Api
from elastic_operator.kubernetes.etcd_endpoints import EtcdEndpoints
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.local.processes import free_ports
from elastic_operator.store_mirror import MemoryBudget, StoreMirror, store_at
from tests.support.certificates import CERTIFICATES, make_certificates
from tests.support.etcd import EtcdServer, fake_etcd, http
from tests.support.object_server import answering
from torchelastic.errors import SettingsError, StoreError
from torchelastic.protocol.codec import encode
from torchelastic.protocol.keys import RunKeys, run_lease
from torchelastic.protocol.records import (
    HistoryRecord,
    Member,
    NodeRecord,
    PastRound,
    RoundRecord,
    RunState,
    SizeRecord,
    StateRecord,
    TimeBreakdown,
)
from torchelastic.store.etcd_errors import AddressRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from torchelastic.store.api import StoreSettings

pytestmark = pytest.mark.integration

TIMEOUT = 90.0
KEY = "team/digits"
SIZE = SizeRecord(min=1, max=8, desired=1)


@pytest.fixture
def run_id() -> str:
    return str(uuid.uuid4())


class Watched:
    """A store mirror, and the changes and errors that it reported.

    Attributes:
        mirror: the mirror.
        changes: the number of changes that the mirror reported.
        said: the mirror's messages about an unreachable store.
    """

    def __init__(self, run_id: str, budget: MemoryBudget | None = None) -> None:
        self._happened = asyncio.Event()
        self.changes = 0
        self.said: list[str] = []
        self.mirror = StoreMirror(run_id, changed=self._changed, away=self._away, budget=budget)

    def _changed(self) -> None:
        self.changes += 1
        self._happened.set()

    def _away(self, error: StoreError | SettingsError) -> None:
        self.said.append(str(error))
        self._happened.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT):
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


async def test_history_and_time_breakdown_are_read_and_do_not_wake_the_operator(etcd: EtcdServer, run_id: str) -> None:
    keys = RunKeys(run_id)
    split = TimeBreakdown(until=1_700_000_000.5, seconds={RunState.TRAINING: 7.25}, nodes_joined=2)
    history = HistoryRecord(created=1_700_000_000.0, rounds=(PastRound(number=1, began=1_700_000_000.0, nodes=2),))
    watched = Watched(run_id)
    async with etcd.connected() as store, watched.follows(lambda: etcd.settings) as mirror:
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


async def test_a_round_that_begins_at_different_steps_wakes_the_operator(etcd: EtcdServer, run_id: str) -> None:
    keys, watched = RunKeys(run_id), Watched(run_id)
    differ = HistoryRecord(rounds=(PastRound(number=1, began=1.0, first_steps=(0, 120)),))
    async with etcd.connected() as store, watched.follows(lambda: etcd.settings) as mirror:
        await watched.until(lambda: mirror.readable)
        await store.put(keys.history, encode(differ))
        await watched.until(lambda: mirror.history == differ)


async def test_every_change_of_a_node_except_progress_wakes_the_operator(etcd: EtcdServer, run_id: str) -> None:
    keys = RunKeys(run_id)
    record = NodeRecord(name="a", address="10.0.0.1", workers=1, size=SIZE)
    watched = Watched(run_id)
    async with etcd.connected() as store, watched.follows(lambda: etcd.settings) as mirror:
        await store.put(keys.node("a.1"), encode(record))
        await watched.until(lambda: mirror.nodes == {"a.1": record})
        before = watched.changes
        for kept in (10.0, 20.0):
            await store.put(
                keys.node("a.1"), encode(msgspec.structs.replace(record, first_step_at=5.0, last_checkpoint_at=kept))
            )
        progressed = msgspec.structs.replace(record, first_step_at=5.0, last_checkpoint_at=20.0, round=1)
        await store.put(keys.node("a.1"), encode(progressed))
        await watched.until(lambda: mirror.nodes == {"a.1": progressed})
        assert watched.changes == before + 1


async def test_the_keys_of_a_run_are_removed_even_if_its_lease_is_lost(etcd: EtcdServer, run_id: str) -> None:
    watched, keys = Watched(run_id), RunKeys(run_id)
    async with etcd.connected() as store, watched.follows(lambda: etcd.settings) as mirror:
        await watched.until(lambda: mirror.readable)
        await mirror.write_size(SIZE)
        await store.put(keys.node("a.1"), encode(NodeRecord(name="a", address="10.0.0.1", workers=1, size=SIZE)))
        await store.revoke(run_lease(run_id))
        await mirror.forget_run()
        assert (await store.list(keys.root)).entries == ()
        await watched.until(lambda: not mirror.nodes)
        assert mirror.names == {"a.1": "a"}, "the mirror keeps the names of nodes that have left"


async def test_a_store_outage_during_cleanup_is_reported(own_etcd: EtcdServer, run_id: str) -> None:
    watched = Watched(run_id)
    async with watched.follows(lambda: own_etcd.settings) as mirror:
        await mirror.forget_run()  # before the first connection, there are no keys to remove
        await watched.until(lambda: mirror.readable)
        own_etcd.pause()
        forgetting = asyncio.create_task(mirror.forget_run())
        await asyncio.sleep(0)
        await own_etcd.kill()
        with pytest.raises(StoreError):
            await asyncio.wait_for(forgetting, TIMEOUT)


# -- the stores of all jobs


def unusable(endpoint: str) -> str:
    """Return what a job says about every server that is not a usable etcd."""
    return (
        f"etcd at {endpoint} cannot be used: check that it runs, and its address, protocol (http:// or https://), "
        "certificates and network policies; the operator's log has the reason"
    )


class Followed:
    """The stores of all jobs, with one job whose store the test follows."""

    def __init__(self, run_id: str, api: Api | None = None, *, allowed: Sequence[str] = ("127.0.0.0/8",)) -> None:
        self._run_id = run_id
        self._happened = asyncio.Event()
        self.stores = JobStores(
            api or Api(Configuration()),
            lambda _: self._happened.set(),
            CERTIFICATES,
            secret_namespaces=["team"],
            endpoints=EtcdEndpoints(allowed),
            timeout=0.0,
            expiry_interval=0.01,
        )

    @contextlib.asynccontextmanager
    async def at(self, endpoint: str, *, secret: str | None = None) -> AsyncIterator[StoreMirror]:
        """Follow the store at an endpoint within the block."""
        async with asyncio.timeout(TIMEOUT), self.stores as stores:
            yield stores.follow(self._run_id, KEY, endpoint, external=True, available=True, secret=secret)

    async def error(self) -> str:
        """Wait for the first message about the store, and return it."""
        await self.until(lambda: self.stores.error(self._run_id) is not None)
        return self.stores.error(self._run_id) or ""

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._happened.clear()
            await self._happened.wait()


async def test_a_long_store_outage_and_a_bad_endpoint_are_reported_on_the_job(
    own_etcd: EtcdServer, run_id: str
) -> None:
    await own_etcd.kill()
    followed = Followed(run_id)
    async with followed.at("etcd:99999") as mirror:
        assert "a port is a number from 1 to 65535" in await followed.error()
        followed.stores.follow(run_id, KEY, own_etcd.endpoint, external=True, available=False)
        followed.stores.follow(run_id, KEY, own_etcd.endpoint, external=True, available=True)
        assert await followed.error() == unusable(own_etcd.endpoint)
        await own_etcd.start()
        await followed.until(lambda: mirror.readable)
        assert followed.stores.error(run_id) is None


async def test_a_hanging_store_is_awaited_briefly_and_gets_the_size_later(etcd: EtcdServer, run_id: str) -> None:
    followed = Followed(run_id)
    async with followed.at(etcd.endpoint) as mirror:
        await followed.until(lambda: mirror.readable)
        with etcd.paused(), pytest.raises(StoreError, match="has not answered"):
            await followed.stores.write_size(run_id, SIZE)
        later = SizeRecord(min=1, max=8, desired=1, generation=203)
        await followed.stores.write_size(run_id, later)
        await followed.until(lambda: mirror.size == later)


@pytest.mark.parametrize(
    "answer",
    [
        http("200 OK", "<html>SECRET</html>"),
        http("404 Not Found", "SECRET"),
        http("500 Internal Server Error", "SECRET"),
        http("400 Bad Request", '{"message": "SECRET", "code": 3}'),
        http("503 Service Unavailable", '{"message": "SECRET", "code": 14}'),
        lambda _: b"SECRET\r\n\r\n",
        lambda _: b"",
        None,
    ],
)
@pytest.mark.parametrize("url", ["{}", "https://{}", "{},127.0.0.2:1", "{},127.9.9.9:1"])
async def test_whether_and_how_another_server_answers_is_shown_only_in_the_log(
    answer: Callable[[str], bytes] | None, url: str, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    followed = Followed(run_id, allowed=["127.0.0.0/30"])
    async with fake_etcd(answer or (lambda _: b"")) as server:
        endpoint = url.format(server if answer else f"127.0.0.1:{free_ports(1)[0]}")
        async with followed.at(endpoint):
            assert await followed.error() == unusable(endpoint)
    assert f"{KEY}: its store cannot be reached: " in caplog.text


ENTRIES = b'{"header":{"revision":"7"},"kvs":['
MEGABYTE = 1_000_000


def events() -> Iterable[bytes]:
    """Yield messages of a watch, each of which puts the valid key of another node."""
    record = encode(NodeRecord(name="a", address="10.0.0.1", workers=1, size=SIZE))
    for number in itertools.count(8):
        key = f"{RunKeys(RUN).node(f'a.{number}')}".encode()
        kv = {"key": key, "value": record, "mod_revision": number}
        yield msgspec.json.encode({"result": {"events": [{"kv": kv}]}}) + b"\n"


RUN = "run"
COMPRESSED = gzip.compress(b" " * 60 * MEGABYTE)
HOSTILE: dict[str, tuple[str, dict[str, str], Callable[[], Iterable[bytes]]]] = {
    "empty entries": ("list", {}, lambda: [ENTRIES, *[b"{}," * (MEGABYTE // 3)] * 60]),
    "long keys": ("list", {}, lambda: [ENTRIES, *[b'{"key":"' + b"QUJD" * (MEGABYTE // 4) + b'"},'] * 60]),
    "pages without end": ("list", {}, lambda: [ENTRIES, b"{}," * 999, b'{}],"more":true}']),
    "compressed spaces": ("list", {"Content-Encoding": "gzip"}, lambda: [COMPRESSED]),
    "nested answers": ("check", {}, lambda: [b'{"result":' * 5000]),
    "an endless error": ("error", {}, lambda: [b" " * MEGABYTE] * 60),
    "a message without end": ("watch", {}, lambda: [b" " * MEGABYTE] * 60),
    "a message of empty events": ("watch", {}, lambda: [b'{"result":{"events":[', *[b"{}," * MEGABYTE], b"{}]}}\n"]),
    "valid events without end": ("watch", {}, events),
    "nodes of the API v2": ("v2", {}, lambda: [b'{"node":{"nodes":[', *[b"{}," * (MEGABYTE // 3)] * 60]),
}


@pytest.mark.parametrize("attack", HOSTILE)
async def test_a_server_that_sends_too_much_takes_little_memory_and_is_left_alone(attack: str) -> None:
    target, headers, pieces = HOSTILE[attack]
    malformed = attack in {"compressed spaces", "nested answers"}
    expected = "cannot be used" if malformed else "sends more than the keys of a run"
    requests = itertools.count()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked = "limit" if b"limit" in await request.read() else request.path
        if next(requests) == 0 and not malformed:
            return web.Response(status=503)  # the message about another error is replaced at once
        kind = {"limit": "list", "/v3/watch": "watch", "/v3/kv/range": "check"}.get(asked, "v2")
        if target == "v2" and kind != "v2":
            return web.Response(status=404)
        if kind == "v2" and target == "check":
            return web.Response(status=404)
        attacked = kind == target or target == "error"
        response = web.StreamResponse(headers=headers if attacked else {}, status=400 if target == "error" else 200)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            if kind == "watch":
                await response.write(b'{"result":{"created":true,"header":{"revision":"7"}}}\n')
            elif not attacked:
                await response.write(b'{"header":{"revision":"7"}}')
            for piece in pieces() if attacked else ():
                await response.write(piece)
        return response

    followed = Followed(RUN)
    async with answering(answer) as configuration:
        tracemalloc.start()
        async with followed.at(configuration.host) as mirror:
            await followed.until(lambda: expected in (followed.stores.error(RUN) or ""))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            paused = mirror.paused
    assert paused is not malformed
    assert peak < 40 * MEGABYTE, peak


@contextlib.asynccontextmanager
async def holding(records: Mapping[str, bytes], *, watched: bytes = b"") -> AsyncIterator[Callable[[], StoreSettings]]:
    """Serve as an etcd with these records, whose watch sends these bytes; yield the settings for it."""
    over = asyncio.Event()
    kvs = [{"key": key.encode(), "value": value, "mod_revision": 5} for key, value in records.items()]
    listing = msgspec.json.encode({"header": {"revision": "7"}, "kvs": kvs})

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        is_listing = b"limit" in await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            if request.path == "/v3/watch":
                await response.write(b'{"result":{"created":true,"header":{"revision":"7"}}}\n' + watched)
                await over.wait()
            else:
                await response.write(listing if is_listing else b'{"header":{"revision":"7"}}')
        return response

    async with answering(answer) as configuration:
        yield lambda: store_at(configuration.host)
        over.set()


def many(name: str) -> bytes:
    """Return a node with as many names as its record may have, each of which takes much more memory than its text."""
    size = SizeRecord(min=1, max=1, draining=tuple([name] * (900_000 // len(f'"{name}",'.encode()))))
    return encode(NodeRecord(name="a", address="10.0.0.1", workers=1, size=size))


SMALL = encode(NodeRecord(name="a", address="10.0.0.1", workers=1, size=SIZE))
LIMIT = 8 * MEGABYTE


@pytest.mark.parametrize("hoard", ["keys", "an incomplete message"])
async def test_the_etcds_of_all_jobs_take_bounded_memory_and_the_largest_ones_are_left_alone(hoard: str) -> None:
    node = RunKeys(RUN).node
    keys = {node(f"a.{number}"): many("ab") for number in range(4)} if hoard == "keys" else {node("a.1"): SMALL}
    watched = b" " * 3 * MEGABYTE if hoard != "keys" else b""
    budget = MemoryBudget(LIMIT)
    hoarders, honest = [Watched(RUN, budget) for _ in range(10)], Watched(RUN, budget)
    async with (
        asyncio.timeout(TIMEOUT),
        holding({node("a.1"): SMALL}) as small,
        holding(keys, watched=watched) as large,
        contextlib.AsyncExitStack() as following,
    ):
        await following.enter_async_context(honest.follows(small))
        await honest.until(lambda: honest.mirror.readable)
        tracemalloc.start()
        for each in hoarders:
            await following.enter_async_context(each.follows(large))
        refusals = [asyncio.create_task(each.until(lambda each=each: each.mirror.paused)) for each in hoarders]
        left = 0 if hoard == "keys" else LIMIT // len(watched)
        for _, refused in zip(range(len(hoarders) - left), asyncio.as_completed(refusals), strict=False):
            await refused
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40 * MEGABYTE, peak
        assert budget.taken <= LIMIT
        for each in hoarders:
            if each.mirror.paused:
                assert "the etcds of all jobs hold more than the operator's memory allows" in each.said[0]
                assert (each.mirror.nodes, each.mirror.names, each.mirror.readable) == ({}, {}, False)
        assert honest.mirror.readable
        assert list(honest.mirror.nodes) == ["a.1"]
        for task in refusals:
            task.cancel()


@pytest.mark.parametrize("name", ["ab", "\N{LATIN SMALL LETTER E WITH ACUTE}", "a" * 252 + "\N{GRINNING FACE}"])
async def test_a_mirror_takes_no_more_memory_than_counts(name: str) -> None:
    keys = RunKeys(RUN)
    rounds = tuple(PastRound(number=number, began=number) for number in range(20_000))
    members = tuple(Member(f"{number:x}", f"{number:x}", 1) for number in range(30_000))
    records = {
        keys.node("a.1"): many(name),
        keys.history: encode(HistoryRecord(rounds=rounds)),
        keys.state: encode(StateRecord(RoundRecord(number=1, members=members))),
        **{keys.node(f"{name}{number}"): SMALL for number in range(1000)},
    }
    del rounds, members
    budget = MemoryBudget()
    watched = Watched(RUN, budget)
    async with holding(records) as settings:
        tracemalloc.start()
        async with watched.follows(settings) as mirror:
            await watched.until(lambda: mirror.readable and len(mirror.nodes) == 1001)
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert mirror.history is not None
            assert mirror.round is not None
            assert size < budget.taken + MEGABYTE


@pytest.mark.parametrize(
    ("host", "resolved", "allowed"),
    [
        ("127.0.0.1", "", []),
        ("localhost", "", []),
        ("[::ffff:127.0.0.1]", "", []),
        ("etcd.team.svc", "127.0.0.1", []),
        ("etcd.team.svc", "127.0.0.1", [".svc"]),
        ("127.0.0.1", "", ["10.0.0.0/8", ".svc"]),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_an_etcd_at_a_forbidden_address_receives_no_connection(
    host: str, resolved: str, allowed: list[str], scheme: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **how: look_up(resolved or name, *rest, **how))
    connections: list[str] = []

    def answer(line: str) -> bytes:
        connections.append(line)
        return b""

    async with fake_etcd(answer) as endpoint:
        port = endpoint.rpartition(":")[2]
        followed = Followed(run_id, allowed=allowed)
        async with followed.at(f"{scheme}://{host}:{port}"):
            message = await followed.error()
    assert message == (
        f"etcd at {host}:{port} may not be used: the operator does not connect to its address; "
        "see the chart's etcd.allowedEndpoints"
    )
    assert connections == []


@pytest.mark.parametrize(
    ("address", "allowed", "is_allowed"),
    [
        *((address, [], False) for address in ("169.254.169.254", "fe80::1%1", "::1", "0.0.0.0", "::", "224.0.0.1")),
        *(
            (address, [], False)
            for address in ("255.255.255.255", "fd00:ec2::254", "168.63.129.16", "::ffff:169.254.1.1")
        ),
        *((address, [], True) for address in ("10.96.0.7", "8.8.8.8", "fd12::1", "2600::1", "192.168.1.1")),
        ("10.96.0.7", ["10.0.0.0/8"], True),
        ("8.8.8.8", ["10.0.0.0/8"], False),
        ("8.8.8.8", ["infra"], True),
        ("8.8.8.8", ["fra"], False),
        ("169.254.169.254", ["infra"], False),
        ("169.254.7.7", ["169.254.7.0/24"], True),
    ],
)
def test_an_address_is_allowed_by_its_kind_its_range_or_its_name(
    address: str, allowed: list[str], is_allowed: bool
) -> None:
    info = socket.getaddrinfo(address, 2379, type=socket.SOCK_STREAM)[0]
    open_socket = EtcdEndpoints(allowed).socket_for(["etcd.infra:2379"])
    if is_allowed:
        open_socket(info).close()
    else:
        with pytest.raises(AddressRefused):
            open_socket(info)


async def test_an_etcd_with_client_certificates_is_reached_with_the_current_secret_whose_expiry_is_known(
    tmp_path: Path, run_id: str
) -> None:
    files = make_certificates(tmp_path)
    secret: dict[str, Any] = {"metadata": {"name": "hub", "namespace": "team"}, "data": {}}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/api/v1/namespaces/team/secrets/hub"
        return web.json_response(secret)

    def put(**paths: str) -> None:
        for name, path in paths.items():
            secret["data"][name.replace("_", ".")] = base64.b64encode(Path(path).read_bytes()).decode()

    async with (
        EtcdServer(tmp_path, args=files.etcd_flags_for_clients, protocol="https") as etcd,
        answering(answer) as configuration,
        Api(configuration) as api,
    ):
        followed = Followed(run_id)
        async with followed.at(etcd.url):
            assert await followed.error() == unusable(etcd.url)
        followed = Followed(run_id, api)
        async with followed.at(etcd.url, secret="hub") as mirror:
            neither = "the Secret hub, which spec.etcd.tlsSecret names, has neither ca.crt nor tls.crt"
            assert neither in await followed.error()
            put(ca_crt=files.authority, tls_crt=files.client, tls_key=files.client_key)
            await followed.until(lambda: mirror.readable)
            assert followed.stores.error(run_id) is None
            found = [
                x509.load_pem_x509_certificate(Path(each).read_bytes()) for each in (files.authority, files.client)
            ]
            assert followed.stores.expiries() == {KEY: min(each.not_valid_after_utc for each in found).timestamp()}
            former, soon = datetime(2029, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
            for name, path, expiry in (("ca.crt", files.authority, former), ("tls.crt", files.client, soon)):
                another = trustme.CA().issue_cert("other.test", not_after=expiry).cert_chain_pems[0].bytes()
                secret["data"][name] = base64.b64encode(Path(path).read_bytes() + another).decode()
            while followed.stores.expiries() != {KEY: soon.timestamp()}:  # noqa: ASYNC110 - no event reports the read
                await asyncio.sleep(0.01)
        expired = trustme.CA().issue_cert("etcd.test", not_after=datetime(2020, 1, 1, tzinfo=UTC))
        secret["data"]["ca.crt"] = base64.b64encode(expired.cert_chain_pems[0].bytes()).decode()
        followed = Followed(run_id, api)
        async with followed.at(etcd.url, secret="hub"):
            assert await followed.error() == (
                "a certificate in the Secret hub, which spec.etcd.tlsSecret names, has expired: renew it"
            )
