"""The store on servers that speak etcd's API v2 (etcd 2.3 to 3.5, with ``--enable-v2``), through python-etcd.

=================  ====================================================================================================
the store          in v2
=================  ====================================================================================================
key                a path; its last part ends with ``~``, because in v2 a path is either a value or a folder
value              text that starts with a stamp of the write and the id of the lease: ``5f2a9c01d3e4 1f {"number":7}``
revision           etcd's index. Renewing a key raises the key's index, which no watch reports; an entry keeps the
                   revision at which this client first saw its text
compare-and-swap   compares the text, which no renewal changes
lease              a hidden key with a time to live that names the keys of the lease; each of them has the same time to
                   live, and keeping the lease alive renews them one by one
watch              one request for each change, which waits for it; between quiet ones the server is asked for its index
=================  ====================================================================================================

v2 keeps the last 1,000 changes of the whole store, so a watch that falls behind has to list again. Folders whose keys
have expired stay, empty.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from typing import TYPE_CHECKING, Any, Final

import etcd
import msgspec

from torchelastic.errors import HistoryCompacted, LeaseLost, StoreError, StoreRefused
from torchelastic.protocol import KEY_ROOT
from torchelastic.store.api import Change, Entry, Listing
from torchelastic.store.etcd_address import other_protocol
from torchelastic.store.etcd_errors import NoGateway, NotAuthorized
from torchelastic.store.etcd_v2_client import NOT_AS_EXPECTED, Answer, Client, V2Client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from torchelastic.store.api import StoreSettings

_STORED: Final = re.compile(r"[0-9a-f]{12} (?P<lease>[0-9a-f]{1,16}) (?P<value>.*)", re.DOTALL)
_UNSAFE: Final = re.compile(rb"^[._]|[^A-Za-z0-9._-]")
_PART: Final = re.compile(r"(?:[A-Za-z0-9._-]|~[0-9a-f]{2})+|~")
_LEASES: Final = f"{KEY_ROOT}/_leases"  # the underscore hides it from lists and watches
_LEAF: Final = "~"
_EMPTY: Final = "~"
_TEXTS_KEPT: Final = 4
_REMOVALS: Final = frozenset({"delete", "expire", "compareAndDelete"})


class EtcdV2Store:
    """A :class:`~torchelastic.store.api.Store` on the servers of one etcd cluster.

    Args:
        settings: where they are and how to get in.

    Raises:
        SettingsError: an endpoint is not host:port, or a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._client = V2Client(settings)
        self._texts: dict[str, dict[str, int]] = {}  # by key: texts that were seen, each with its revision
        self._own: dict[int, set[str]] = {}  # by lease that only this client keeps alive: paths that are known to exist

    async def check(self) -> None:
        """Make sure that one of the servers can be used.

        Raises:
            StoreUnavailable: none answers.
            StoreRefused: one answers, but does not serve the API v2, or refuses the credentials.
        """
        try:
            await self._index("/")
        except NotAuthorized:
            return  # other keys may be allowed
        except StoreError as error:
            for endpoint, base in self._client.bases.items():
                if protocol := await other_protocol(base):
                    raise StoreRefused(
                        f"etcd at {endpoint} speaks {protocol} only: write {protocol}:// before the address"
                    ) from error
            raise

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        node = await self._find(_path(key))
        return None if node is None else self._entry(key, node)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        folder = _folder(prefix)

        def read(client: Client) -> tuple[int, list[_Node], str]:
            try:
                answer = client.read(folder, recursive=True, quorum=True)
            except etcd.EtcdKeyNotFound as error:
                return _index_of(error), [], client.expected_cluster_id
            return (
                answer.etcd_index,
                [_node(leaf) for leaf in answer.leaves if not leaf.dir],
                client.expected_cluster_id,
            )

        index, nodes, cluster_id = await self._client.ask(read, repeatable=True)
        found = ((_key(node.path), node) for node in nodes)
        entries = (self._entry(key, node) for key, node in found if key is not None and key.startswith(prefix))
        return Listing(index, tuple(sorted(entries, key=lambda entry: entry.key)), cluster_id or "")

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        path, text = _path(key), _text(value, lease)
        ttl = await self._join(lease, path)
        while True:  # a plain "set" would create the key again
            with contextlib.suppress(etcd.EtcdKeyNotFound):
                return self._written(key, lease, await self._write(path, text, ttl, prevExist=True))
            with contextlib.suppress(etcd.EtcdAlreadyExist):
                return self._written(key, lease, await self._write(path, text, ttl, prevExist=False))

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.compare_and_swap <torchelastic.store.api.Store.compare_and_swap>`."""
        path = _path(key)
        if value is None and not expected:
            return None if await self._find(path) else await self._index(key)
        texts = reversed(self._texts.get(key, {}).items())  # the latest first: after a loss of data, revisions recur
        text = next((text for text, revision in texts if revision == expected), None)
        compare = {"prevIndex": expected} if text is None else {"prevValue": text}
        try:
            if value is None:
                node = _node(await self._client.ask(lambda client: client.delete(path, **compare)))
                self._texts.pop(key, None)
                return node.modified
            ttl = await self._join(lease, path)
            node = await self._write(path, _text(value, lease), ttl, **(compare if expected else {"prevExist": False}))
        except NOT_AS_EXPECTED:
            return None
        return self._written(key, lease, node)

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        path = _path(key)
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            await self._client.ask(lambda client: client.delete(path))
        self._texts.pop(key, None)
        for paths in self._own.values():
            paths.discard(path)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        if prefix.endswith("/"):
            folder = _folder(prefix)
            with contextlib.suppress(etcd.EtcdKeyNotFound):
                await self._client.ask(lambda client: client.delete(folder, recursive=True, dir=True))
            return
        for entry in (await self.list(prefix)).entries:
            await self.delete(entry.key)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        chosen = lease or secrets.randbits(62) + 1
        text = _text(msgspec.json.encode(_Lease(ttl)), 0)
        while True:
            try:
                await self._write(_lease_path(chosen), text, ttl, prevExist=False)
            except etcd.EtcdAlreadyExist:
                try:
                    await self.keep_alive(chosen)
                except LeaseLost:
                    continue
            if not lease:
                self._own[chosen] = set()
            return chosen

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        node, marker = await self._lease(lease)
        try:
            marker = _marker(await self._refresh(node.path, marker.ttl))
        except etcd.EtcdKeyNotFound:
            raise self._lost(lease) from None
        own = self._own.get(lease, set())
        for path in marker.keys:
            found = await self._if_under(lease, path, lambda path, text: self._refresh(path, marker.ttl, text))
            if found is None and path in own:
                raise self._lost(lease)
            if found is not None and found.lease != lease:
                own.discard(path)

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        try:
            node, marker = await self._lease(lease)
        except LeaseLost:
            return
        for path in marker.keys:
            await self._if_under(lease, path, self._remove)
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            await self._client.ask(lambda client: client.delete(node.path))
        self._own.pop(lease, None)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        folder, patience = _folder(prefix), self._settings.silence_limit / 2
        limit = self._settings.request_timeout
        while True:
            index = await self._index(prefix, limit)
            if start > index + 1:
                raise HistoryCompacted(f"etcd is at index {index}, before {start}: it has lost its data; list again")
            start = start or index + 1
            server, limit = self._client.first, patience
            yield ()
            while isinstance(change := await self._next_change(folder, start, server, patience), Change):
                start = change.revision + 1
                if change.key.startswith(prefix):
                    yield (change,)
            start = max(start, change + 1)

    async def close(self) -> None:
        """See :meth:`Store.close <torchelastic.store.api.Store.close>`."""
        self._client.close()

    # Keys

    def _entry(self, key: str, node: _Node) -> Entry:
        """Return the entry, with the revision at which this client first saw its text."""
        texts = self._texts.setdefault(key, {})
        if node.modified < max(texts.values(), default=0) and node.text not in texts:
            texts.clear()  # the revisions began again
        revision = texts.setdefault(node.text, node.modified)
        while len(texts) > _TEXTS_KEPT:
            del texts[next(iter(texts))]
        return Entry(key, node.value, node.created, revision)

    def _written(self, key: str, lease: int, node: _Node) -> int:
        if lease in self._own:
            self._own[lease].add(node.path)
        return self._entry(key, node).modified

    async def _find(self, path: str) -> _Node | None:
        try:
            return _node(await self._client.ask(lambda client: client.read(path, quorum=True), repeatable=True))
        except etcd.EtcdKeyNotFound:
            return None

    async def _write(self, path: str, text: str, ttl: float | None, **compare: Any) -> _Node:  # noqa: ANN401
        seconds = None if ttl is None else max(math.ceil(ttl), 1)
        return _node(await self._client.ask(lambda client: client.write(path, text, ttl=seconds, **compare)))

    async def _refresh(self, path: str, ttl: float, text: str | None = None) -> _Node:
        compare = {} if text is None else {"prevValue": text}
        seconds = max(math.ceil(ttl), 1)
        return _node(await self._client.ask(lambda client: client.refresh(path, seconds, **compare), repeatable=True))

    async def _remove(self, path: str, text: str) -> None:
        await self._client.ask(lambda client: client.delete(path, prevValue=text))

    # Leases

    async def _lease(self, lease: int) -> tuple[_Node, _Lease]:
        node = await self._find(_lease_path(lease))
        if node is None:
            raise self._lost(lease)
        return node, _marker(node)

    async def _join(self, lease: int, path: str) -> float | None:
        """Note that a key is about to be written under a lease; return the seconds that are left of it."""
        if not lease:
            return None
        while True:
            node, marker = await self._lease(lease)
            left = marker.ttl if node.ttl is None else node.ttl
            if path not in marker.keys:
                text = _text(msgspec.json.encode(_Lease(marker.ttl, (*marker.keys, path))), 0)
                try:
                    await self._write(node.path, text, left, prevValue=node.text)
                except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                    continue
            return left

    async def _if_under(self, lease: int, path: str, act: Callable[[str, str], Awaitable[object]]) -> _Node | None:
        """Renew or remove a key if it still hangs on the lease; return what was found."""
        while (node := await self._find(path)) is not None and node.lease == lease:
            with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                await act(path, node.text)
                break
        return node

    def _lost(self, lease: int) -> LeaseLost:
        self._own.pop(lease, None)
        return LeaseLost(f"lease {lease:x} has ended")

    # Requests

    async def _index(self, prefix: str, limit: float | None = None) -> int:
        """Return etcd's index as the majority of the servers has it; raise if the keys below the prefix are refused."""
        path = _folder(prefix).rstrip("/") + "/_none"  # a small answer: no key has this name

        def read(client: Client) -> int:
            try:
                index: int = client.read(path, quorum=True).etcd_index
            except etcd.EtcdKeyNotFound as error:
                return _index_of(error)
            return index

        return await self._client.ask(read, repeatable=True, limit=limit)

    async def _next_change(self, folder: str, start: int, server: str, patience: float) -> Change | int:
        """Return the next change below a folder, with an empty key if the key is not one of the store's.

        If there is none: the index up to which there is none.
        """

        def read(client: Client) -> Answer:
            try:
                return client.read(folder, wait=True, waitIndex=start, recursive=True, timeout=patience)
            except etcd.EtcdWatchTimedOut:
                return client.http.index

        try:
            answer = await self._client.ask(read, at=server, limit=1.5 * patience)
        except etcd.EtcdEventIndexCleared as error:
            raise HistoryCompacted(f"etcd no longer keeps the changes from index {start} on; list again") from error
        if isinstance(answer, int):
            return answer
        node, gone = _node(answer), answer.action in _REMOVALS
        if answer.dir and gone:
            raise HistoryCompacted(f"the folder {node.path} was removed from etcd with all keys in it; list again")
        key = _key(node.path)
        if key is None:
            return Change("", None, node.modified)
        if gone:
            self._texts.pop(key, None)
        return Change(key, None if gone else self._entry(key, node), node.modified)


class _Lease(msgspec.Struct, frozen=True):
    """The hidden key of a lease: its time to live, and the paths of the keys that were written under it."""

    ttl: float
    keys: tuple[str, ...] = ()


class _Node(msgspec.Struct, frozen=True):
    """A key as etcd has it."""

    path: str
    text: str
    created: int
    modified: int
    ttl: int | None

    @property
    def lease(self) -> int:
        """The lease that it was written under; 0 for none."""
        stored = _STORED.fullmatch(self.text)
        return int(stored["lease"], 16) if stored else 0

    @property
    def value(self) -> bytes:
        stored = _STORED.fullmatch(self.text)  # others may have written it
        return stored["value"].encode("latin-1", "replace") if stored else self.text.encode("utf-8", "surrogatepass")


def _node(answer: Answer) -> _Node:
    node = {
        "path": answer.key,
        "text": answer.value or "",
        "created": answer.createdIndex,
        "modified": answer.modifiedIndex,
        "ttl": answer.ttl,
    }
    try:
        return msgspec.convert(node, _Node)
    except msgspec.ValidationError as error:
        raise NoGateway(f"what listens there does not answer as etcd's API v2 does: {error}") from error


def _text(value: bytes, lease: int) -> str:
    """Return the text that stands for a value; latin-1 because it has a character for each byte."""
    return f"{secrets.token_hex(6)} {lease:x} {value.decode('latin-1')}"


def _marker(node: _Node) -> _Lease:
    try:
        return msgspec.json.decode(node.value, type=_Lease)
    except msgspec.DecodeError as error:
        raise LeaseLost(f"{node.path} in etcd is not the record of a lease") from error


def _lease_path(lease: int) -> str:
    return f"{_LEASES}/{lease:x}"


def _path(key: str) -> str:
    return "/".join(map(_escaped, key.split("/")))[len(_EMPTY) :] + _LEAF


def _folder(prefix: str) -> str:
    """Return the folder below which all keys with the prefix stand."""
    return "/".join(map(_escaped, prefix.split("/")[:-1]))[len(_EMPTY) :] or "/"


def _key(path: str) -> str | None:
    """Return the key whose value stands under a path; None if this adapter did not write it."""
    parts = path[: -len(_LEAF)].split("/")[1:]
    if not path.endswith(_LEAF) or not all(map(_PART.fullmatch, parts)):
        return None
    return "".join(f"/{_unescaped(part)}" for part in parts)


def _escaped(part: str) -> str:
    return _UNSAFE.sub(lambda byte: b"~%02x" % byte[0][0], part.encode("utf-8", "surrogateescape")).decode() or _EMPTY


def _unescaped(part: str) -> str:
    if part == _EMPTY:
        return ""
    return re.sub(rb"~(..)", lambda match: bytes.fromhex(match[1].decode()), part.encode()).decode(
        "utf-8", "surrogateescape"
    )


def _index_of(error: etcd.EtcdKeyNotFound) -> int:
    if not isinstance(index := error.payload.get("index"), int):
        raise error
    return index
