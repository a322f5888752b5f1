"""The store on etcd 3.4 and later, over etcd's JSON gateway.

The store uses the gateway instead of gRPC, because the gateway needs neither grpcio nor protobuf, whose pinned versions
conflict with those of users' images.

A watch is a stream on which etcd may send nothing for ten minutes. A broken watch is detected within the silence limit:

- When the stream has been quiet for half of the limit, the same server must answer a small linearizable read within the
  other half. A server that hangs, is paused, or has lost its quorum does not answer.
- The kernel probes the stream's own connection (keep-alive and TCP_USER_TIMEOUT), which detects a broken path.
- A proxy may answer for a server that it cannot reach. So a watch that stays quiet for long is created again from the
  next revision; no change is lost or reported twice.

The adapter for the API v2 also uses :class:`EtcdServers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import ssl
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from torchelastic.errors import LeaseLost, SettingsError, StoreError, StoreRefused, StoreUnavailable
from torchelastic.store.api import MAX_ENTRIES, MAX_LISTED, Change, Entry, Listing, too_large
from torchelastic.store.etcd_errors import (
    MAX_ANSWER,
    Fault,
    LeaseExists,
    NotAuthorized,
    TokenRefused,
    Unreached,
    WrongApi,
    broken,
    connector,
    is_transient,
    other_protocol,
    read_answer,
    refused,
    shown,
    unexpected,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping

    from torchelastic.store.api import StoreSettings

_Result = TypeVar("_Result")

QUIET_CHECKS: Final = 12
"""Number of consecutive probes without an event after which a watch is created again: every 30 s by default."""


PAGE: Final = 250
"""Maximum number of keys in an answer."""

_OBJECTS: Final = 2 * MAX_ENTRIES + 100
"""Maximum number of JSON objects in an answer. An event has two; no other text in an answer of etcd has a brace."""


class EtcdServers:
    """An HTTP client for the servers of one etcd cluster, on connections that stay open and are shared.

    Servers are tried in turn, and a server that failed is tried last. A request is sent to the next server if it never
    reached the previous one, or if it is safe to repeat.

    Args:
        settings: the addresses and credentials of the servers.

    Attributes:
        endpoints: the servers, in the order in which they are asked.

    Raises:
        SettingsError: a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.endpoints = settings.endpoints
        self._versions = _versions(settings)
        self._tls = settings.tls or _tls_context(settings)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(
        self,
        send: Callable[[str], Awaitable[_Result]],
        *,
        idempotent: bool = False,
        endpoint: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - of all servers together
    ) -> _Result:
        """Send a request to one server, and return the result.

        Args:
            send: sends the request to the server whose endpoint is the argument, and returns the result.
            idempotent: whether the request is safe to repeat, so that another server may be asked after a failure.
            endpoint: the only server to ask; None for all.
            timeout: seconds for the whole call; None for the request timeout.

        Raises:
            StoreUnavailable: no server answered in time.
        """
        clock = asyncio.get_running_loop()
        deadline = clock.time() + (timeout or self._settings.request_timeout)
        endpoints = (endpoint,) if endpoint else self.endpoints
        for number, server in enumerate(endpoints, 1):
            seconds = max(deadline - clock.time(), 0.0) / (len(endpoints) - number + 1 if idempotent else 1)
            try:
                try:
                    async with asyncio.timeout(seconds):
                        return await send(server)
                except TimeoutError as error:
                    raise StoreUnavailable(f"etcd at {server} gave no answer within {seconds:.3g} seconds") from error
            except StoreUnavailable as error:
                self.endpoints = (*(each for each in self.endpoints if each != server), server)
                if number < len(endpoints) and (idempotent or isinstance(error, Unreached)):
                    continue
                if number == 1:
                    raise
                asked = ", ".join(endpoints[:number])
                raise StoreUnavailable(
                    f"none of the etcd servers {asked} answers; the last failure: {error}"
                ) from error
        raise AssertionError("there is at least one endpoint")

    async def check(self, send: Callable[[str], Awaitable[object]]) -> None:
        """Check that a server can be used; ``send`` is as in :meth:`call`, and may be repeated.

        Raises:
            StoreError: the exchange failed, or a server expects the other protocol (http or https).
        """
        try:
            await self.call(send, idempotent=True)
        except NotAuthorized:
            pass  # access to other keys may be allowed
        except StoreError as error:
            probes = (other_protocol(endpoint, self._settings) for endpoint in self.endpoints)
            for endpoint, protocol in zip(self.endpoints, await asyncio.gather(*probes), strict=True):
                if protocol is not None:
                    wanted = f"etcd at {endpoint} accepts {protocol} only: write {protocol}:// before the address"
                    raise StoreRefused(wanted) from error
            raise

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        endpoint: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request for a quoted path with an optional query, and yield the answer, to be read within the block.

        Raises:
            StoreUnavailable: the server cannot be reached, or the connection broke.
            StoreRefused: the server cannot be trusted, or does not support HTTP.
        """
        self._raise_if_closed()
        if self._session is None:  # not in __init__, because a session belongs to the running loop
            timeout = aiohttp.ClientTimeout(connect=self._settings.request_timeout / len(self.endpoints))
            jar = aiohttp.DummyCookieJar()
            # A compressed answer, which no etcd sends, could be larger than any bound after decompression.
            self._session = aiohttp.ClientSession(
                connector=connector(self._settings), timeout=timeout, cookie_jar=jar, auto_decompress=False
            )
            # Otherwise aiohttp repeats PUT and DELETE, and the repetition of a successful compare-and-swap fails.
            self._session._retry_connection = False  # noqa: SLF001 - aiohttp has no other switch for it
        url = URL(f"{self._settings.protocol}://{endpoint}{path}", encoded=True)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        try:
            # A redirect would send the credentials to another server.
            request = self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False, ssl=self._current_tls()
            )
            async with request as response:
                yield response
        except (aiohttp.ClientError, RuntimeError) as error:
            self._raise_if_closed()
            if isinstance(error, aiohttp.ClientError):
                raise broken(endpoint, error) from error
            raise

    def _current_tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context for new connections, with the certificates that the files have now."""
        if self._tls is not None and (versions := _versions(self._settings)) != self._versions:
            with contextlib.suppress(SettingsError):  # the files are being replaced; the next request reads them again
                self._tls, self._versions = _tls_context(self._settings), versions
        return self._tls or True

    async def close(self) -> None:
        """Close all connections; pending requests raise StoreUnavailable."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable("the connection to etcd has been closed")


class EtcdV3Store:
    """A :class:`~torchelastic.store.api.Store` on the servers of one etcd cluster; raises like :class:`EtcdServers`."""

    def __init__(self, settings: StoreSettings) -> None:
        self._servers = EtcdServers(settings)
        self._settings = settings
        self._quiet_limit = settings.silence_limit / 2
        self._token: str | None = None
        self._authenticating = asyncio.Lock()

    async def check(self) -> None:
        """Check that one of the servers can be used; raise as :func:`torchelastic.store.client.connect` does."""
        body = msgspec.json.encode({"key": b"/"})

        async def read(endpoint: str) -> None:
            answer = await self._authorized(endpoint, "/v3/kv/range", body)
            if not _parse_answer(endpoint, answer).header.revision:  # etcd's revisions begin with 1
                raise WrongApi(f"the server at {endpoint} does not answer like etcd", detail=shown(answer))

        await self._servers.check(read)

    async def get(self, key: str) -> Entry | None:
        answer = await self._call("/v3/kv/range", {"key": _encoded(key)}, idempotent=True)
        return _entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        message = {**_below(prefix), "limit": PAGE}
        entries: list[Entry] = []
        size = held = 0
        try:
            while True:
                answer = await self._call("/v3/kv/range", message, idempotent=True)
                page = [_entry(kv) for kv in answer.kvs]
                entries += page
                size += sum(len(kv.key) + len(kv.value) for kv in answer.kvs)
                if len(entries) > MAX_ENTRIES or size > MAX_LISTED:
                    raise too_large(f"etcd at {', '.join(self._settings.endpoints)}")
                held += (taken := sum(each.memory for each in page))
                self._settings.received(taken)
                message.setdefault("revision", answer.header.revision)
                if not answer.more or not answer.kvs:
                    return Listing(message["revision"], tuple(entries), f"{answer.header.cluster_id:x}")
                message["key"] = answer.kvs[-1].key + b"\0"
        finally:
            self._settings.received(-held)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        message = {"key": _encoded(key), "value": value, "lease": lease}
        return (await self._call("/v3/kv/put", message)).header.revision

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        name = _encoded(key)
        if value is None:
            change: dict[str, Any] = {"request_delete_range": {"key": name}}
        else:
            change = {"request_put": {"key": name, "value": value, "lease": lease}}
        # A key that does not exist has the mod_revision 0.
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": expected}
        message = {"compare": [compare], "success": [change]}
        answer = await self._call("/v3/kv/txn", message)
        return answer.header.revision if answer.succeeded else None

    async def delete(self, key: str) -> None:
        await self._call("/v3/kv/deleterange", {"key": _encoded(key)})

    async def delete_prefix(self, prefix: str) -> None:
        await self._call("/v3/kv/deleterange", _below(prefix))

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        message = {"TTL": max(math.ceil(ttl), 1), "ID": lease}
        while True:
            try:
                # Repeatable: a lease whose id is lost expires.
                return (await self._call("/v3/lease/grant", message, idempotent=True)).lease
            except LeaseExists:
                with contextlib.suppress(LeaseLost):  # it has just expired, so it can be granted again
                    await self.keep_alive(lease)
                    return lease

    async def keep_alive(self, lease: int) -> None:
        answer = await self._call("/v3/lease/keepalive", {"ID": lease}, idempotent=True)
        if isinstance(answer.error, Fault):
            raise refused("etcd", answer.error)
        if answer.result is None or answer.result.ttl == 0:
            raise LeaseLost(f"lease {lease:x} has expired")

    async def revoke(self, lease: int) -> None:
        with contextlib.suppress(LeaseLost):
            await self._call("/v3/lease/revoke", {"ID": lease}, idempotent=True)

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        start = 0
        if len(self._servers.endpoints) > 1 or self._settings.username is not None:
            await self._revision(prefix)  # finds a server that answers, and renews the token
        while True:
            server = self._servers.endpoints[0]
            body = msgspec.json.encode({"create_request": {**_below(prefix), "start_revision": start}})
            async with self._stream(server, body) as stream:
                quiet = 0
                while quiet < QUIET_CHECKS:
                    answer = await stream.next(self._quiet_limit)
                    if answer is None:
                        if start > await self._revision(prefix, endpoint=server) + 1:
                            return  # the server lost its data, and sends nothing until its revisions reach ``start``
                        quiet += 1
                        yield ()
                    elif answer.compact_revision:
                        return
                    elif answer.events:
                        quiet = 0
                        changes = tuple(_change(event) for event in answer.events)
                        start = changes[-1].revision + 1
                        yield changes
                        del changes
                    elif answer.created:
                        start = start or answer.header.revision + 1
                        yield ()
                    del answer  # a quiet watch keeps no message

    async def close(self) -> None:
        await self._servers.close()

    @contextlib.asynccontextmanager
    async def _stream(self, server: str, body: bytes) -> AsyncGenerator[_Stream, None]:
        """Begin a watch, and yield the stream of its messages."""
        async with contextlib.AsyncExitStack() as stack:

            async def begin(endpoint: str) -> aiohttp.ClientResponse:
                request = self._request(endpoint, "/v3/watch", body)
                return await stack.enter_async_context(request)

            response = await self._servers.call(begin, endpoint=server)
            _break_if_peer_stops(response, self._settings.silence_limit)
            stream = _Stream(server, response, self._settings.received)
            stack.callback(stream.forget)
            yield stream

    async def _revision(self, prefix: str, *, endpoint: str | None = None) -> int:
        """Return the revision of a server that answers and grants access to the keys below the prefix."""
        message = {**_below(prefix), "count_only": True}
        timeout = self._quiet_limit if endpoint else None
        answer = await self._call("/v3/kv/range", message, idempotent=True, endpoint=endpoint, timeout=timeout)
        return answer.header.revision

    async def _call(
        self,
        path: str,
        message: dict[str, Any],
        *,
        idempotent: bool = False,
        endpoint: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as of EtcdServers.call
    ) -> _Answer:
        """Send one message and return the answer; for the other arguments and errors, see :meth:`EtcdServers.call`."""
        body = msgspec.json.encode(message)  # encodes bytes as base64

        async def send(server: str) -> _Answer:
            return _parse_answer(server, await self._authorized(server, path, body))

        return await self._servers.call(send, idempotent=idempotent, endpoint=endpoint, timeout=timeout)

    async def _authorized(self, endpoint: str, path: str, body: bytes) -> bytearray:
        """Return the answer to a message; get a new token if the server requires one."""
        token = self._token
        try:
            return await self._post(endpoint, path, body)
        except (StoreUnavailable, asyncio.CancelledError):
            # An etcd without data gives no answer to a token of the former one before it has as many changes.
            self._token = None
            raise
        except TokenRefused:
            if self._settings.username is None:
                raise
        async with self._authenticating:
            if self._token == token:  # no other request has renewed it meanwhile
                self._token = None
                who = {"name": self._settings.username, "password": self._settings.password or ""}
                answer = await self._post(endpoint, "/v3/auth/authenticate", msgspec.json.encode(who))
                self._token = _parse_answer(endpoint, answer).token
        return await self._post(endpoint, path, body)

    async def _post(self, endpoint: str, path: str, body: bytes) -> bytearray:
        async with self._request(endpoint, path, body) as response:
            return await self._read(endpoint, response)

    @contextlib.asynccontextmanager
    async def _request(self, endpoint: str, path: str, body: bytes) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Yield an answer with status 200; raise for any other status."""
        headers = {"Authorization": self._token} if self._token else None
        request = self._servers.request("POST", endpoint, path, body=body, headers=headers)
        async with request as response:
            if response.status != 200:
                raise _refusal(endpoint, path, response.status, await self._read(endpoint, response))
            yield response

    async def _read(self, endpoint: str, response: aiohttp.ClientResponse) -> bytearray:
        received = self._settings.received
        return await read_answer(endpoint, response, signs=b"{", limit=_OBJECTS, received=received)


