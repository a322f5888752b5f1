"""The store on servers that speak etcd's API v2 (etcd 2.3 to 3.5, with ``--enable-v2``), through python-etcd.

Everything that the store promises is made of what v2 has:

=================  ====================================================================================================
the store          in v2
=================  ====================================================================================================
revision           etcd's index. It counts renewals of keys, too, which no watch tells: an entry that was only renewed
                   is known by the stamp of its last write, and keeps the revision at which this client first saw it
compare-and-swap   by the index of the last change; where a key was only renewed since, by that stamp
lease              a time to live on each key, renewed key by key (:mod:`torchelastic.store.etcd_v2_leases`)
watch              one request for each change, which waits for it; a quiet one ends within half of the silence limit,
                   and the server is asked for something small before the next
=================  ====================================================================================================

What v2 cannot do: it keeps the last 1,000 changes of the whole store, so a watch that falls behind has to list again;
and the folders of keys that have ended by themselves stay, empty.

python-etcd blocks: requests go through one thread, and each watch has another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import etcd

from torchelastic.errors import HistoryCompacted, LeaseLost, StoreError, StoreRefused, StoreUnavailable
from torchelastic.store import etcd_v2_leases as leases
from torchelastic.store import etcd_v2_requests as requests
from torchelastic.store.api import Change, Entry, Listing
from torchelastic.store.etcd_address import servers, speaks_http, speaks_tls, tls_context
from torchelastic.store.etcd_faults import NotAuthorized
from torchelastic.store.etcd_v2_line import Line, Servers
from torchelastic.store.etcd_v2_names import Stored, folder_of, key_of, path_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from torchelastic.store.api import StoreSettings

Result = TypeVar("Result")

_STAMPS_KEPT: Final = 16
"""So many writes of each key are known again."""


class EtcdV2Store:
    """A :class:`~torchelastic.store.api.Store` on the servers of one etcd cluster.

    Args:
        settings: where they are and how to get in.

    Raises:
        SettingsError: an endpoint is no host:port, or a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._bases = servers(settings)
        self._tls = tls_context(settings)
        self._lines: set[Line] = set()
        self._closed = False
        self._requests = self._line()
        self._leases: dict[int, leases.OwnLease] = {}
        self._stamps: dict[str, dict[str, int]] = {}

    async def check(self) -> None:
        """Make sure that one of the servers can be used.

        Raises:
            StoreUnavailable: none answers.
            StoreRefused: one answers, but does not serve the API v2, or refuses the credentials.
        """
        try:
            await self._do(lambda servers: requests.current_index(servers, "/"))
        except NotAuthorized:
            return  # it may be that these keys are not this user's; which are will show
        except StoreError as error:
            for endpoint, base in self._bases.items():
                if await (speaks_tls(base) if self._tls is None else speaks_http(base)):
                    other = "https" if self._tls is None else "http"
                    raise StoreRefused(
                        f"etcd at {endpoint} speaks {other} only: write {other}:// before the address"
                    ) from error
            raise

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        node = await self._do(lambda servers: requests.find(servers, path_of(key)))
        return None if node is None else self._seen(key, node)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        index, nodes = await self._do(lambda servers: requests.find_all(servers, prefix))
        return Listing(index, tuple(self._seen(key, node) for key, node in nodes))

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        path, stored = path_of(key), Stored.new(value, lease)

        def put(servers: Servers, ttl: float | None) -> int:
            return requests.put(servers, path, stored, ttl).modified

        revision = await self._under(lease, path, stored, put)
        self._note(key, stored.stamp, revision)
        return revision

    async def swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.swap <torchelastic.store.api.Store.swap>`."""
        path, stamp = path_of(key), self._stamp(key, expected)
        if value is None:
            gone = await self._do(lambda servers: _removed(servers, path, expected, stamp))
            if gone is not None:
                self._forget(key)
            return gone
        stored = Stored.new(value, lease)
        revision = await self._under(
            lease, path, stored, lambda servers, ttl: _swapped(servers, path, stored, ttl, expected, stamp)
        )
        if revision is not None:
            self._note(key, stored.stamp, revision)
        return revision

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        path = path_of(key)
        await self._do(lambda servers: requests.delete(servers, path))
        self._forget(key)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""

        def delete(servers: Servers) -> list[str]:
            # One by one: the removal of a folder would be told as one change.
            keys = [key for key, _ in requests.find_all(servers, prefix)[1]]
            for key in keys:
                requests.delete(servers, path_of(key))
            requests.remove_empty_folders(servers, [path_of(key) for key in keys])
            return keys

        for key in await self._do(delete):
            self._forget(key)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        if lease:
            await self._do(lambda servers: leases.grant_shared(servers, lease, ttl))
            return lease
        self._check_open()
        own = leases.OwnLease(secrets.randbits(62) + 1, ttl, _now() + ttl)
        self._leases[own.id] = own
        return own.id

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        own = self._own(lease)
        if own is None:
            await self._do(lambda servers: leases.keep_shared(servers, lease))
            return
        kept = own.copy()
        try:
            passed_on = await self._do(lambda servers: leases.keep_own(servers, kept))
        except LeaseLost:
            self._leases.pop(lease, None)
            raise
        own.ends_at = _now() + own.ttl
        for path in passed_on:
            if own.texts.get(path) == kept.texts[path]:
                own.drop(path)

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        own = self._leases.get(lease)
        if own is None:
            await self._do(lambda servers: leases.end_shared(servers, lease))
            return
        ending = own.copy()
        await self._do(lambda servers: leases.end_own(servers, ending))
        self._leases.pop(lease, None)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        patience = self._settings.silence_limit / 2
        folder = folder_of(prefix)
        line = self._line()
        try:
            server, index = await self._confirmed(line, prefix, start, self._settings.request_timeout)
            start = start or index + 1
            yield ()
            while True:
                waiting = partial(requests.next_change, folder=folder, start=start, at=server, patience=patience)
                news = await line.run(waiting, time_limit=1.5 * patience)
                if isinstance(news, int):
                    start = news + 1
                    server, _ = await self._confirmed(line, prefix, start, patience)
                    yield ()
                    continue
                path, node, revision = news
                start = revision + 1
                key = key_of(path)
                if key is None or not key.startswith(prefix):
                    continue
                if node is None:
                    self._stamps.pop(key, None)
                yield (Change(key, None if node is None else self._seen(key, node), revision),)
        finally:
            line.close()
            self._lines.discard(line)

    async def close(self) -> None:
        """See :meth:`Store.close <torchelastic.store.api.Store.close>`."""
        self._closed = True
        for line in self._lines:
            line.close()

    async def _confirmed(self, line: Line, prefix: str, start: int, time_limit: float) -> tuple[str, int]:
        """A server that is well and lets us read below the prefix, with its index; made sure that it kept its data.

        Raises:
            StoreUnavailable: none answered in time.
            HistoryCompacted: the index is before ``start``: the data were lost.
        """
        server, index = await line.run(lambda servers: requests.current_index(servers, prefix), time_limit=time_limit)
        if start > index + 1:
            raise HistoryCompacted(f"etcd stands at index {index}, before {start}: it has lost its data; list again")
        return server, index

    async def _under(
        self, lease: int, path: str, stored: Stored, write: Callable[[Servers, float | None], Result]
    ) -> Result:
        """Write a key under a lease: with the time to live that this gives it."""
        if not lease:
            return await self._do(lambda servers: write(servers, None))
        own = self._own(lease)
        if own is None:
            return await self._do(lambda servers: write(servers, leases.join_shared(servers, lease, path)))
        before = own.note(path, stored.text)
        result = await self._do(lambda servers: write(servers, own.ttl))
        if result is None:
            own.restore(path, before)
        else:
            own.unsure.discard(path)
        return result

    def _own(self, lease: int) -> leases.OwnLease | None:
        """The lease, where it is one that only this client knows.

        Raises:
            LeaseLost: it is, and has ended.
        """
        own = self._leases.get(lease)
        if own is not None and not own.texts and own.ends_at < _now():
            del self._leases[lease]
            raise leases.lost(lease)
        return own

    async def _do(self, work: Callable[[Servers], Result]) -> Result:
        return await self._requests.run(work, time_limit=self._settings.request_timeout)

    def _line(self) -> Line:
        self._check_open()
        line = Line(Servers(self._settings, self._tls))
        self._lines.add(line)
        return line

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the connection to etcd has been closed")

    def _seen(self, key: str, node: requests.Node) -> Entry:
        return Entry(key, node.stored.value, node.created, self._note(key, node.stored.stamp, node.modified))

    def _note(self, key: str, stamp: str, revision: int) -> int:
        """Remember at which revision a write was first seen; gives that back."""
        if not stamp:
            return revision
        stamps = self._stamps.setdefault(key, {})
        first = stamps.setdefault(stamp, revision)
        if len(stamps) > _STAMPS_KEPT:
            del stamps[next(iter(stamps))]
        return first

    def _stamp(self, key: str, revision: int) -> str:
        """Which write was seen at a revision; empty where none is known. The latest, should revisions begin anew."""
        stamps = self._stamps.get(key, {})
        return next((stamp for stamp, first in reversed(stamps.items()) if first == revision), "")

    def _forget(self, key: str) -> None:
        """This client has removed a key: nothing hangs on a lease for it any more."""
        self._stamps.pop(key, None)
        for own in self._leases.values():
            own.drop(path_of(key))


def _swapped(servers: Servers, path: str, stored: Stored, ttl: float | None, expected: int, stamp: str) -> int | None:
    if expected:
        return requests.swap(servers, path, stored, ttl, expected=expected, stamp=stamp)
    with contextlib.suppress(etcd.EtcdAlreadyExist):
        return requests.create(servers, path, stored, ttl).modified
    return None


def _removed(servers: Servers, path: str, expected: int, stamp: str) -> int | None:
    if expected:
        return requests.swap(servers, path, None, None, expected=expected, stamp=stamp)
    return requests.absent(servers, path)


def _now() -> float:
    return asyncio.get_running_loop().time()
