"""The store on etcd 3.4 and later, over etcd's JSON gateway.

A watch is a stream that etcd may leave without a byte for ten minutes. A broken one is found within the silence limit:

- When the stream has been quiet for half of the limit, the same server must answer a small linearizable read within the
  other half. A server that hangs, is paused, or has lost its majority does not.
- The kernel watches the stream's own connection (keep-alive and TCP_USER_TIMEOUT), which finds a cut path.
- A proxy may answer for a server that it has lost. Against it, a watch that stays quiet for long is made again from the
  next revision on; no change is lost or reported twice.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import TYPE_CHECKING, Any, Final

from torchelastic.errors import HistoryCompacted, LeaseLost, StoreError, StoreRefused, StoreUnavailable
from torchelastic.store.api import Change, Entry, Listing
from torchelastic.store.etcd_errors import LeaseExists, NoGateway, NotAuthorized, meaning
from torchelastic.store.etcd_gateway import Gateway
from torchelastic.store.etcd_messages import (
    Answer,
    Event,
    KeyValue,
    LeaseAnswer,
    RangeAnswer,
    Streamed,
    TxnAnswer,
    Version,
    WatchAnswer,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from torchelastic.store.api import StoreSettings

OLDEST_VERSION: Final = (3, 4)

QUIET_CHECKS: Final = 12
"""Probes without an event in between after which a watch is made again: every 30 s by default."""


class EtcdV3Store:
    """A :class:`~torchelastic.store.api.Store` on the servers of one etcd cluster.

    Args:
        settings: where they are and how to get in.

    Raises:
        SettingsError: an endpoint is not host:port, or a file with certificates cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._gateway = Gateway(settings)
        self._patience = settings.silence_limit / 2

    async def check(self) -> None:
        """Make sure that one of the servers can be used.

        Raises:
            StoreUnavailable: none answers.
            StoreRefused: one answers, but is not etcd 3.4 or later with its JSON gateway, or refuses the credentials.
        """
        failures: dict[str, StoreError] = {}
        for endpoint in self._gateway.endpoints:
            try:
                await self._check_server(endpoint)
            except StoreError as error:
                failures[endpoint] = error
            else:
                return
        for failure in failures.values():
            if isinstance(failure, StoreRefused):
                raise failure
        if len(failures) == 1:
            raise next(iter(failures.values()))
        said = "; ".join(str(failure) for failure in failures.values())
        raise StoreUnavailable(f"none of the etcd servers {', '.join(failures)} answers: {said}")

    async def get(self, key: str) -> Entry | None:
        """See :meth:`Store.get <torchelastic.store.api.Store.get>`."""
        answer = await self._gateway.call("/v3/kv/range", {"key": _encoded(key)}, RangeAnswer, repeatable=True)
        return _entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        """See :meth:`Store.list <torchelastic.store.api.Store.list>`."""
        answer = await self._gateway.call("/v3/kv/range", _below(prefix), RangeAnswer, repeatable=True)
        header = answer.header
        return Listing(header.revision, tuple(_entry(kv) for kv in answer.kvs), f"{header.cluster_id:x}")

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """See :meth:`Store.put <torchelastic.store.api.Store.put>`."""
        message = {"key": _encoded(key), "value": value, "lease": lease}
        return (await self._gateway.call("/v3/kv/put", message, Answer)).header.revision

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """See :meth:`Store.compare_and_swap <torchelastic.store.api.Store.compare_and_swap>`."""
        name = _encoded(key)
        if value is None:
            change: dict[str, Any] = {"request_delete_range": {"key": name}}
        else:
            change = {"request_put": {"key": name, "value": value, "lease": lease}}
        # The revision of the last change is 0 for a key that is not there.
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": expected}
        message = {"compare": [compare], "success": [change]}
        answer = await self._gateway.call("/v3/kv/txn", message, TxnAnswer)
        return answer.header.revision if answer.succeeded else None

    async def delete(self, key: str) -> None:
        """See :meth:`Store.delete <torchelastic.store.api.Store.delete>`."""
        await self._gateway.call("/v3/kv/deleterange", {"key": _encoded(key)}, Answer)

    async def delete_prefix(self, prefix: str) -> None:
        """See :meth:`Store.delete_prefix <torchelastic.store.api.Store.delete_prefix>`."""
        await self._gateway.call("/v3/kv/deleterange", _below(prefix), Answer)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """See :meth:`Store.grant <torchelastic.store.api.Store.grant>`."""
        message = {"TTL": max(math.ceil(ttl), 1), "ID": lease}
        while True:
            try:
                # Repeatable: a lease whose id got lost ends by itself.
                return (await self._gateway.call("/v3/lease/grant", message, LeaseAnswer, repeatable=True)).id
            except LeaseExists:
                with contextlib.suppress(LeaseLost):  # it has just ended: then it can be granted
                    await self.keep_alive(lease)
                    return lease

    async def keep_alive(self, lease: int) -> None:
        """See :meth:`Store.keep_alive <torchelastic.store.api.Store.keep_alive>`."""
        answer = await self._gateway.call("/v3/lease/keepalive", {"ID": lease}, Streamed[LeaseAnswer], repeatable=True)
        if answer.error is not None:
            raise meaning("etcd", answer.error.message, code=answer.error.status)
        if answer.result is None or answer.result.ttl == 0:
            raise LeaseLost(f"lease {lease:x} has ended")

    async def revoke(self, lease: int) -> None:
        """See :meth:`Store.revoke <torchelastic.store.api.Store.revoke>`."""
        try:
            await self._gateway.call("/v3/lease/revoke", {"ID": lease}, Answer, repeatable=True)
        except LeaseLost:
            return

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """See :meth:`Store.watch <torchelastic.store.api.Store.watch>`."""
        while True:
            if start or not self._gateway.has_no_choice:
                await self._probe(prefix, start)
            server = self._gateway.endpoints[0]
            message = {"create_request": {**_below(prefix), "start_revision": start}}
            async with self._gateway.stream("/v3/watch", message, at=server) as stream:
                quiet = 0
                while quiet < QUIET_CHECKS:
                    line = await stream.next(Streamed[WatchAnswer], patience=self._patience)
                    if line is None:
                        await self._probe(prefix, start, at=server)
                        quiet += 1
                        yield ()
                        continue
                    answer = _checked(line, server, start)
                    if answer.events:
                        quiet = 0
                        changes = tuple(_change(event) for event in answer.events)
                        start = changes[-1].revision + 1
                        yield changes
                    elif answer.created:
                        start = start or answer.header.revision + 1
                        yield ()

    async def close(self) -> None:
        """See :meth:`Store.close <torchelastic.store.api.Store.close>`."""
        await self._gateway.close()

    async def _check_server(self, endpoint: str) -> None:
        """Send a request that only a usable server answers; if it fails, find out what listens there instead."""
        try:
            answer = await self._gateway.call("/v3/kv/range", {"key": b"/"}, RangeAnswer, at=endpoint)
        except NotAuthorized:
            return  # other keys may be allowed
        except StoreError as error:
            if protocol := await self._gateway.other_protocol(endpoint):
                raise StoreRefused(
                    f"etcd at {endpoint} speaks {protocol} only: write {protocol}:// before the address"
                ) from error
            if not isinstance(error, NoGateway):
                raise
            raise await self._what_else(endpoint) from error
        if not answer.header.revision:  # etcd's begin with 1
            raise await self._what_else(endpoint)

    async def _what_else(self, endpoint: str) -> NoGateway:
        """Return the error for a server that does not answer as etcd's gateway does, by its version."""
        version = (await self._gateway.read("/version", Version, at=endpoint)).etcdserver
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None:
            return NoGateway(f"what listens at {endpoint} is not etcd: it gives its version as {version!r:.80}")
        if tuple(int(number) for number in numbers.groups()) < OLDEST_VERSION:
            return NoGateway(f"etcd at {endpoint} has version {version:.40}, but 3.4 or later is needed")
        advice = "start it with --enable-grpc-gateway=true"
        return NoGateway(f"etcd at {endpoint} does not serve its JSON gateway: {advice}")

    async def _probe(self, prefix: str, start: int, *, at: str | None = None) -> None:
        """Make sure that a server answers, lets us read, and has reached ``start``.

        If it has lost its data, a watch would wait in silence until its revisions reach ``start`` again.

        Raises:
            StoreUnavailable: it did not answer in time.
            HistoryCompacted: its revisions began again.
        """
        message = {**_below(prefix), "count_only": True}
        limit = self._patience if at else None
        answer = await self._gateway.call("/v3/kv/range", message, RangeAnswer, repeatable=True, at=at, limit=limit)
        if start > answer.header.revision + 1:
            raise HistoryCompacted(
                f"etcd stands at revision {answer.header.revision}, before {start}: it has lost its data; list again"
            )


