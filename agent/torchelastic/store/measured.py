"""A store that says how long its answers take."""

from __future__ import annotations

import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from torchelastic.errors import StoreError, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from torchelastic.store.api import Change, Entry, Listing, Store


class Answered(Protocol):
    """Is told of requests that have ended."""

    def __call__(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """A request has ended.

        Args:
            request: its name, as of the store's method.
            seconds: how long it took.
            succeeded: whether the store answered: that a lease has ended is an answer, too; a refusal is none.
        """


class MeasuredStore:
    """A :class:`~torchelastic.store.api.Store` whose every request is measured.

    Of a watch it is the time until the store confirms it. What is given up before it has ended does not count.

    Args:
        store: what it stands for; closed along with this.
        answered: is told.
    """

    def __init__(self, store: Store, answered: Answered) -> None:
        self._store = store
        self._answered = answered

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        with self._measured("get"):
            return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        with self._measured("list"):
            return await self._store.list(prefix)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        with self._measured("put"):
            return await self._store.put(key, value, lease=lease)

    async def swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.swap <torchelastic.store.api.Store.swap>`."""
        with self._measured("swap"):
            return await self._store.swap(key, value, expected=expected, lease=lease)

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        with self._measured("delete"):
            await self._store.delete(key)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        with self._measured("delete_prefix"):
            await self._store.delete_prefix(prefix)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        with self._measured("grant"):
            return await self._store.grant(ttl, lease=lease)

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        with self._measured("keep_alive"):
            await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        with self._measured("revoke"):
            await self._store.revoke(lease)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        async with aclosing(self._store.watch(prefix, start)) as batches:
            with self._measured("watch"):
                confirmed = await anext(batches, ())
            yield confirmed
            async for batch in batches:
                yield batch

    async def close(self) -> None:
        """See :meth:`Store.close <torchelastic.store.api.Store.close>`."""
        await self._store.close()

    @contextmanager
    def _measured(self, request: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except StoreError as error:
            failed = isinstance(error, StoreUnavailable | StoreRefused)
            self._answered(request, time.perf_counter() - began, succeeded=not failed)
            raise
        self._answered(request, time.perf_counter() - began, succeeded=True)
