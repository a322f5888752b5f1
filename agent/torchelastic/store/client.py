"""The store as nodes and the operator use it: connect with retries, list and watch a prefix, keep a run's lease."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from torchelastic.errors import LeaseLost, StoreError, StoreRefused, StoreTooLarge, StoreUnavailable
from torchelastic.protocol.keys import RUN_LEASE_RENEWALS, RUN_LEASE_TTL, run_lease
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from torchelastic.store.api import Change, Listing, Store, StoreSettings
    from torchelastic.store.etcd_v2 import EtcdV2Store
    from torchelastic.store.etcd_v3 import EtcdV3Store

_Result = TypeVar("_Result")

RETRY_MIN: Final = 0.1
RETRY_MAX: Final = 1.0
"""First and maximum delay between attempts, in seconds. Jitter shortens each delay by up to half, so that a thousand
nodes do not reconnect at the same time."""

_GRANTS: Final = 3
"""Maximum number of grants of the lease for one write; after that, the store counts as unavailable."""

logger = logging.getLogger(__name__)


class Backoff:
    """Delays between attempts to reach a store; they grow with ``attempts``, the consecutive failed attempts."""

    def __init__(self) -> None:
        self.attempts = 0

    async def wait(self) -> None:
        """Wait after a failed attempt."""
        longest: float = min(RETRY_MIN * 2 ** min(self.attempts, 10), RETRY_MAX)
        self.attempts += 1
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def reset(self) -> None:
        """Record that an attempt succeeded."""
        self.attempts = 0


async def connect(settings: StoreSettings) -> Store:
    """Return a store on the servers in ``settings``, after one of them has answered.

    If ``settings.version`` is None, the store uses etcd's API v3, or v2 if the servers do not serve v3.

    Raises:
        StoreUnavailable: no server answers.
        StoreRefused: a server answers, but does not have the requested API, or refuses the credentials.
    """
    # Not imported at the top: an agent starts its fork server before it imports an HTTP client.
    from torchelastic.store.etcd_errors import WrongApi
    from torchelastic.store.etcd_v3 import EtcdV3Store

    if settings.version == 2:
        return await _checked(_v2(settings))
    try:
        return await _checked(EtcdV3Store(settings))
    except WrongApi as no_v3:
        if settings.version is not None:
            raise
        try:
            store = await _checked(_v2(settings))
        except StoreTooLarge:
            raise
        except StoreRefused as no_v2:
            also = "nor does it serve the API v2" if isinstance(no_v2, WrongApi) else f"and {no_v2.message}"
            raise StoreRefused(f"{no_v3.message}; {also}", detail=no_v3.detail or no_v2.detail) from no_v2
        logger.debug("using etcd's API v2: %s", no_v3)
        return store


_WARNING_DELAY: Final = 3.0
"""Seconds without a store before a warning: the store of a new job may start after the first agent."""


async def connect_within(seconds: float, settings: StoreSettings | None) -> Store:
    """Return a store like :func:`connect`, retrying for at most ``seconds``; without settings, a store in memory."""
    return MemoryStore() if settings is None else await within(seconds, lambda: connect(settings))


async def within(seconds: float, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the result of the first attempt that reaches the store, retrying for at most ``seconds``.

    Raises:
        StoreUnavailable: no attempt has reached the store.
    """
    began = time.monotonic()
    backoff, warned = Backoff(), False
    while True:
        try:
            return await attempt()
        except StoreUnavailable as error:
            waited = time.monotonic() - began
            if waited > seconds:
                raise
            if waited > _WARNING_DELAY and not warned:
                warned = True
                logger.warning("%s; trying again for %.0f s", error, seconds - waited)
        await backoff.wait()


def _v2(settings: StoreSettings) -> EtcdV2Store:
    try:
        from torchelastic.store.etcd_v2 import EtcdV2Store
    except ImportError as error:
        raise StoreRefused("etcd's API v2 needs the package python-etcd: pip install python-etcd") from error
    return EtcdV2Store(settings)


async def _checked(store: EtcdV2Store | EtcdV3Store) -> Store:
    try:
        await store.check()
    except BaseException:
        await store.close()
        raise
    return store


async def follow(store: Store, prefix: str) -> AsyncGenerator[Listing | tuple[Change, ...], None]:
    """Yield a listing of a prefix, then its changes in batches; an empty batch means that the connection works.

    If the store no longer has the next change, another listing follows.
    """
    while True:
        read = -1
        # Watch before listing. In the other order, a change between the two makes etcd treat the watch as one that has
        # to catch up, which delays its changes by up to 100 ms.
        async with aclosing(store.watch(prefix)) as batches:
            async for batch in batches:
                if read < 0:
                    listing = await store.list(prefix)
                    read = listing.revision
                    yield listing
                    del listing
                news = tuple(change for change in batch if change.revision > read)
                if news or not batch:
                    yield news
                del batch, news  # while nothing changes, this keeps no message


