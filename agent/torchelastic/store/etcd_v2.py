"""The store on servers with etcd's API v2 (etcd 2.3 to 3.5, with ``--enable-v2``).

=================  ====================================================================================================
the store          in v2
=================  ====================================================================================================
key                a path; its last part ends with ``~``, because in v2 a path is either a value or a folder
value              a string that starts with a stamp of the write and the lease's id: ``5f2a9c01d3e4 1f {"number":7}``
revision           etcd's index. A renewal increments the index of the key, but no watch reports it; an entry keeps the
                   revision at which this client first saw the entry's stamp
compare-and-swap   reads the key, then compares the string, which no renewal changes
lease              exists only in the clients that granted it. Its keys have the time to live of the lease. Renewing
                   the lease renews each key. Granting or revoking it finds other clients' keys by the id in the string
watch              one request for each change, which waits for the change; if none comes, a request for etcd's index
=================  ====================================================================================================

python-etcd only builds the requests and parses the answers, because its own client blocks and repeats failed requests.
:class:`~torchelastic.store.etcd_v3.EtcdServers` sends the requests. v2 keeps the last 1,000 changes of the whole store,
so a watch that falls behind has to list again. After the keys of a folder have expired, the empty folder remains.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import secrets
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlencode

import etcd
import msgspec

from torchelastic.errors import LeaseLost, StoreError, StoreRefused, StoreUnavailable
from torchelastic.protocol.keys import KEY_ROOT
from torchelastic.store.api import MAX_ENTRIES, Change, Entry, Listing, too_large
from torchelastic.store.etcd_errors import NotAuthorized, WrongApi, read_answer, unexpected
from torchelastic.store.etcd_v3 import EtcdServers

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncGenerator

    from torchelastic.store.api import StoreSettings

Answer = Any
"""An ``etcd.EtcdResult``; python-etcd has no types."""

_STORED: Final = re.compile(r"(?P<stamp>[0-9a-f]{12}) (?P<lease>[0-9a-f]{1,16}) (?P<value>.*)", re.DOTALL)
_LEAF: Final = "~"
_EMPTY: Final = "~"
_MAX_STAMPS: Final = 4
_VALUES: Final = 128 * MAX_ENTRIES
"""Maximum number of JSON values in an answer, including those of the records of a thousand nodes."""
_REMOVALS: Final = frozenset({"delete", "expire", "compareAndDelete"})

_NOT_AS_EXPECTED: Final = (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist)
"""The errors for a condition of the request that does not hold."""

_Index = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

_KEY_ERROR_CODES: Final = frozenset({100, 101, 105, 401})  # the codes of these errors and of EtcdEventIndexCleared
_TRANSIENT_CODES: Final = frozenset({300, 301, 400})  # an internal error of Raft, a leader election, a cleared watcher


class EtcdV2Store:
    """A :class:`~torchelastic.store.api.Store` on the servers of one etcd cluster; raises like :class:`EtcdServers`."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._servers = EtcdServers(settings)
        self._python_etcd = _PythonEtcd()
        self._cluster_id = ""
        self._headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if settings.username is not None:
            credentials = f"{settings.username}:{settings.password or ''}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
        self._revisions: dict[str, dict[str, int]] = {}  # the last ones seen, by key and stamp
        self._leases: dict[int, _Lease] = {}

    async def check(self) -> None:
        """Check that one of the servers can be used; raise as :func:`torchelastic.store.client.connect` does."""
        await self._servers.check(lambda endpoint: self._index("/", endpoint=endpoint))

    async def get(self, key: str) -> Entry | None:
        node = await self._find(_path(key))
        return None if node is None else self._entry(key, node)

    async def list(self, prefix: str) -> Listing:
        index, nodes = await self._below(prefix)
        if len(nodes) > MAX_ENTRIES:
            raise too_large(f"etcd at {', '.join(self._settings.endpoints)}")
        keyed = ((_key(node.path), node) for node in nodes)
        found = {key: node for key, node in keyed if key is not None and key.startswith(prefix)}
        for key in [key for key in self._revisions if key.startswith(prefix) and key not in found]:
            del self._revisions[key]
        entries = (self._entry(key, node) for key, node in sorted(found.items()))
        return Listing(index, tuple(entries), self._cluster_id)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        path, text, held = _path(key), _text(value, lease), self._held(lease)
        while True:  # a plain "set" would recreate an expired key
            with contextlib.suppress(etcd.EtcdKeyNotFound):
                return await self._write(key, text, held, prevExist=True)
            if path in held.texts:
                raise self._lost(lease)
            with contextlib.suppress(etcd.EtcdAlreadyExist):
                return await self._write(key, text, held, prevExist=False)

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        held = self._held(lease)
        compare: dict[str, Any] = {"prevExist": False}
        if expected:
            node = await self._find(_path(key))
            if node is None or self._entry(key, node).mod_revision != expected:
                return None
            compare = {"prevValue": node.text}
        try:
            if value is None:
                return await self._delete(_path(key), **compare)
            return await self._write(key, _text(value, lease), held, **compare)
        except _NOT_AS_EXPECTED:
            return None

    async def delete(self, key: str) -> None:
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            await self._delete(_path(key))

    async def delete_prefix(self, prefix: str) -> None:
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            await self._call("delete", _folder(prefix), recursive=True, dir=True)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        chosen = lease or secrets.randbits(62) + 1
        while True:
            texts = await self._texts_under(lease) if lease else {}
            former = self._leases.get(chosen, _Lease())
            self._settings.received(_memory(texts) - _memory(former.texts))
            self._leases[chosen] = _Lease(ttl, time.monotonic() + ttl, texts)
            with contextlib.suppress(LeaseLost):  # a key was deleted meanwhile
                await self.keep_alive(chosen)
                return chosen

    async def keep_alive(self, lease: int) -> None:
        held = self._held(lease)
        ends = time.monotonic() + held.ttl
        for path, text in tuple(held.texts.items()):
            try:
                await self._call("refresh", path, _seconds(held.ttl), prevValue=text)
            except _NOT_AS_EXPECTED as error:
                if held.texts.get(path) != text:
                    continue  # this client has written or deleted the key meanwhile
                if isinstance(error, etcd.EtcdKeyNotFound):
                    raise self._lost(lease) from None
                del held.texts[path]  # another client has written the key
        held.ends = ends

    async def revoke(self, lease: int) -> None:
        for path, text in (await self._texts_under(lease)).items():
            with contextlib.suppress(*_NOT_AS_EXPECTED):
                await self._delete(path, prevValue=text)
        self._leases.pop(lease, None)

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        folder, limit = _folder(prefix), self._settings.silence_limit / 2
        start, timeout = 0, self._settings.request_timeout
        while True:
            index = await self._index(prefix, timeout=timeout)
            if start > index + 1:
                return  # etcd has lost its data
            start, timeout, server = start or index + 1, limit, self._servers.endpoints[0]
            yield ()
            try:
                while True:
                    next_change = {"wait": True, "waitIndex": start, "recursive": True}
                    answer = await self._call("read", folder, endpoint=server, limit=limit, **next_change)
                    node, removed = _node(answer), answer.action in _REMOVALS
                    if answer.dir and removed:
                        return  # the folder was deleted with all its keys
                    start, key = node.mod_revision + 1, _key(node.path)
                    if key is not None and key.startswith(prefix):
                        if removed:
                            self._revisions.pop(key, None)
                        yield (Change(key, None if removed else self._entry(key, node), node.mod_revision),)
                    del answer, node  # while nothing changes, this keeps no message
            except etcd.EtcdWatchTimedOut as quiet:
                start = max(start, _index_of(quiet) + 1)
            except etcd.EtcdEventIndexCleared:
                return

    async def close(self) -> None:
        await self._servers.close()

    # Keys

    def _entry(self, key: str, node: _Node) -> Entry:
        """Return the entry, with the revision at which this client first saw the entry's stamp."""
        seen = self._revisions.setdefault(key, {})
        revision = seen.setdefault(node.stamp or str(node.mod_revision), node.mod_revision)
        if len(seen) > _MAX_STAMPS:
            del seen[next(iter(seen))]
        return Entry(key, node.value, node.create_revision, revision)

    async def _find(self, path: str) -> _Node | None:
        try:
            return _node(await self._call("read", path, quorum=True))
        except etcd.EtcdKeyNotFound:
            return None

    async def _below(self, prefix: str) -> tuple[int, builtins.list[_Node]]:
        """Return etcd's index, and the values in the folder of a prefix."""
        try:
            # With a trailing slash, etcd allows this to users with access to only the keys below KEY_ROOT.
            answer = await self._call("read", _folder(prefix).rstrip("/") + "/", recursive=True, quorum=True)
        except etcd.EtcdKeyNotFound as error:
            return _index_of(error), []
        return answer.etcd_index, [_node(leaf) for leaf in answer.leaves if not leaf.dir]

    async def _write(self, key: str, text: str, held: _Lease, **compare: Any) -> int:  # noqa: ANN401
        """Write a key under a lease; return the revision."""
        ttl = None if math.isinf(held.ttl) else _seconds(held.ends - time.monotonic())
        node = _node(await self._call("write", _path(key), text, ttl=ttl, **compare))
        held.texts[node.path] = text
        return self._entry(key, node).mod_revision

    async def _delete(self, path: str, **compare: Any) -> int:  # noqa: ANN401
        node = _node(await self._call("delete", path, **compare))
        for held in self._leases.values():
            held.texts.pop(path, None)
        return node.mod_revision

    # Leases

    def _held(self, lease: int) -> _Lease:
        """Return a lease; lease 0 is for keys that do not expire, and never expires."""
        held = self._leases.get(lease, _Lease()) if lease else _Lease(math.inf, math.inf)
        if held.ends <= time.monotonic():
            raise self._lost(lease)
        return held

    def _lost(self, lease: int) -> LeaseLost:
        self._leases.pop(lease, None)
        return LeaseLost(f"lease {lease:x} has expired")

    async def _texts_under(self, lease: int) -> dict[str, str]:
        """Return the stored strings of all keys under a lease, by path."""
        _, nodes = await self._below(f"{KEY_ROOT}/")
        return {node.path: node.text for node in nodes if node.lease == lease}

    # Requests

    async def _index(self, prefix: str, *, endpoint: str | None = None, timeout: float | None = None) -> int:  # noqa: ASYNC109
        """Return etcd's index by a quorum read; raise if access to the keys below the prefix is refused."""
        path = _folder(prefix).rstrip("/") + "/_none"  # no key has this name, so the answer is small
        try:
            index: int = (await self._call("read", path, quorum=True, endpoint=endpoint, timeout=timeout)).etcd_index
        except etcd.EtcdKeyNotFound as error:
            return _index_of(error)
        return index

    async def _call(
        self,
        method: str,
        *args: str | int,
        endpoint: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as of EtcdServers.call
        limit: float = 0.0,
        **options: Any,  # noqa: ANN401
    ) -> Answer:
        """Return the answer to a method of python-etcd; for ``endpoint`` and ``timeout``, see :meth:`EtcdServers.call`.

        A request that waits for a change waits for ``limit`` seconds.

        Raises:
            EtcdException: the answer is about keys: a condition does not hold, or etcd no longer keeps an event.
            StoreUnavailable: there was no answer, or the answer is a temporary error.
            StoreRefused: the answer is a permanent error.
            EtcdWatchTimedOut: there was no change.
        """
        verb, path, params = getattr(self._python_etcd, method)(*args, **options)
        fields = urlencode(params)
        path, body = (path, fields.encode()) if verb == "PUT" else (f"{path}?{fields}", b"")

        async def send(server: str) -> Answer:
            sent = self._servers.request(verb, server, path, body=body, headers=self._headers)
            async with sent as response:
                headers = response.headers
                self._cluster_id = headers.get("X-Etcd-Cluster-Id", "")
                try:
                    async with asyncio.timeout(limit or None):
                        received = self._settings.received
                        data = await read_answer(server, response, signs=b"{[,", limit=_VALUES, received=received)
                except TimeoutError:
                    raise etcd.EtcdWatchTimedOut(payload={"index": int(headers.get("X-Etcd-Index", 0))}) from None
            try:
                return self._python_etcd.parse_answer(
                    SimpleNamespace(status=response.status, data=data, getheaders=lambda: headers)
                )
            except (etcd.EtcdException, ValueError, RecursionError) as error:  # ValueError: the answer is not UTF-8
                if _payload(error).get("errorCode") in _KEY_ERROR_CODES:
                    raise
                raise self._store_error(server, error, response.status, data) from error

        timeout = timeout or 1.5 * limit
        return await self._servers.call(
            send, idempotent=method in {"read", "refresh"}, endpoint=endpoint, timeout=timeout
        )

    def _store_error(self, endpoint: str, error: Exception, status: int, data: bytearray) -> StoreError:
        """Convert an error of python-etcd to an error of the store."""
        where = f"etcd at {endpoint}"
        if isinstance(error, etcd.EtcdInsufficientPermissions):
            if self._settings.username is not None:
                return NotAuthorized(f"{where} does not accept the user name and password, or not for these keys")
            return StoreRefused(f"{where} requires a user name and a password")
        payload = _payload(error)
        if "errorCode" in payload:
            message = " ".join(str(payload[name]) for name in ("message", "cause") if payload.get(name))
            if status >= 500 or payload["errorCode"] in _TRANSIENT_CODES:
                return StoreUnavailable(f"{where} cannot answer now: {message}")
            return StoreRefused(f"{where} refuses: {message}")
        if status in {200, 201}:
            return WrongApi(f"the server at {endpoint} does not answer like etcd's API v2")
        return unexpected(endpoint, "/v2/keys", status, data, lacking="its API v2 (--enable-v2=true, until etcd 3.5)")


