"""What a store must be able to do, and nothing more.

Revisions are etcd's: one counter for the whole store that every change raises. What a later change of adapter must
keep: a compare-and-swap touches one key only (etcd v2 can do no more).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How to reach a store.

    Attributes:
        endpoints: host:port of each server of one etcd cluster; tried in turn.
        protocol: "http" or "https".
        ca_cert: file with the certificate authority that signed the server's certificate.
        cert: file with the client's certificate.
        key: file with its private key.
        username: for etcd's own authentication; never logged.
        password: likewise, and kept out of the representation.
        request_timeout: seconds for one request.
        silence_limit: seconds of silence after which a watch counts as broken.
        version: of etcd's API, 2 or 3; None for 3 where the server has it, and else 2.
    """

    endpoints: tuple[str, ...]
    protocol: str = "http"
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    request_timeout: float = 5.0
    silence_limit: float = 5.0
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value.

    Attributes:
        key: the whole key.
        value: the bytes under it.
        created: the revision at which the key came into being (again).
        modified: the revision of its last change; what a compare-and-swap compares.
    """

    key: str
    value: bytes
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries below a prefix, as of one revision.

    Attributes:
        revision: the store's revision at the time of reading; watch from ``revision + 1`` to miss nothing.
        entries: by key.
        cluster_id: the id that the server gives its cluster. A server that lost its data and was set up again may have
            another one, or the same one and a lower revision.
    """

    revision: int
    entries: tuple[Entry, ...]
    cluster_id: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one key, as a watch tells it.

    Attributes:
        key: the whole key.
        entry: what stands there now; None where it was deleted or its lease ended.
        revision: at which revision.
    """

    key: str
    entry: Entry | None
    revision: int


class Store(Protocol):
    """A key-value store with leases, compare-and-swap and watches.

    Every method but :meth:`close` raises :class:`~torchelastic.errors.StoreUnavailable` when the store cannot be
    reached or does not answer in time, and :class:`~torchelastic.errors.StoreRefused` when trying again is no use.
    A write that raised StoreUnavailable may or may not have been done.
    """

    async def get(self, key: str) -> Entry | None:
        """What stands under the key, or None."""

    async def list(self, prefix: str) -> Listing:
        """All that stands below the prefix, with the revision to watch from."""

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Set the key, under a lease or (0) for good; gives back the revision.

        Raises:
            LeaseLost: there is no such lease any more.
        """

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """Set the key (None: delete it) if its last change is still that of revision ``expected``.

        Args:
            key: the key.
            value: its new value, or None to delete it.
            expected: the revision of the last change that the caller saw; 0 for "there is no such key".
            lease: the lease to put it under; 0 for none.

        Returns:
            The new revision, or None where the key had changed meanwhile.

        Raises:
            LeaseLost: there is no such lease any more.
        """

    async def delete(self, key: str) -> None:
        """Remove the key if it is there."""

    async def delete_prefix(self, prefix: str) -> None:
        """Remove all keys below the prefix."""

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """A lease that ends ``ttl`` seconds after it was last kept alive; gives back its id.

        etcd counts in whole seconds and may raise a short one to its own minimum.

        Args:
            ttl: seconds.
            lease: the id that it is to have, a positive number of at most 63 bits; 0 for a new one. A lease that is
                there already under this id is kept alive, with the seconds that it was granted for.
        """

    async def keep_alive(self, lease: int) -> None:
        """Start the lease's time anew.

        Raises:
            LeaseLost: it has ended.
        """

    async def revoke(self, lease: int) -> None:
        """End the lease now: what hangs on it is deleted. Nothing happens where it has ended already."""

    def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """Every change below the prefix from revision ``start`` on, in order, in batches; each exactly once.

        ``start`` 0 means from now on: from the moment at which the store confirms the watch.

        A broken connection is not mended here: it ends the iteration with StoreUnavailable, and the caller watches
        again from the revision after the last one it saw, or lists again. An empty batch says "nothing new, and the
        connection is alive", and comes first, as soon as the store has confirmed the watch. The caller ends the watch
        by closing the iterator (``aclosing``).

        Raises:
            HistoryCompacted: the start revision is no longer kept; list again.
            StoreUnavailable: the connection broke, or was silent for longer than the limit.
        """

    async def close(self) -> None:
        """Let go of connections. Leases are left to end by themselves."""