# The gateway encodes 64-bit numbers as strings and bytes as base64, and omits zeros. So every field has a default, and
# the decoder accepts numbers in strings.

_Revision = Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # leaves room to increment it


class _Header(msgspec.Struct, frozen=True):
    cluster_id: int = 0
    revision: _Revision = 0


class _KeyValue(msgspec.Struct, frozen=True):
    """A key with its value; a deleted key has only its name and the revision of the deletion."""

    key: bytes = b""
    value: bytes = b""
    create_revision: _Revision = 0
    mod_revision: _Revision = 0


class _Event(msgspec.Struct, frozen=True):
    kv: _KeyValue = _KeyValue()
    type: str = "PUT"


class _Answer(Fault, frozen=True):
    """The fields that this module reads from an answer of etcd. Each answer has some; in a stream, in ``result``."""

    header: _Header = _Header()
    kvs: tuple[_KeyValue, ...] = ()
    more: bool = False
    succeeded: bool = False
    lease: int = msgspec.field(name="ID", default=0)
    ttl: int = msgspec.field(name="TTL", default=0)
    token: str = ""
    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    events: tuple[_Event, ...] = ()
    error: str | Fault | None = None
    result: _Answer | None = None


class _Stream:
    """The messages of a watch from one server, one on each line."""

    def __init__(self, endpoint: str, response: aiohttp.ClientResponse, received: Callable[[int], None]) -> None:
        self._endpoint = endpoint
        self._response = response
        self._received = received
        self._pending = bytearray()

    async def next(self, limit: float) -> _Answer | None:
        """Return the next message, or None if none came within ``limit`` seconds.

        Raises:
            StoreError: the watch has ended, or a message is too large.
        """
        searched = 0
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            if searched > MAX_ANSWER:
                raise too_large(f"etcd at {self._endpoint}")
            try:
                async with asyncio.timeout(limit):
                    chunk = await self._response.content.readany()
            except TimeoutError:
                return None
            if not chunk:
                raise StoreUnavailable(f"etcd at {self._endpoint} ended the watch")
            self._pending += chunk
            self._received(len(chunk))
        if self._pending.count(b"{", 0, end) > _OBJECTS:
            raise too_large(f"etcd at {self._endpoint}")
        line = _parse_answer(self._endpoint, self._pending[:end])
        del self._pending[: end + 1]
        self._received(-end - 1)
        answer = line.result or _Answer()
        fault = line.error if isinstance(line.error, Fault) else None
        if answer.canceled and not answer.compact_revision:
            fault = Fault(answer.cancel_reason or "the watch was canceled")
        if fault is not None:
            raise refused(f"etcd at {self._endpoint}", fault, transient=answer.canceled)
        return answer

    def forget(self) -> None:
        """Forget the bytes of an incomplete message."""
        self._received(-len(self._pending))
        self._pending.clear()


