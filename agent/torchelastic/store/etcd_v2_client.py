"""python-etcd as it is used here: nothing is tried twice behind one's back, no answer is endless, a wait can be cut.

python-etcd is complete, but its last release is older than the urllib3 of today, whose answers have lost what it asks
them for, and it leaves to urllib3 to repeat what failed: a compare-and-swap that is repeated after it was done says
that it failed. So it is given an HTTP client that repeats nothing and answers as urllib3 once did. All else about
requests, answers and errors is python-etcd's.
"""

from __future__ import annotations

import logging
import socket
import threading
import weakref
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import etcd
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from torchelastic.store.etcd_address import base_url

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from torchelastic.store.api import StoreSettings

THREAD_NAME: Final = "torchelastic-etcd"
"""How the names of the threads begin in which python-etcd is used here."""

MAX_ANSWER_BYTES: Final = 64 << 20
"""No answer may be longer."""

_WHOLE: Final = {"preload_content": False, "enforce_content_length": True}
"""How answers are read: by us; and an end in the middle is an error, as it is by default from urllib3 2.0 on."""


class AnswerTooLong(urllib3.exceptions.HTTPError):
    """An answer is longer than any may be."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What python-etcd takes for an answer of urllib3."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def getheader(self, name: str) -> str | None:
        return self.headers.get(name)

    def getheaders(self) -> Mapping[str, str]:
        return self.headers


class Http:
    """The HTTP client that python-etcd works with, for one thread.

    Args:
        tls: whom to trust; None for plain HTTP.

    Attributes:
        status: HTTP's status of the last answer; python-etcd keeps it to itself.
        index: etcd's index when it began with that answer; 0 where it said none.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self.status = 0
        self.index = 0
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pool = _pool(tls, self._opened)

    def request(self, method: str, url: str, **options: Any) -> _Answer:  # noqa: ANN401 - passed on as they are
        """Send a request whose parameters stand in the address."""
        return self._answer(self._pool.request(method, url, **{**options, **_WHOLE}))

    def request_encode_body(self, method: str, url: str, **options: Any) -> _Answer:  # noqa: ANN401
        """Send a request whose parameters stand in the body."""
        return self._answer(self._pool.request_encode_body(method, url, **{**options, **_WHOLE}))

    def forget(self) -> None:
        """Say nothing of the last answer any more."""
        self.status = self.index = 0

    def clear(self) -> None:
        """Close the connections that are not in use."""
        self._pool.clear()

    def cut(self) -> None:
        """Break all connections off; for any thread."""
        with self._lock:
            sockets = tuple(self._sockets)
        for each in sockets:
            try:
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # not TLS's own, which may be in use just now
            except OSError:
                continue

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connection)

    def _answer(self, response: urllib3.BaseHTTPResponse) -> _Answer:
        self.status = response.status
        index = response.headers.get("X-Etcd-Index", "")
        self.index = int(index) if index.isdecimal() else 0
        data = bytearray()
        for chunk in response.stream(1 << 16):
            data += chunk
            if len(data) > MAX_ANSWER_BYTES:
                response.close()
                raise AnswerTooLong(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        response.release_conn()
        return _Answer(response.status, response.headers, bytes(data))


def make_client(settings: StoreSettings, endpoint: str, http: Http, *, time_limit: float) -> etcd.Client:
    """A client of one server.

    Args:
        settings: how to get in.
        endpoint: host:port of the server.
        http: what it sends its requests with.
        time_limit: seconds that it waits for a connection, and for each piece of an answer.
    """
    base = base_url(settings.protocol, endpoint)
    host = base.host or ""
    client = etcd.Client(
        host=f"[{host}]" if ":" in host else host,
        port=base.explicit_port,
        protocol=settings.protocol,
        read_timeout=time_limit,
        allow_redirect=False,  # a redirect would take the password along
        username=settings.username if settings.password else None,
        password=settings.password,
    )
    client.http.clear()
    client.http = http
    return client


def _pool(tls: ssl.SSLContext | None, opened: Callable[[socket.socket], None]) -> urllib3.PoolManager:
    """Connections that are known as soon as they stand."""

    class Plain(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            opened(self.sock)

    class Encrypted(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            opened(self.sock)

    class PlainPool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class EncryptedPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Encrypted

    if tls is not None and version("urllib3").startswith("1."):
        tls.check_hostname = False  # that urllib3 gives OpenSSL no name that is an address, and compares all by itself
    pool = urllib3.PoolManager(retries=False, ssl_context=tls)
    pool.pool_classes_by_scheme = {"http": PlainPool, "https": EncryptedPool}
    return pool


def _said_elsewhere(record: logging.LogRecord) -> bool:
    """Whether a line of python-etcd's log is to be seen: what fails here is told, or tried again, by who asked."""
    del record
    return not threading.current_thread().name.startswith(THREAD_NAME)


logging.getLogger("etcd.client").addFilter(_said_elsewhere)
