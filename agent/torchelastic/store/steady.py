"""The store as a node has it that is in a run: whatever it answers from then on, it is away, and may be back.

Before a node is in, a refusal (of the credentials, of the certificate, by something that is no etcd) is told to whoever
started it, who can mend it. Later, training must not end for it: a proxy answers in the place of an etcd that is being
restarted, a certificate is renewed too late, a token is not known yet to a server that has come back.
"""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from torchelastic.errors import StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from torchelastic.store.api import Change, Entry, Listing, Store


class SteadyStore:
    """A :class:`~torchelastic.store.api.Store` that refuses nothing any more once it has taken a leased key.

    Args:
        store: what it stands for. It is not closed along with this.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._let_in = False

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        with self._away_where_it_refuses():
            return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        with self._away_where_it_refuses():
            return await self._store.list(prefix)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        with self._away_where_it_refuses():
            revision = await self._store.put(key, value, lease=lease)
        self._let_in = self._let_in or lease != 0
        return revision

    async def swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.swap <torchelastic.store.api.Store.swap>`."""
        with self._away_where_it_refuses():
            return await self._store.swap(key, value, expected=expected, lease=lease)

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        with self._away_where_it_refuses():
            await self._store.delete(key)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        with self._away_where_it_refuses():
            await self._store.delete_prefix(prefix)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        with self._away_where_it_refuses():
            return await self._store.grant(ttl, lease=lease)

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        with self._away_where_it_refuses():
            await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        with self._away_where_it_refuses():
            await self._store.revoke(lease)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        async with aclosing(self._store.watch(prefix, start)) as batches:
            with self._away_where_it_refuses():
                async for batch in batches:
                    yield batch

    async def close(self) -> None:
        """Nothing: whoever has made the store closes it."""

    @contextmanager
    def _away_where_it_refuses(self) -> Iterator[None]:
        try:
            yield
        except StoreRefused as error:
            if not self._let_in:
                raise
            raise StoreUnavailable(f"{error}") from error
