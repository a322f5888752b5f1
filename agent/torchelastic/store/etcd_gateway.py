"""Requests to etcd's JSON gateway: to which server, over which connection, and with which credentials.

The gateway instead of gRPC because it needs neither grpcio nor protobuf, whose pinned versions collide with what users'
images carry. Connections are kept open and shared, so a request costs one round trip.

Servers are tried in turn: one that failed is asked last. A request moves on to the next server if it never reached the
one it was meant for, or if it does no harm to send it twice; everything else is the caller's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
import msgspec

from torchelastic.errors import StoreRefused, StoreUnavailable
from torchelastic.store.etcd_address import servers, speaks_http, speaks_tls, tls_context
from torchelastic.store.etcd_faults import NoGateway, TokenRefused, Unreached, broken, refusal, shown
from torchelastic.store.etcd_messages import AuthAnswer, decode, encode

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from torchelastic.store.api import StoreSettings

Reply = TypeVar("Reply")

MAX_ANSWER_BYTES: Final = 64 << 20
"""No answer, and no message of a stream, may be longer."""


class Stream:
    """A stream of messages from one server, one a line."""

    def __init__(self, endpoint: str, response: aiohttp.ClientResponse) -> None:
        self._endpoint = endpoint
        self._response = response
        self._pending = bytearray()

    async def next(self, reply: type[Reply], *, patience: float) -> Reply | None:
        """The next message, or None where none came for ``patience`` seconds; nothing is lost then.

        Raises:
            StoreUnavailable: the connection broke.
            StoreRefused: what came is no such message.
        """
        searched = 0
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            if searched > MAX_ANSWER_BYTES:
                raise _too_long(self._endpoint)
            try:
                async with asyncio.timeout(patience):
                    chunk = await self._response.content.readany()
            except aiohttp.ClientError as error:
                raise broken(self._endpoint, error) from error
            except RuntimeError as error:  # so aiohttp says that the connection was closed from this side
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
        SettingsError: an endpoint is no host:port, or a file with certificates cannot be used.
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
        """Whether there is one server, and no token that may need renewal: nothing is learned by asking before."""
        return len(self._bases) == 1 and self._settings.username is None

    async def call(
        self,
        path: str,
        message: dict[str, Any],
        reply: type[Reply],
        *,
        repeatable: bool = False,
        at: str | None = None,
        time_limit: float | None = None,
    ) -> Reply:
        """Send one message and give back the answer.

        Args:
            path: of the method, as in /v3/kv/range.
            message: its fields; bytes stay bytes.
            reply: what the answer is.
            repeatable: sending it twice does no harm, so another server may be asked when one has failed.
            at: ask this server and no other.
            time_limit: seconds for all of it; None takes the time-out of the settings.

        Raises:
            StoreUnavailable: no answer, or one that says "later".
            StoreRefused: an answer that says "no".
            LeaseLost: the message names a lease that is no more.
        """
        body = encode(message)
        clock = asyncio.get_running_loop()
        deadline = clock.time() + (time_limit or self._settings.request_timeout)
        endpoints = (at,) if at else self.endpoints
        for index, endpoint in enumerate(endpoints):
            left = max(deadline - clock.time(), 0.0)
            share = left / (len(endpoints) - index)
            try:
                async with _within(share if repeatable else left, endpoint):
                    answer = await self._authorized(endpoint, path, body, connect=share)
            except StoreUnavailable as error:
                self._ask_last(endpoint)
                if index + 1 < len(endpoints) and (repeatable or isinstance(error, Unreached)):
                    continue
                raise _all_failed(error, endpoints[: index + 1]) from error
            return _understood(endpoint, answer, reply)
        raise AssertionError("there is at least one endpoint")

    async def read(self, path: str, reply: type[Reply], *, at: str) -> Reply:
        """What one server has at a path that is none of the gateway's, such as /version.

        Raises:
            StoreUnavailable: it does not answer.
            StoreRefused: what it answers is not this.
        """
        limit = self._settings.request_timeout
        async with _within(limit, at), self._request("GET", at, path, b"", connect=limit) as response:
            return _understood(at, await _bounded(at, response), reply)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, message: dict[str, Any], *, at: str) -> AsyncIterator[Stream]:
        """Send one message to one server and give back the stream of its answers, once the first is on its way.

        Raises:
            StoreUnavailable: the server does not answer.
            StoreRefused: it answers that it won't.
        """
        limit = self._settings.request_timeout
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with _within(limit, at):
                    response = await stack.enter_async_context(
                        self._request("POST", at, path, encode(message), connect=limit)
                    )
            except StoreUnavailable:
                self._ask_last(at)
                raise
            _break_when_peer_is_silent(response, self._settings.silence_limit)
            yield Stream(at, response)

    async def protocol_instead(self, endpoint: str) -> str | None:
        """The protocol that a server speaks that fails over the one of the settings; None if that is not the reason."""
        base = self._bases[endpoint]
        if self._tls is None:
            return "https" if await speaks_tls(base) else None
        return "http" if await speaks_http(base) else None

    async def close(self) -> None:
        """Close all connections; what still waits for an answer gets StoreUnavailable."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _authorized(self, endpoint: str, path: str, body: bytes, *, connect: float) -> bytes:
        """The answer to a message that carries a token where one is needed; an expired one is renewed once."""
        if self._settings.username is not None and self._token is None:
            await self._authenticate(endpoint, connect=connect)
        token = self._token
        try:
            return await self._post(endpoint, path, body, connect=connect)
        except TokenRefused:
            if self._settings.username is None:
                raise
            if self._token == token:  # nobody else has renewed it meanwhile
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
            return await _bounded(endpoint, response)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, endpoint: str, path: str, body: bytes, *, connect: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200, to be read within the block."""
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
                raise refusal(endpoint, path, response.status, await _bounded(endpoint, response))
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


@contextlib.asynccontextmanager
async def _within(seconds: float, endpoint: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"etcd at {endpoint} gave no answer within {seconds:.3g} seconds") from error


async def _bounded(endpoint: str, response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    try:
        async for chunk in response.content.iter_any():
            answer += chunk
            if len(answer) > MAX_ANSWER_BYTES:
                raise _too_long(endpoint)
    except aiohttp.ClientError as error:
        raise broken(endpoint, error) from error
    return bytes(answer)


def _understood(endpoint: str, body: bytes, reply: type[Reply]) -> Reply:
    try:
        return decode(body, reply)
    except msgspec.DecodeError as error:
        raise NoGateway(f"what listens at {endpoint} does not answer as etcd does: {shown(body)} ({error})") from error


def _too_long(endpoint: str) -> StoreRefused:
    return StoreRefused(f"etcd at {endpoint} sent an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")


def _all_failed(error: StoreUnavailable, endpoints: tuple[str, ...]) -> StoreUnavailable:
    if len(endpoints) == 1:
        return StoreUnavailable(str(error))
    return StoreUnavailable(f"none of the etcd servers {', '.join(endpoints)} answers; the last failure: {error}")


def _break_when_peer_is_silent(response: aiohttp.ClientResponse, limit: float) -> None:
    """Have the kernel break the connection when the kernel at its other end is silent for ``limit`` seconds."""
    transport = response.connection.transport if response.connection else None
    if transport is None:
        return  # it is broken already, and whoever reads from it will learn so
    connection = transport.get_extra_info("socket")
    seconds = max(int(limit / 3), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
