"""Requests to an etcd v2 through python-etcd: to which server, in which thread, and what a failure means.

python-etcd blocks, so every request runs in a daemon thread of its own: neither another request nor the end of the
process waits for a server that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import socket
import ssl
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar

import etcd
import urllib3

from torchelastic.errors import StoreError, StoreRefused, StoreUnavailable
from torchelastic.store.etcd_address import servers, tls_context
from torchelastic.store.etcd_errors import (
    TRANSIENT_STATUSES,
    NoGateway,
    NotAuthorized,
    Unreached,
    all_failed,
    shown,
    time_limit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchelastic.store.api import StoreSettings

Result = TypeVar("Result")
Client = Any
"""An ``etcd.Client``; python-etcd has no types."""

Answer = Any
"""An ``etcd.EtcdResult``."""

THREAD_NAME: Final = "torchelastic-etcd"
"""The name of the threads in which python-etcd is used here."""

NOT_AS_EXPECTED: Final = (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist)
"""A condition of the request does not hold; passed on to the caller."""

_PASSED_ON: Final = (*NOT_AS_EXPECTED, etcd.EtcdEventIndexCleared)
_MAY_PASS: Final = (etcd.EtcdLeaderElectionInProgress, etcd.EtcdWatcherCleared)
_KEY_NOT_FOUND: Final = 100
_RAFT_INTERNAL_ERROR: Final = 300


class V2Client:
    """The servers of one cluster; they are asked in turn, and one that failed is asked last.

    Args:
        settings: where they are and how to get in.

    Raises:
        SettingsError: an endpoint is not host:port, or a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.bases = servers(settings)
        self._order = list(self.bases)
        tls = tls_context(settings)
        if tls is not None and version("urllib3").startswith("1."):
            tls.check_hostname = False  # urllib3 1 compares the name itself, and gives OpenSSL none for an address
        self._pool = urllib3.PoolManager(retries=False, ssl_context=tls, maxsize=64)
        self._pending: set[Future[Any]] = set()
        self._closed = False

    @property
    def first(self) -> str:
        """The server that is asked first."""
        return self._order[0]

    async def ask(
        self,
        request: Callable[[Client], Result],
        *,
        repeatable: bool = False,
        at: str | None = None,
        limit: float | None = None,
    ) -> Result:
        """Send a request to one server after the other until one answers.

        Args:
            request: what to do with python-etcd's client; runs in a thread.
            repeatable: sending it twice does no harm, so another server may be asked after one has failed.
            at: ask this server only.
            limit: seconds for all of it; None for the request timeout.

        Raises:
            EtcdException: etcd's answer is about keys: not as expected, or an event that is no longer kept.
            StoreUnavailable: no answer, or one that says "later".
            StoreRefused: an answer that says "no".
        """
        endpoints = (at,) if at else tuple(self._order)
        limit = limit or self._settings.request_timeout
        share = limit / len(endpoints)
        for number, endpoint in enumerate(endpoints, 1):
            try:
                async with time_limit(endpoint, share if repeatable else limit):
                    return await self._in_thread(endpoint, request, share)
            except StoreUnavailable as error:
                self._order.remove(endpoint)
                self._order.append(endpoint)
                if number == len(endpoints) or not (repeatable or isinstance(error, Unreached)):
                    raise all_failed(error, endpoints[:number]) from error
        raise AssertionError("there is at least one endpoint")

    def close(self) -> None:
        """Close the connections; requests that still wait for an answer raise StoreUnavailable."""
        self._closed = True
        for pending in tuple(self._pending):
            with contextlib.suppress(InvalidStateError):
                pending.set_exception(_closed())
        self._pool.clear()

    async def _in_thread(self, endpoint: str, request: Callable[[Client], Result], connect: float) -> Result:
        if self._closed:
            raise _closed()
        done: Future[Result] = Future()
        transport = _Transport(self._pool, connect)

        def run() -> None:
            with contextlib.suppress(InvalidStateError):  # the caller was cancelled, or the store closed
                try:
                    done.set_result(request(self._client(endpoint, transport)))
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    done.set_exception(error)

        self._pending.add(done)
        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
        try:
            return await asyncio.wrap_future(done)
        except (etcd.EtcdException, ValueError) as error:  # ValueError: the answer is not text
            # python-etcd takes any page that is not found for a key that is not found.
            no_page = isinstance(error, etcd.EtcdKeyNotFound) and _payload(error).get("errorCode") != _KEY_NOT_FOUND
            if isinstance(error, _PASSED_ON) and not no_page:
                raise
            known = self._settings.username is not None
            raise _meaning(endpoint, error, status=transport.status, known=known) from error
        finally:
            self._pending.discard(done)

    def _client(self, endpoint: str, transport: _Transport) -> Client:
        base, settings = self.bases[endpoint], self._settings
        host = base.host or ""
        client = etcd.Client(
            host=f"[{host}]" if ":" in host else host,
            port=base.explicit_port,
            protocol=settings.protocol,
            read_timeout=settings.request_timeout,
            allow_redirect=False,  # a redirect would take the password along
            username=settings.username if settings.password else None,
            password=settings.password,
        )
        client.http = transport
        return client


