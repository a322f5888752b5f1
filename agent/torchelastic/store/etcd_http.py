"""HTTP to the servers of one etcd cluster: choice of the server, TLS, time limits, and classification of failures.

Connections are kept open and shared, so a request costs one round trip. Servers are tried in turn, and one that failed
is asked last. A request moves on to the next server if it never reached the first, or if it is safe to repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final, TypeVar

import aiohttp
from yarl import URL

from torchelastic.errors import SettingsError, StoreError, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from torchelastic.store.api import StoreSettings

_Result = TypeVar("_Result")

_PROBE_LIMIT: Final = 1.0
"""Seconds for finding out why a server does not answer."""

_SHOWN: Final = 200
"""Maximum number of characters of an unexpected answer in a message."""


class Unreached(StoreUnavailable):
    """The request never reached the server, so it was not carried out."""


class WrongApi(StoreRefused):
    """The server answers, but does not speak the requested API of etcd."""


class NotAuthorized(StoreRefused):
    """The user may not use these keys."""


class EtcdServers:
    """The servers of one etcd cluster.

    Args:
        settings: the addresses and credentials of the servers.

    Raises:
        SettingsError: a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._order = list(settings.endpoints)
        self._tls = _tls_context(settings)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The servers, in the order in which they are asked."""
        return tuple(self._order)

    async def ask(
        self,
        exchange: Callable[[str], Awaitable[_Result]],
        *,
        repeatable: bool = False,
        at: str | None = None,
        limit: float | None = None,
    ) -> _Result:
        """Return the result of an exchange with one server.

        Args:
            exchange: called with the server.
            repeatable: whether the exchange is safe to repeat, so that another server may be asked after a failure.
            at: ask this server only.
            limit: seconds for the whole call; None for the request timeout.

        Raises:
            StoreUnavailable: no server answered in time.
        """
        clock = asyncio.get_running_loop()
        deadline = clock.time() + (limit or self._settings.request_timeout)
        endpoints = (at,) if at else self.endpoints
        for number, endpoint in enumerate(endpoints, 1):
            seconds = max(deadline - clock.time(), 0.0) / (len(endpoints) - number + 1 if repeatable else 1)
            try:
                try:
                    async with asyncio.timeout(seconds):
                        return await exchange(endpoint)
                except TimeoutError as error:
                    raise StoreUnavailable(f"etcd at {endpoint} gave no answer within {seconds:.3g} seconds") from error
            except StoreUnavailable as error:
                self._order.remove(endpoint)
                self._order.append(endpoint)
                if number < len(endpoints) and (repeatable or isinstance(error, Unreached)):
                    continue
                if number == 1:
                    raise
                asked = ", ".join(endpoints[:number])
                raise StoreUnavailable(
                    f"none of the etcd servers {asked} answers; the last failure: {error}"
                ) from error
        raise AssertionError("there is at least one endpoint")

    async def check(self, exchange: Callable[[str], Awaitable[object]]) -> None:
        """Check that a server can be used.

        Args:
            exchange: as in :meth:`ask`; may be repeated.

        Raises:
            StoreError: the exchange failed, or a server speaks http instead of https or the reverse.
        """
        try:
            await self.ask(exchange, repeatable=True)
        except NotAuthorized:
            pass  # other keys may be allowed
        except StoreError as error:
            for endpoint in self.endpoints:
                if protocol := await self._other_protocol(endpoint):
                    wanted = f"etcd at {endpoint} speaks {protocol} only: write {protocol}:// before the address"
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
        """Send a request and yield the answer; read the answer within the block.

        Args:
            method: the HTTP method.
            endpoint: the server.
            path: the path, and perhaps a query, quoted.
            body: the body of the request.
            headers: additional headers.

        Raises:
            StoreUnavailable: the server cannot be reached, or the connection broke.
            StoreRefused: the server cannot be trusted, or does not speak HTTP.
        """
        self._raise_if_closed()
        if self._session is None:  # here and not in __init__, because it belongs to the running loop
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
            timeout = aiohttp.ClientTimeout(connect=self._settings.request_timeout / len(self._order))
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)
            # Otherwise aiohttp repeats PUT and DELETE, and the repetition of a successful compare-and-swap fails.
            self._session._retry_connection = False  # noqa: SLF001 - aiohttp has no other switch for it
        url = URL(f"{self._settings.protocol}://{endpoint}{path}", encoded=True)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        try:
            # A redirect would take the credentials along.
            request = self._session.request(method, url, data=body or None, headers=headers, allow_redirects=False)
            async with request as response:
                yield response
        except (aiohttp.ClientError, RuntimeError) as error:
            self._raise_if_closed()
            if isinstance(error, aiohttp.ClientError):
                raise _broken(endpoint, error) from error
            raise

    async def close(self) -> None:
        """Close all connections; requests that still wait for an answer raise StoreUnavailable."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable("the connection to etcd has been closed")

    async def _other_protocol(self, endpoint: str) -> str | None:
        """Return the protocol that a server speaks instead of the configured one; None if it speaks that one."""
        other = "https" if self._settings.protocol == "http" else "http"
        timeout = aiohttp.ClientTimeout(total=_PROBE_LIMIT)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{other}://{endpoint}/version", ssl=False, allow_redirects=False) as answer,
            ):
                return other if other == "https" or answer.status == 200 else None
        except aiohttp.ClientError as error:
            return other if "ALERT" in str(error) else None  # it refuses a client without a certificate
        except TimeoutError:
            return None