class _PythonEtcd(etcd.Client):  # type: ignore[misc]
    """python-etcd's client without a connection: each method returns its request."""

    def api_execute(self, path: str, method: str, params: dict[str, str | int], timeout: None = None) -> object:
        """Return the request; python-etcd's own method sends it."""
        del timeout
        return method, path, params

    def _result_from_response(self, request: object) -> object:
        return request

    def parse_answer(self, answer: object) -> Answer:
        """Return python-etcd's result for an answer, or raise its exception."""
        return super()._result_from_response(self._handle_server_response(answer))


@dataclass(slots=True)
class _Lease:
    """A lease that this client has granted; initially, a lease that has expired.

    Attributes:
        ttl: seconds from each renewal to the expiry of the lease.
        ends: when the lease expires, by the monotonic clock.
        texts: the stored strings, by path, that this client wrote under the lease, or found when it granted the lease.
    """

    ttl: float = 0.0
    ends: float = 0.0
    texts: dict[str, str] = field(default_factory=dict)


class _Node(NamedTuple):
    """A key in etcd; the stamp is empty if another program has written the key."""

    path: str
    text: str
    create_revision: int
    mod_revision: int
    stamp: str
    lease: int
    value: bytes


def _node(answer: Answer) -> _Node:
    node = (answer.key, answer.value or "", answer.createdIndex, answer.modifiedIndex)
    try:
        path, text, create_revision, mod_revision = msgspec.convert(node, tuple[str, str, _Index, _Index])
    except msgspec.ValidationError as error:
        raise WrongApi(f"the server does not answer like etcd's API v2: {error}") from error
    if (stored := _STORED.fullmatch(text)) is None:
        return _Node(path, text, create_revision, mod_revision, "", 0, text.encode("utf-8", "surrogatepass"))
    value = stored["value"].encode("latin-1", "replace")
    return _Node(path, text, create_revision, mod_revision, stored["stamp"], int(stored["lease"], 16), value)


