"""The interface of a store.

Revisions are etcd's: one counter for the whole store that every change raises. A compare-and-swap concerns one key
only, because etcd v2 can do no more.
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
        password: the same, and not part of the representation.
        request_timeout: seconds for one request.
        silence_limit: seconds of silence after which a watch counts as broken.
        version: of etcd's API, 2 or 3; None for 3 if the server has it, and else 2.
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
        created: the revision at which the key was created.
        modified: the revision of its last change; a compare-and-swap compares it.
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
    """One change of one key, as a watch reports it.

    Attributes:
        key: the whole key.
        entry: the new entry; None if the key was deleted or its lease ended.
        revision: the revision of the change.
    """

    key: str
    entry: Entry | None
    revision: int


class Store(Protocol):
    """A key-value store with leases, compare-and-swap and watches.

    Every method but :meth:`close` raises :class:`~torchelastic.errors.StoreUnavailable` if the store cannot be reached
    or does not answer in time, and :class:`~torchelastic.errors.StoreRefused` if trying again does not help. A write
    that raised StoreUnavailable may or may not have been done. Writes under a lease raise
    :class:`~torchelastic.errors.LeaseLost` if the lease does not exist.
    """

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key, or None."""

    async def list(self, prefix: str) -> Listing:
        """Return all entries below a prefix, with the revision to watch from."""

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Set a key, under a lease if one is given; return the revision."""

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """Set a key if its last change is still that of revision ``expected``.

        Args:
            key: the key.
            value: its new value; None deletes it.
            expected: the revision of the last change that the caller saw; 0 for "there is no such key".
            lease: the lease to put it under; 0 for none.

        Returns:
            The new revision; None if the key had changed.
        """

    async def delete(self, key: str) -> None:
        """Remove a key if it exists."""

    async def delete_prefix(self, prefix: str) -> None:
        """Remove all keys below a prefix."""

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """Return the id of a lease that ends ``ttl`` seconds after it was last kept alive.

        Args:
            ttl: seconds; etcd rounds up to whole seconds and to its own minimum.
            lease: the id that the lease is to have, a positive number of at most 63 bits; 0 for a new one. A lease
                that exists under this id is kept alive, with the seconds that it was granted for.
        """

    async def keep_alive(self, lease: int) -> None:
        """Restart the time of a lease; raise LeaseLost if it has ended."""

    async def revoke(self, lease: int) -> None:
        """End a lease now and delete its keys; do nothing if it has ended already."""

    def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """Yield every change below a prefix from revision ``start`` on, in order, in batches, each change once.

        ``start`` 0 means from the moment at which the store confirms the watch. An empty batch says that the connection
        works; one comes first, as soon as the store has confirmed the watch. The caller ends the watch by closing the
        iterator (``aclosing``).

        Raises:
            HistoryCompacted: the start revision is no longer kept; list again.
            StoreUnavailable: the connection broke, or was silent for longer than the limit. The caller watches again
                from the revision after the last one it saw, or lists again.
        """

    async def close(self) -> None:
        """Close the connections. Leases end by themselves."""