async def follow_forever(
    store: Store, prefix: str, *, lost: Callable[[StoreUnavailable], None]
) -> AsyncGenerator[Listing | tuple[Change, ...], None]:
    """Follow a prefix; after each loss of the store, start again with a listing when the store is back.

    ``lost`` is called with the error each time that the store cannot be reached.

    Raises:
        StoreRefused: a retry would not help.
    """
    backoff = Backoff()
    while True:
        try:
            async with aclosing(follow(store, prefix)) as news:
                async for each in news:
                    backoff.reset()
                    yield each
        except StoreUnavailable as error:
            lost(error)
            await backoff.wait()


class RunLease:
    """Writes the keys of a run that outlive their writer: under the run's lease, which nodes and the operator renew.

    Each write assumes that the lease exists. If it does not exist (in a new run or an empty store), the write grants
    the lease and is repeated. So no method raises LeaseLost, which a caller with its own lease would mistake for the
    loss of that lease. The keys expire ``ttl`` seconds after the last renewal.
    """

    def __init__(self, store: Store, run_id: str, *, ttl: float = RUN_LEASE_TTL) -> None:
        self._store = store
        self._lease = run_lease(run_id)
        self._ttl = ttl

    async def put(self, key: str, value: bytes) -> int:
        """Set a key; see :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        return await self._under_lease(lambda: self._store.put(key, value, lease=self._lease))

    async def compare_and_swap(self, key: str, value: bytes, *, expected: int) -> int | None:
        """Set a key if it has not changed; see :meth:`~torchelastic.store.api.Store.compare_and_swap`."""
        return await self._under_lease(
            lambda: self._store.compare_and_swap(key, value, expected=expected, lease=self._lease),
        )

    async def keep(self) -> NoReturn:
        """Grant the lease and renew it until canceled; while the store is unreachable, retry.

        Raises:
            StoreRefused: a retry would not help.
        """
        backoff = Backoff()
        while True:
            try:
                await self._store.grant(self._ttl, lease=self._lease)
            except StoreUnavailable:  # the watch of the run's keys logs this
                await backoff.wait()
            else:
                backoff.reset()
                await asyncio.sleep(self._ttl / RUN_LEASE_RENEWALS)

    async def end(self) -> None:
        """Revoke the lease, which deletes its keys."""
        await self._store.revoke(self._lease)

    async def _under_lease(self, write: Callable[[], Awaitable[_Result]]) -> _Result:
        for _ in range(_GRANTS):
            try:
                return await write()
            except LeaseLost:
                await self._store.grant(self._ttl, lease=self._lease)
        raise StoreUnavailable("the store loses the run's lease as soon as it is granted")


class NodeStore:
    """The store of a node: measures requests; after the node has put a key, refusals count as unavailability.

    Before a node has joined, a refusal (credentials, certificate, not an etcd) is a user error. After that, a refusal
    must not end training: a proxy may answer for an etcd that restarts, a certificate may be renewed late, or a
    restarted server may not accept a token yet.

    Args:
        store: the store that receives the requests.
        answered: a function called after each request that was not canceled, with the method's name, the duration in
            seconds (of a watch, until it is confirmed), and ``succeeded``: whether the store answered. LeaseLost counts
            as an answer; a refusal does not.
    """

    def __init__(self, store: Store, answered: Callable[..., None] | None = None) -> None:
        self._store = store
        self._answered = answered
        self._joined = False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, name)

        async def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - the method's own arguments
            with self._request(name):
                return await method(*args, **options)

        return call

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        async with aclosing(self._store.watch(prefix)) as batches:
            with self._request("watch"):
                confirmed = await anext(batches, ())
            yield confirmed
            with self._request(""):
                async for batch in batches:
                    yield batch

    @contextmanager
    def _request(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        failure: StoreError | None = None
        try:
            yield
        except StoreError as error:
            failure = error
        if name and self._answered is not None:
            succeeded = not isinstance(failure, StoreUnavailable | StoreRefused)
            self._answered(name, time.perf_counter() - began, succeeded=succeeded)
        if isinstance(failure, StoreRefused) and self._joined:
            raise StoreUnavailable(f"{failure}") from failure
        if failure is not None:
            raise failure
        self._joined = self._joined or name == "put"