def _parse_answer(endpoint: str, body: bytearray) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = f"{shown(body)} ({error})"
        raise WrongApi(f"the server at {endpoint} does not answer like etcd", detail=found) from error


def _refusal(endpoint: str, path: str, status: int, body: bytearray) -> StoreError:
    """Return the error for an answer whose status is not 200."""
    try:
        answer = msgspec.json.decode(body, type=_Answer, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = _Answer()
    fault = answer.error if isinstance(answer.error, Fault) else answer
    if fault.message:
        return refused(f"etcd at {endpoint}", fault, transient=is_transient(status))
    lacking = "its JSON gateway (etcd 3.4 or later has it, with --enable-grpc-gateway=true)"
    return unexpected(endpoint, path, status, body, lacking=lacking)


def _break_if_peer_stops(response: aiohttp.ClientResponse, limit: float) -> None:
    """Make the kernel close the connection if its peer's kernel does not answer for ``limit`` seconds."""
    transport = response.connection.transport if response.connection else None
    if transport is None:
        return  # the connection is broken already; reading will fail
    connection = transport.get_extra_info("socket")
    seconds = max(int(limit / 3), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))


def _tls_context(settings: StoreSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the settings; None for plain HTTP."""
    if settings.protocol != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca_cert)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the CA certificate {settings.ca_cert} for etcd cannot be used: {error}") from error
    if settings.cert:
        try:
            # Without this empty password, OpenSSL would ask on the terminal for the password of an encrypted key.
            context.load_cert_chain(settings.cert, settings.key, password="")
        except (OSError, ValueError) as error:
            pair = f"{settings.cert} with the key {settings.key or settings.cert}"
            raise SettingsError(f"the client certificate {pair} for etcd cannot be used: {error}") from error
    return context


def _versions(settings: StoreSettings) -> list[tuple[int, int] | None]:
    """Return values that change when a file with certificates is replaced."""
    found: list[tuple[int, int] | None] = []
    for path in (settings.ca_cert, settings.cert, settings.key):
        status = None
        if path is not None:
            with contextlib.suppress(OSError):
                status = os.stat(path)  # noqa: PTH116 - a string
        found.append(None if status is None else (status.st_ino, status.st_mtime_ns))
    return found


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _below(prefix: str) -> dict[str, Any]:
    """Return the range of all keys with the prefix."""
    first = _encoded(prefix)
    return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}


def _entry(kv: _KeyValue) -> Entry:
    return Entry(_decoded(kv.key), kv.value, kv.create_revision, kv.mod_revision)


def _change(event: _Event) -> Change:
    kv = event.kv
    return Change(_decoded(kv.key), None if event.type == "DELETE" else _entry(kv), kv.mod_revision)
