"""A line to the servers of an etcd v2: one thread with connections of its own, on which one thing is asked at a time.

python-etcd blocks its caller and is not made for several threads at once. So each line has its clients to itself; the
event loop hands it work and awaits the result. Whoever no longer waits has the line's connections broken off: the
thread does not sit out an answer that nobody wants, and a line that is closed is gone at once.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

import etcd

from torchelastic.errors import StoreRefused, StoreUnavailable
from torchelastic.store.etcd_faults import Unreached
from torchelastic.store.etcd_v2_client import THREAD_NAME, Http, make_client
from torchelastic.store.etcd_v2_faults import is_missing, meaning

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from torchelastic.store.api import StoreSettings

Result = TypeVar("Result")

Answer = Any
"""An ``etcd.EtcdResult``; python-etcd has no types."""

_ABOUT_KEYS: Final = (
    etcd.EtcdAlreadyExist,
    etcd.EtcdCompareFailed,
    etcd.EtcdDirNotEmpty,
    etcd.EtcdEventIndexCleared,
    etcd.EtcdNotDir,
    etcd.EtcdNotFile,
    etcd.EtcdRootReadOnly,
    etcd.EtcdWatchTimedOut,
)
"""What whoever asked has to make sense of, beside a key that is not found."""

_GIVEN_UP: Final = "nobody waits for etcd's answer any more"

_numbers = itertools.count(1)


class Servers:
    """The servers of one cluster as one thread sees them; they are asked in turn, and one that failed is asked last.

    Args:
        settings: where they are and how to get in.
        tls: whom to trust; None for plain HTTP.
    """

    def __init__(self, settings: StoreSettings, tls: ssl.SSLContext | None) -> None:
        self._settings = settings
        self._https = {endpoint: Http(tls) for endpoint in settings.endpoints}
        self._clients: dict[str, Any] = {}
        self._order = list(settings.endpoints)
        self.asked = ""
        """The server that was asked last."""
        self._given_up = False

    @property
    def order(self) -> tuple[str, ...]:
        """The servers, in the order in which they are asked."""
        return tuple(self._order)

    def ask(self, request: Callable[[Any], Answer], *, repeatable: bool = False, at: str | None = None) -> Answer:
        """Send one request and give back the answer.

        Args:
            request: what to do with a client of python-etcd.
            repeatable: doing it twice does no harm, so another server may be asked when one has failed.
            at: ask this server and no other.

        Raises:
            EtcdException: etcd's answer is one about keys.
            StoreUnavailable: no answer, or one that says "later".
            StoreRefused: an answer that says "no".
        """
        endpoints = (at,) if at else self.order
        for index, endpoint in enumerate(endpoints):
            if self._given_up:
                raise StoreUnavailable(_GIVEN_UP)
            try:
                return self._ask(endpoint, request)
            except StoreUnavailable as error:
                self._order.remove(endpoint)
                self._order.append(endpoint)
                if index + 1 < len(endpoints) and (repeatable or isinstance(error, Unreached)):
                    continue
                if index == 0:
                    raise
                asked = ", ".join(endpoints[: index + 1])
                raise StoreUnavailable(
                    f"none of the etcd servers {asked} answers; the last failure: {error}"
                ) from error
        raise AssertionError("there is at least one endpoint")

    @property
    def index(self) -> int:
        """The index of etcd when that server began with its answer; 0 where it said none."""
        return self._https[self.asked].index

    def begin(self) -> None:
        """Somebody waits for what is asked from here on."""
        self._given_up = False

    def give_up(self) -> None:
        """Break off what is being asked, and ask nothing more of it; for any thread."""
        self._given_up = True
        for http in self._https.values():
            http.cut()

    def close(self) -> None:
        """Close all connections."""
        for http in self._https.values():
            http.clear()

    def _ask(self, endpoint: str, request: Callable[[Any], Answer]) -> Answer:
        self.asked = endpoint
        http = self._https[endpoint]
        http.forget()
        if endpoint not in self._clients:
            share = self._settings.request_timeout / len(self._https)
            self._clients[endpoint] = make_client(self._settings, endpoint, http, time_limit=share)
        try:
            return request(self._clients[endpoint])
        except _ABOUT_KEYS:
            raise
        except (etcd.EtcdException, ValueError) as error:  # ValueError: what came is no text
            if isinstance(error, etcd.EtcdKeyNotFound) and is_missing(error):
                raise
            known = self._settings.username is not None
            raise meaning(endpoint, error, status=http.status, known=known) from error


class Line:
    """One thread, and what it is asked to do, in turn.

    Args:
        servers: what it works with, and nobody else.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[Servers], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: Future[Any] | None = None
        self._closed = False
        # A daemon: no process stays for it, though a connection that is being made cannot be broken off.
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_NAME}-{next(_numbers)}", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Servers], Result], *, time_limit: float | None = None) -> Result:
        """Have the thread do this, and wait for it.

        Args:
            work: what to do; it may ask the servers several things.
            time_limit: seconds for all of it, waiting for its turn included.

        Raises:
            StoreUnavailable: it took too long, or the line has been closed.
            StoreRefused: etcd's answer makes no sense here.
        """
        if self._closed:
            raise StoreUnavailable("the connection to etcd has been closed")
        done: Future[Result] = Future()
        self._work.put((done, work))
        try:
            async with asyncio.timeout(time_limit):
                return await asyncio.wrap_future(done)
        except TimeoutError as error:
            self._abandon(done)
            where = ", ".join(self._servers.order)
            raise StoreUnavailable(f"etcd at {where} gave no answer within {time_limit:.3g} seconds") from error
        except asyncio.CancelledError:
            self._abandon(done)
            raise
        except StoreUnavailable as error:
            if self._closed:
                raise StoreUnavailable("the connection to etcd has been closed") from error
            raise
        except etcd.EtcdException as error:  # an answer that makes no sense, as where a folder stands in a key's place
            raise StoreRefused(f"etcd at {self._servers.asked} refuses: {error}") from error

    def close(self) -> None:
        """End the thread; whoever still waits gets StoreUnavailable."""
        with self._lock:
            self._closed = True
            self._work.put(None)
            self._servers.give_up()

    def _abandon(self, done: Future[Any]) -> None:
        with self._lock:
            if self._current is done:
                self._servers.give_up()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            done, work = item
            with self._lock:
                if not done.set_running_or_notify_cancel():
                    continue
                self._current = done
                if not self._closed:
                    self._servers.begin()
            self._do(done, work)
        self._servers.close()

    def _do(self, done: Future[Any], work: Callable[[Servers], Any]) -> None:
        try:
            result = work(self._servers)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            done.set_exception(error)
        else:
            done.set_result(result)
        finally:
            with self._lock:
                self._current = None