def _memory(texts: dict[str, str]) -> int:
    """Return the maximum number of bytes that strings take in memory: a character takes up to four."""
    return sum(4 * (len(path) + len(text)) for path, text in texts.items())


def _text(value: bytes, lease: int) -> str:
    """Return the string to store for a value; latin-1 because it has a character for each byte."""
    return f"{secrets.token_hex(6)} {lease:x} {value.decode('latin-1')}"


def _seconds(ttl: float) -> int:
    return max(math.ceil(ttl), 1)


def _path(key: str) -> str:
    return "/".join(map(_escaped, key.split("/")))[len(_EMPTY) :] + _LEAF


def _folder(prefix: str) -> str:
    """Return the folder that contains all keys with the prefix."""
    return "/".join(map(_escaped, prefix.split("/")[:-1]))[len(_EMPTY) :] or "/"


def _key(path: str) -> str | None:
    """Return the key whose value is stored under a path; None if this adapter did not write it."""
    key = "/".join(map(_unescaped, path.removesuffix(_LEAF).split("/")))
    return key if _path(key) == path else None


def _escaped(part: str) -> str:
    quoted = quote(part, safe="", errors="surrogateescape").replace("~", "%7E").replace("%", "~")
    return re.sub("^[._]", lambda first: f"~{ord(first[0]):X}", quoted) or _EMPTY


def _unescaped(part: str) -> str:
    return "" if part == _EMPTY else unquote(part.replace("~", "%"), errors="surrogateescape")


def _index_of(error: etcd.EtcdException) -> int:
    if not isinstance(index := error.payload.get("index"), int):
        raise error
    return index


def _payload(error: Exception) -> dict[str, Any]:
    payload = getattr(error, "payload", None)
    return payload if isinstance(payload, dict) else {}