def is_transient(status: int) -> bool:
    """Return whether a later attempt may succeed after an answer with this HTTP status."""
    return status >= 500 or status in {408, 425, 429}


def unexpected(endpoint: str, path: str, status: int, body: bytes, *, lacking: str) -> StoreError:
    """Return the error for an answer that is not etcd's; ``lacking`` names the feature that an etcd there lacks."""
    if is_transient(status):
        return StoreUnavailable(f"etcd at {endpoint} answers with status {status}: {shown(body)}")
    found = f"{path} gives status {status}, {shown(body)}"
    return WrongApi(f"what listens at {endpoint} is not etcd, or etcd without {lacking}: {found}")


def shown(body: bytes) -> str:
    """Return the beginning of an unexpected answer as text on one line."""
    text = " ".join(body[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return repr(text[:_SHOWN]) if text else "nothing"


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
            # An empty password instead of none, or a key with a password would ask for it on the terminal.
            context.load_cert_chain(settings.cert, settings.key, password="")
        except (OSError, ValueError) as error:
            pair = f"{settings.cert} with the key {settings.key or settings.cert}"
            raise SettingsError(f"the client certificate {pair} for etcd cannot be used: {error}") from error
    return context


def _broken(endpoint: str, error: aiohttp.ClientError) -> StoreError:
    """Return the error for a failed exchange with a server."""
    where = f"etcd at {endpoint}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        said = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)
        return StoreRefused(f"the certificate of {where} cannot be trusted: {said}")
    if isinstance(error, aiohttp.ClientOSError) and "[SSL:" in str(error) and "EOF" not in str(error):
        reason = str(error).partition("[SSL:")[2].partition("]")[0].strip()
        return StoreRefused(f"no TLS connection to {where} can be made: {reason}")
    if isinstance(error, aiohttp.ClientConnectorError):
        state = "cannot be found" if isinstance(error.os_error, socket.gaierror) else "does not answer"
        return Unreached(f"{where} {state}: {_reason(error.os_error)}")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Unreached(f"{where} does not answer: no connection in time")
    if isinstance(error, aiohttp.ClientResponseError):
        return WrongApi(f"what listens at {endpoint} does not speak HTTP: {' '.join(error.message.split())}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return StoreUnavailable(f"{where} closed the connection instead of answering")
    if isinstance(error, aiohttp.ClientPayloadError):
        return StoreUnavailable(f"{where} closed the connection within an answer")
    reason = _reason(error) if isinstance(error, aiohttp.ClientOSError) else str(error) or type(error).__name__
    return StoreUnavailable(f"the connection to {where} broke: {reason}")


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return error.strerror or str(error) or "connection reset"
