"""Stores that stand for another one: one that measures its requests, and one that is never refused for good."""

from __future__ import annotations

import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from torchelastic.errors import StoreError, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from contextlib import AbstractContextManager

    from torchelastic.store.api import Change, Entry, Listing, Store


_CONFIRMED_WATCH: Final = "confirmed watch"


class RequestEnded(Protocol):
    """Is called when a request has ended."""

    def __call__(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """Take note of a request.

        Args:
            request: the name of the store's method.
            seconds: how long it took.
            succeeded: whether the store answered; that a lease has ended is an answer, a refusal is not.
        """


class _Wrapper:
    """A store that passes every request on, within :meth:`_around`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _around(self, request: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        with self._around("get"):
            return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        with self._around("list"):
            return await self._store.list(prefix)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        with self._around("put"):
            return await self._store.put(key, value, lease=lease)

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.compare_and_swap <torchelastic.store.api.Store.compare_and_swap>`."""
        with self._around("compare_and_swap"):
            return await self._store.compare_and_swap(key, value, expected=expected, lease=lease)

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        with self._around("delete"):
            await self._store.delete(key)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        with self._around("delete_prefix"):
            await self._store.delete_prefix(prefix)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        with self._around("grant"):
            return await self._store.grant(ttl, lease=lease)

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        with self._around("keep_alive"):
            await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        with self._around("revoke"):
            await self._store.revoke(lease)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        async with aclosing(self._store.watch(prefix, start)) as batches:
            with self._around("watch"):
                confirmed = await anext(batches, ())
            yield confirmed
            with self._around(_CONFIRMED_WATCH):
                async for batch in batches:
                    yield batch

    async def close(self) -> None:
        """See :meth:`Store.close <torchelastic.store.api.Store.close>`."""
        await self._store.close()


class MeasuredStore(_Wrapper):
    """A store whose requests are measured; of a watch, the time until it is confirmed.

    Requests that are cancelled are not counted.

    Args:
        store: what it stands for; closed along with this.
        ended: called after each request.
    """

    def __init__(self, store: Store, ended: RequestEnded) -> None:
        super().__init__(store)
        self._ended = ended

    @contextmanager
    def _around(self, request: str) -> Iterator[None]:
        began = time.perf_counter()
        failure: StoreError | None = None
        try:
            yield
        except StoreError as error:
            failure = error
        if request != _CONFIRMED_WATCH:
            succeeded = not isinstance(failure, StoreUnavailable | StoreRefused)
            self._ended(request, time.perf_counter() - began, succeeded=succeeded)
        if failure is not None:
            raise failure


class NeverRefusingStore(_Wrapper):
    """A store that is unavailable, instead of refusing, once a key was put under a lease.

    Before a node has joined, a refusal (credentials, certificate, not an etcd) is reported to the user, who can mend
    it. After that training must not end for it: a proxy may answer for an etcd that is restarted, a certificate may be
    renewed late, a server that has come back may not know a token yet.

    Args:
        store: what it stands for; not closed along with this.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._joined = False

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        revision = await super().put(key, value, lease=lease)
        self._joined = self._joined or lease != 0
        return revision

    async def close(self) -> None:
        """Do nothing: the store is closed by its owner."""

    @contextmanager
    def _around(self, request: str) -> Iterator[None]:
        del request
        try:
            yield
        except StoreRefused as error:
            if not self._joined:
                raise
            raise StoreUnavailable(f"{error}") from error