class _Transport:
    """What python-etcd uses of urllib3 1, for one request.

    urllib3 2 lacks a part of it, and python-etcd would have it repeat failed requests: a compare-and-swap that is
    repeated after it was done reports a failure.
    """

    def __init__(self, pool: urllib3.PoolManager, connect: float) -> None:
        self._pool = pool
        self._connect = connect
        self.status = 0
        self.index = 0
        """etcd's index when it began to answer."""

    def request(self, *args: Any, **options: Any) -> _Response:  # noqa: ANN401
        """Send a request whose parameters are in the URL."""
        return self._sent(self._pool.request, args, options)

    def request_encode_body(self, *args: Any, **options: Any) -> _Response:  # noqa: ANN401
        """Send a request whose parameters are in the body."""
        return self._sent(self._pool.request_encode_body, args, options)

    def clear(self) -> None:
        """Do nothing: the pool is shared."""

    def _sent(self, send: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> _Response:
        timeout = urllib3.Timeout(connect=self._connect, read=options["timeout"])
        response = send(*args, **{**options, "timeout": timeout, "enforce_content_length": True})
        self.status = response.status
        self.index = int(response.headers.get("X-Etcd-Index", 0))
        return _Response(response.status, response.headers, response.data)


@dataclass(frozen=True, slots=True)
class _Response:
    """An answer as urllib3 1 gives it."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def getheader(self, name: str) -> str | None:
        return self.headers.get(name)

    def getheaders(self) -> Mapping[str, str]:
        return self.headers


def _meaning(endpoint: str, error: Exception, *, status: int, known: bool) -> StoreError:
    """Return the store's error for one of python-etcd.

    Args:
        endpoint: the server.
        error: what python-etcd raised.
        status: HTTP's status of the answer; 0 if there was none.
        known: the request carried credentials.
    """
    where = f"etcd at {endpoint}"
    if isinstance(error, etcd.EtcdConnectionFailed):
        return _broken(endpoint, error.cause)
    if isinstance(error, etcd.EtcdInsufficientPermissions):
        if known:
            return NotAuthorized(f"{where} does not accept the user name and password, or not for these keys")
        return StoreRefused(f"{where} wants a user name and a password")
    payload = _payload(error)
    if "errorCode" in payload:
        said = " ".join(str(payload[name]) for name in ("message", "cause") if payload.get(name))
        if status >= 500 or payload["errorCode"] == _RAFT_INTERNAL_ERROR or isinstance(error, _MAY_PASS):
            return StoreUnavailable(f"{where} cannot answer now: {said}")
        return StoreRefused(f"{where} refuses: {said}")
    page = shown(str(payload.get("cause", "")).encode(errors="replace"))
    if status >= 500 or status in TRANSIENT_STATUSES:
        return StoreUnavailable(f"{where} answers with status {status}: {page}")
    if status == 200:
        return NoGateway(f"what listens at {endpoint} does not answer as etcd's API v2 does")
    return NoGateway(
        f"what listens at {endpoint} is not etcd, or etcd without its API v2 (--enable-v2=true, until etcd 3.5): "
        f"/v2/keys gives status {status}, {page}"
    )


def _broken(endpoint: str, cause: BaseException | None) -> StoreError:
    """Return the error for a failed exchange with a server."""
    where = f"etcd at {endpoint}"
    causes = list(_chain(cause))
    for each in causes:
        if isinstance(each, ssl.SSLCertVerificationError):
            return StoreRefused(f"the certificate of {where} cannot be trusted: {each.verify_message}")
        if isinstance(each, ssl.SSLError) and not isinstance(each, ssl.SSLEOFError):
            return StoreRefused(f"no TLS connection to {where} can be made: {(each.reason or str(each)).lower()}")
        if isinstance(each, socket.gaierror):
            return Unreached(f"{where} cannot be found: {str(each.strerror).lower()}")
        if isinstance(each, http.client.BadStatusLine) and not isinstance(each, http.client.RemoteDisconnected):
            return NoGateway(f"what listens at {endpoint} does not speak HTTP: {shown(str(each).encode())}")
    if isinstance(cause, urllib3.exceptions.SSLError):
        return StoreRefused(f"the certificate of {where} cannot be trusted: {causes[-1]}")
    errors = (each for each in causes if isinstance(each, OSError) and each.errno)
    reason = next((os.strerror(each.errno).lower() for each in errors if each.errno and each.errno > 0), "")
    if isinstance(cause, urllib3.exceptions.ConnectTimeoutError):  # urllib3's error for a refused connection, too
        return Unreached(f"{where} does not answer: {reason or 'no connection in time'}")
    if isinstance(cause, urllib3.exceptions.ReadTimeoutError):
        return StoreUnavailable(f"{where} gave no answer in time")
    if any(isinstance(each, http.client.RemoteDisconnected) for each in causes):
        return StoreUnavailable(f"{where} closed the connection instead of answering")
    return StoreUnavailable(f"the connection to {where} broke: {reason or 'it ended in the middle of an answer'}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from; urllib3 passes some on as arguments only."""
    while error is not None:
        yield error
        yield from (each for each in error.args if isinstance(each, BaseException))
        error = error.__cause__ or error.__context__


def _payload(error: Exception) -> dict[str, Any]:
    payload = getattr(error, "payload", None)
    return payload if isinstance(payload, dict) else {}


def _closed() -> StoreUnavailable:
    return StoreUnavailable("the connection to etcd has been closed")


def _is_of_others(record: logging.LogRecord) -> bool:
    """Drop python-etcd's log lines about requests from here: their failures are reported by the callers."""
    return record.threadName != THREAD_NAME


logging.getLogger("etcd.client").addFilter(_is_of_others)
