"""The store on servers that speak etcd's API v2 (etcd 2.3 to 3.5, with ``--enable-v2``).

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

python-etcd writes the requests and reads the answers, and :mod:`torchelastic.store.etcd_http` sends them: python-etcd
itself blocks, and repeats requests that failed. v2 keeps the last 1,000 changes of the whole store, so a watch that
falls behind has to list again. Folders whose keys have expired stay, empty.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import math
import re
import secrets
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import etcd
import msgspec

from torchelastic.errors import HistoryCompacted, LeaseLost, StoreError, StoreRefused, StoreUnavailable
from torchelastic.protocol import KEY_ROOT
from torchelastic.store.api import Change, Entry, Listing
from torchelastic.store.etcd_http import EtcdServers, NotAuthorized, WrongApi, unexpected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from torchelastic.store.api import StoreSettings

Answer = Any
"""An ``etcd.EtcdResult``; python-etcd has no types."""

_STORED: Final = re.compile(r"[0-9a-f]{12} (?P<lease>[0-9a-f]{1,16}) (?P<value>.*)", re.DOTALL)
_UNSAFE: Final = re.compile(rb"^[._]|[^A-Za-z0-9._-]")
_PART: Final = re.compile(r"(?:[A-Za-z0-9._-]|~[0-9a-f]{2})+|~")
_LEASES: Final = f"{KEY_ROOT}/_leases"  # the underscore hides it from lists and watches
_LEAF: Final = "~"
_EMPTY: Final = "~"
_TEXTS_KEPT: Final = 4
_REMOVALS: Final = frozenset({"delete", "expire", "compareAndDelete"})

_NOT_AS_EXPECTED: Final = (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist)
"""A condition of the request does not hold."""

_ABOUT_KEYS: Final = frozenset({100, 101, 105, 401})  # of these three exceptions, and of EtcdEventIndexCleared
_TRANSIENT: Final = frozenset({300, 301, 400})  # Raft's internal error, an election of a leader, a watcher cleared


class EtcdV2Store:
    """A :class:`~torchelastic.store.api.Store` on the servers of one etcd cluster.

    Args:
        settings: where they are and how to get in.

    Raises:
        SettingsError: an endpoint is not host:port, or a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._servers = EtcdServers(settings)
        self._python_etcd = _PythonEtcd()
        self._cluster_id = ""
        self._headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if settings.username is not None:
            credentials = f"{settings.username}:{settings.password or ''}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
        self._texts: dict[str, dict[str, int]] = {}  # by key: texts that were seen, each with its revision
        self._own: dict[int, set[str]] = {}  # by lease that only this client keeps alive: paths that are known to exist

    async def check(self) -> None:
        """Make sure that one of the servers can be used.

        Raises:
            StoreUnavailable: none answers.
            StoreRefused: one answers, but does not serve the API v2, or refuses the credentials.
        """
        await self._servers.check(lambda endpoint, _: self._index("/", at=endpoint))

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        node = await self._find(_path(key))
        return None if node is None else self._entry(key, node)

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        try:
            answer = await self._ask("read", _folder(prefix), recursive=True, quorum=True)
        except etcd.EtcdKeyNotFound as error:
            return Listing(_index_of(error), (), self._cluster_id)
        nodes = (_node(leaf) for leaf in answer.leaves if not leaf.dir)
        found = ((_key(node.path), node) for node in nodes)
        entries = (self._entry(key, node) for key, node in found if key is not None and key.startswith(prefix))
        return Listing(answer.etcd_index, tuple(sorted(entries, key=lambda entry: entry.key)), self._cluster_id)

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
                node = _node(await self._ask("delete", path, **compare))
                self._texts.pop(key, None)
                return node.modified
            ttl = await self._join(lease, path)
            node = await self._write(path, _text(value, lease), ttl, **(compare if expected else {"prevExist": False}))
        except _NOT_AS_EXPECTED:
            return None
        return self._written(key, lease, node)

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        path = _path(key)
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            await self._ask("delete", path)
        self._texts.pop(key, None)
        for paths in self._own.values():
            paths.discard(path)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        if prefix.endswith("/"):
            with contextlib.suppress(etcd.EtcdKeyNotFound):
                await self._ask("delete", _folder(prefix), recursive=True, dir=True)
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
            marker = _marker(_node(await self._ask("refresh", node.path, _seconds(marker.ttl))))
        except etcd.EtcdKeyNotFound:
            raise self._lost(lease) from None
        own = self._own.get(lease, set())
        for path in marker.keys:
            found = await self._if_under(lease, path, "refresh", _seconds(marker.ttl))
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
            await self._if_under(lease, path, "delete")
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            await self._ask("delete", node.path)
        self._own.pop(lease, None)

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        folder, limit = _folder(prefix), self._settings.request_timeout
        while True:
            index = await self._index(prefix, limit=limit)
            if start > index + 1:
                raise HistoryCompacted(f"etcd is at index {index}, before {start}: it has lost its data; list again")
            start = start or index + 1
            server, limit = self._servers.endpoints[0], self._settings.silence_limit / 2
            yield ()
            while isinstance(change := await self._next_change(folder, start, server), Change):
                start = change.revision + 1
                if change.key.startswith(prefix):
                    yield (change,)
            start = max(start, change + 1)

    async def close(self) -> None:
        """See :meth:`Store.close <torchelastic.store.api.Store.close>`."""
        await self._servers.close()

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
            return _node(await self._ask("read", path, quorum=True))
        except etcd.EtcdKeyNotFound:
            return None

    async def _write(self, path: str, text: str, ttl: float | None, **compare: Any) -> _Node:  # noqa: ANN401
        return _node(await self._ask("write", path, text, ttl=None if ttl is None else _seconds(ttl), **compare))

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

    async def _if_under(self, lease: int, path: str, method: str, *args: int) -> _Node | None:
        """Renew or remove a key if it still hangs on the lease; return what was found."""
        while (node := await self._find(path)) is not None and node.lease == lease:
            with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                await self._ask(method, path, *args, prevValue=node.text)
                break
        return node

    def _lost(self, lease: int) -> LeaseLost:
        self._own.pop(lease, None)
        return LeaseLost(f"lease {lease:x} has ended")

    # Requests

    async def _index(self, prefix: str, *, at: str | None = None, limit: float | None = None) -> int:
        """Return etcd's index as the majority of the servers has it; raise if the keys below the prefix are refused."""
        path = _folder(prefix).rstrip("/") + "/_none"  # a small answer: no key has this name
        try:
            index: int = (await self._ask("read", path, quorum=True, at=at, limit=limit)).etcd_index
        except etcd.EtcdKeyNotFound as error:
            return _index_of(error)
        return index

    async def _next_change(self, folder: str, start: int, server: str) -> Change | int:
        """Return the next change below a folder, with an empty key if the key is not one of the store's.

        If there is none: the index up to which there is none.
        """
        patience = self._settings.silence_limit / 2
        change = {"wait": True, "waitIndex": start, "recursive": True}
        try:
            answer = await self._ask("read", folder, at=server, limit=1.5 * patience, patience=patience, **change)
        except etcd.EtcdWatchTimedOut as quiet:
            return _index_of(quiet)
        except etcd.EtcdEventIndexCleared as error:
            raise HistoryCompacted(f"etcd no longer keeps the changes from index {start} on; list again") from error
        node, gone = _node(answer), answer.action in _REMOVALS
        if answer.dir and gone:
            raise HistoryCompacted(f"the folder {node.path} was removed from etcd with all keys in it; list again")
        key = _key(node.path)
        if key is None:
            return Change("", None, node.modified)
        if gone:
            self._texts.pop(key, None)
        return Change(key, None if gone else self._entry(key, node), node.modified)

    async def _ask(
        self,
        method: str,
        *args: str | int,
        at: str | None = None,
        limit: float | None = None,
        patience: float | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Answer:
        """Return the answer to a method of python-etcd.

        Args:
            method: its name.
            args: its arguments.
            at: ask this server only.
            limit: seconds for all of it; None for the request timeout.
            patience: seconds to wait for a change.
            options: its keyword arguments.

        Raises:
            EtcdException: etcd's answer is about keys: not as expected, or an event that is no longer kept.
            StoreUnavailable: no answer, or one that says "later".
            StoreRefused: an answer that says "no".
            EtcdWatchTimedOut: there was no change.
        """
        call = functools.partial(getattr(self._python_etcd, method), *args, **options)
        try:
            call()
        except _Request as request:
            verb, path, body = request.args

        async def exchange(endpoint: str, connect: float) -> Answer:
            sent = self._servers.request(verb, endpoint, path, connect=connect, body=body, headers=self._headers)
            async with sent as response:
                headers = response.headers
                self._cluster_id = headers.get("X-Etcd-Cluster-Id", "")
                try:
                    async with asyncio.timeout(patience):
                        data = await response.read()
                except TimeoutError:
                    raise etcd.EtcdWatchTimedOut(payload={"index": int(headers.get("X-Etcd-Index", 0))}) from None
            self._python_etcd.answer = SimpleNamespace(status=response.status, data=data, getheaders=lambda: headers)
            try:
                return call()
            except (etcd.EtcdException, ValueError) as error:  # ValueError: the answer is not text
                if _payload(error).get("errorCode") in _ABOUT_KEYS:
                    raise
                raise self._meaning(endpoint, error, response.status, data) from error
            finally:
                self._python_etcd.answer = None

        return await self._servers.ask(exchange, repeatable=method in {"read", "refresh"}, at=at, limit=limit)

    def _meaning(self, endpoint: str, error: Exception, status: int, data: bytes) -> StoreError:
        """Return the store's error for one of python-etcd."""
        where = f"etcd at {endpoint}"
        if isinstance(error, etcd.EtcdInsufficientPermissions):
            if self._settings.username is not None:
                return NotAuthorized(f"{where} does not accept the user name and password, or not for these keys")
            return StoreRefused(f"{where} wants a user name and a password")
        payload = _payload(error)
        if "errorCode" in payload:
            said = " ".join(str(payload[name]) for name in ("message", "cause") if payload.get(name))
            if status >= 500 or payload["errorCode"] in _TRANSIENT:
                return StoreUnavailable(f"{where} cannot answer now: {said}")
            return StoreRefused(f"{where} refuses: {said}")
        if status in {200, 201}:
            return WrongApi(f"what listens at {endpoint} does not answer as etcd's API v2 does")
        return unexpected(endpoint, "/v2/keys", status, data, lacking="its API v2 (--enable-v2=true, until etcd 3.5)")


class _PythonEtcd(etcd.Client):  # type: ignore[misc]
    """python-etcd without a connection: each method raises its request, or returns what it makes of ``answer``."""

    answer: object = None

    def api_execute(self, path: str, method: str, params: dict[str, str | int], timeout: None = None) -> object:
        """Take the place of python-etcd's method that sends a request."""
        del timeout
        if self.answer is not None:
            return self._handle_server_response(self.answer)
        fields = urlencode(params)
        raise _Request(method, path, fields.encode()) if method == "PUT" else _Request(method, f"{path}?{fields}", b"")


class _Request(BaseException):
    """A request of python-etcd: HTTP's method, path and body."""


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
    node = (answer.key, answer.value or "", answer.createdIndex, answer.modifiedIndex, answer.ttl)
    try:
        return msgspec.convert(dict(zip(_Node.__struct_fields__, node, strict=True)), _Node)
    except msgspec.ValidationError as error:
        raise WrongApi(f"what listens there does not answer as etcd's API v2 does: {error}") from error


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


def _seconds(ttl: float) -> int:
    return max(math.ceil(ttl), 1)


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


def _index_of(error: etcd.EtcdException) -> int:
    if not isinstance(index := error.payload.get("index"), int):
        raise error
    return index


def _payload(error: Exception) -> dict[str, Any]:
    payload = getattr(error, "payload", None)
    return payload if isinstance(payload, dict) else {}
