"""Requests to etcd's JSON gateway: to which server, over which connection, and with which credentials.

The gateway instead of gRPC because it needs neither grpcio nor protobuf, whose pinned versions collide with those of
users' images. Connections are kept open and shared, so a request costs one round trip.

Servers are tried in turn, and one that failed is asked last. A request moves on to the next server if it never reached
the first, or if sending it twice does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from torchelastic.errors import StoreRefused, StoreUnavailable
from torchelastic.store.etcd_address import other_protocol, servers, tls_context
from torchelastic.store.etcd_errors import (
    NoGateway,
    TokenRefused,
    Unreached,
    all_failed,
    broken,
    refusal,
    shown,
    time_limit,
)
from torchelastic.store.etcd_messages import AuthAnswer, decode, encode

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from torchelastic.store.api import StoreSettings

Reply = TypeVar("Reply")


class Stream:
    """A stream of messages from one server, one on each line."""

    def __init__(self, endpoint: str, response: aiohttp.ClientResponse) -> None:
        self._endpoint = endpoint
        self._response = response
        self._pending = bytearray()

    async def next(self, reply: type[Reply], *, patience: float) -> Reply | None:
        """Return the next message, or None if none came within ``patience`` seconds.

        Raises:
            StoreUnavailable: the connection broke.
            StoreRefused: the message is of another kind.
        """
        searched = 0
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            try:
                async with asyncio.timeout(patience):
                    chunk = await self._response.content.readany()
            except aiohttp.ClientError as error:
                raise broken(self._endpoint, error) from error
            except RuntimeError as error:  # aiohttp's error for a connection that was closed from this side
                raise StoreUnavailable(f"the connection to etcd at {self._endpoint} has been closed") from error
            except TimeoutError:
                return None
            if not chunk:
                raise StoreUnavailable(f"etcd at {self._endpoint} ended the watch")
            self._pending += chunk
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return _understood(self._endpoint, line, reply)


class Gateway:
    """The JSON gateways of the servers of one etcd cluster.

    Args:
        settings: where they are and how to get in.

    Raises:
        SettingsError: an endpoint is not host:port, or a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._bases = servers(settings)
        self._order = list(self._bases)
        self._tls = tls_context(settings)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._token: str | None = None
        self._authenticating = asyncio.Lock()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The servers, in the order in which they are asked."""
        return tuple(self._order)

    @property
    def has_no_choice(self) -> bool:
        """Whether there is one server and no token to renew, so that nothing is gained by a probe before a watch."""
        return len(self._bases) == 1 and self._settings.username is None

    async def call(
        self,
        path: str,
        message: dict[str, Any],
        reply: type[Reply],
        *,
        repeatable: bool = False,
        at: str | None = None,
        limit: float | None = None,
    ) -> Reply:
        """Send one message and return the answer.

        Args:
            path: of the method, as in /v3/kv/range.
            message: its fields; bytes stay bytes.
            reply: the type of the answer.
            repeatable: sending it twice does no harm, so another server may be asked after one has failed.
            at: ask this server only.
            limit: seconds for all of it; None for the request timeout.

        Raises:
            StoreUnavailable: no answer, or one that says "later".
            StoreRefused: an answer that says "no".
            LeaseLost: the message names a lease that has ended.
        """
        body = encode(message)
        clock = asyncio.get_running_loop()
        deadline = clock.time() + (limit or self._settings.request_timeout)
        endpoints = (at,) if at else self.endpoints
        for index, endpoint in enumerate(endpoints):
            left = max(deadline - clock.time(), 0.0)
            share = left / (len(endpoints) - index)
            try:
                async with time_limit(endpoint, share if repeatable else left):
                    answer = await self._authorized(endpoint, path, body, connect=share)
            except StoreUnavailable as error:
                self._ask_last(endpoint)
                if index + 1 < len(endpoints) and (repeatable or isinstance(error, Unreached)):
                    continue
                raise all_failed(error, endpoints[: index + 1]) from error
            return _understood(endpoint, answer, reply)
        raise AssertionError("there is at least one endpoint")

    async def read(self, path: str, reply: type[Reply], *, at: str) -> Reply:
        """Return what one server has at a path outside the gateway, such as /version."""
        limit = self._settings.request_timeout
        async with time_limit(at, limit), self._request("GET", at, path, b"", connect=limit) as response:
            return _understood(at, await _body(at, response), reply)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, message: dict[str, Any], *, at: str) -> AsyncIterator[Stream]:
        """Send one message to one server and return the stream of its answers, when the first is on its way."""
        limit = self._settings.request_timeout
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with time_limit(at, limit):
                    response = await stack.enter_async_context(
                        self._request("POST", at, path, encode(message), connect=limit)
                    )
            except StoreUnavailable:
                self._ask_last(at)
                raise
            _break_when_peer_is_silent(response, self._settings.silence_limit)
            yield Stream(at, response)

    async def other_protocol(self, endpoint: str) -> str | None:
        """Return the protocol that a server speaks instead of that of the settings; None if that is not the reason."""
        return await other_protocol(self._bases[endpoint])

    async def close(self) -> None:
        """Close all connections; requests that still wait for an answer raise StoreUnavailable."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _authorized(self, endpoint: str, path: str, body: bytes, *, connect: float) -> bytes:
        """Return the answer to a message with a token, if one is needed; renew an expired token once."""
        if self._settings.username is not None and self._token is None:
            await self._authenticate(endpoint, connect=connect)
        token = self._token
        try:
            return await self._post(endpoint, path, body, connect=connect)
        except TokenRefused:
            if self._settings.username is None:
                raise
            if self._token == token:  # no other request has renewed it meanwhile
                self._token = None
        await self._authenticate(endpoint, connect=connect)
        return await self._post(endpoint, path, body, connect=connect)

    async def _authenticate(self, endpoint: str, *, connect: float) -> None:
        async with self._authenticating:
            if self._token is not None:
                return
            body = encode({"name": self._settings.username, "password": self._settings.password or ""})
            self._token = ""  # a stale token must not go along
            try:
                answer = await self._post(endpoint, "/v3/auth/authenticate", body, connect=connect)
            except BaseException as error:
                if isinstance(error, StoreRefused) and "authentication is not enabled" in str(error):
                    return
                self._token = None
                raise
            self._token = _understood(endpoint, answer, AuthAnswer).token

    async def _post(self, endpoint: str, path: str, body: bytes, *, connect: float) -> bytes:
        async with self._request("POST", endpoint, path, body, connect=connect) as response:
            return await _body(endpoint, response)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, endpoint: str, path: str, body: bytes, *, connect: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Return an answer with status 200, to be read within the block."""
        if self._closed:
            raise StoreUnavailable("the connection to etcd has been closed")
        if self._session is None:  # here and not in __init__, because it belongs to the running loop
            self._session = _session(self._tls)
        try:
            response = await self._session.request(
                method,
                self._bases[endpoint].with_path(path),
                data=body,
                headers={"Authorization": self._token} if self._token else None,
                allow_redirects=False,  # a redirect would take the token along
                timeout=aiohttp.ClientTimeout(connect=connect),
            )
        except aiohttp.ClientError as error:
            raise broken(endpoint, error) from error
        try:
            if response.status != 200:
                raise refusal(endpoint, path, response.status, await _body(endpoint, response))
            yield response
        finally:
            response.close()  # has no effect on a connection whose answer was read to the end

    def _ask_last(self, endpoint: str) -> None:
        self._order.remove(endpoint)
        self._order.append(endpoint)


def _session(tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
    )


async def _body(endpoint: str, response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except aiohttp.ClientError as error:
        raise broken(endpoint, error) from error


def _understood(endpoint: str, body: bytes, reply: type[Reply]) -> Reply:
    try:
        return decode(body, reply)
    except msgspec.DecodeError as error:
        raise NoGateway(f"what listens at {endpoint} does not answer as etcd does: {shown(body)} ({error})") from error


def _break_when_peer_is_silent(response: aiohttp.ClientResponse, limit: float) -> None:
    """Have the kernel break the connection if its peer's kernel is silent for ``limit`` seconds."""
    transport = response.connection.transport if response.connection else None
    if transport is None:
        return  # it is broken already; reading from it will fail
    connection = transport.get_extra_info("socket")
    seconds = max(int(limit / 3), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