def _checked(line: Streamed[WatchAnswer], server: str, start: int) -> WatchAnswer:
    """Return the message of a watch; raise if it ends the watch."""
    if line.error is not None:
        raise meaning(f"etcd at {server}", line.error.message, code=line.error.status)
    answer = line.result or WatchAnswer()
    if answer.compact_revision:
        raise HistoryCompacted(
            f"etcd keeps no changes before revision {answer.compact_revision}, and {start} was asked for; list again"
        )
    if answer.canceled:
        raise meaning(f"etcd at {server}", answer.cancel_reason or "the watch was canceled", transient=True)
    return answer


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _below(prefix: str) -> dict[str, Any]:
    """Return the range of all keys with the prefix."""
    first = _encoded(prefix)
    stem = first.rstrip(b"\xff")
    if not stem:
        return {"key": first or b"\0", "range_end": b"\0"}  # which stands for "to the end"
    return {"key": first, "range_end": stem[:-1] + bytes([stem[-1] + 1])}


def _entry(kv: KeyValue) -> Entry:
    return Entry(_decoded(kv.key), kv.value, kv.create_revision, kv.mod_revision)


def _change(event: Event) -> Change:
    kv = event.kv
    return Change(_decoded(kv.key), None if event.type == "DELETE" else _entry(kv), kv.mod_revision)


def _decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")
