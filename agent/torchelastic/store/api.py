"""The interface of a store, its settings, and the parser of the addresses of its servers.

A revision is defined as in etcd: the whole store has one counter, which every change increments. A compare-and-swap
operates on a single key, because etcd v2 supports no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchelastic.errors import SettingsError, StoreTooLarge

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import AsyncGenerator, Callable


DEFAULT_PORT: Final = 2379
"""etcd's own port for clients."""

MAX_ENTRIES: Final = 4096
"""Maximum number of keys of a run: a thousand nodes have a key each, and leave room for those that are replaced."""

MAX_LISTED: Final = 8 << 20
"""Maximum size of a run's keys with their values: those of a thousand nodes with an error message of 4096
characters each take 5 MiB."""

_ENDPOINT: Final = re.compile(
    r"(?:(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"/?"
)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings of the connection to a store.

    Attributes:
        endpoints: host:port of each server of one etcd cluster; tried in turn.
        protocol: "http" or "https".
        ca_cert: file with the certificate of the authority that signed the server's certificate.
        cert: file with the client's certificate.
        key: file with the private key of the client's certificate.
        tls: the context of TLS connections; None to make one from these files.
        username: the user name for etcd's authentication; never logged.
        password: the password; never logged, and not part of the representation.
        request_timeout: seconds for one request.
        silence_limit: seconds without data from the server after which a watch counts as broken.
        version: the version of etcd's API, 2 or 3; None to use 3 if the server has it, and otherwise 2.
        open_socket: opens the socket for an address in the form of ``socket.getaddrinfo``; it may raise OSError to
            refuse the address. None to allow all.
        received: called with the number of bytes that the store has received and not delivered yet, or with a negative
            number when these bytes are no longer in memory; it may raise StoreError for a positive number.
    """

    endpoints: tuple[str, ...]
    protocol: str = "http"
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    tls: ssl.SSLContext | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    request_timeout: float = 5.0
    silence_limit: float = 5.0
    version: int | None = None
    open_socket: Callable[[tuple[Any, ...]], socket.socket] | None = None
    received: Callable[[int], None] = lambda _size: None


def too_large(where: str) -> StoreTooLarge:
    """Return the error for a server that sends more than the keys of a run can be."""
    return StoreTooLarge(
        f"{where} sends more than the keys of a run, which have at most {MAX_ENTRIES} entries and "
        f"{MAX_LISTED >> 20} MiB: use an etcd without other programs' keys below /torchelastic/"
    )


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT) -> tuple[str | None, tuple[str, ...]]:
    """Parse ``host[:port][,host[:port]…]``; each part may begin with ``http://`` or ``https://``.

    ``default_port`` is the port of the parts without one.

    Returns:
        The protocol, or None if no endpoint has one; and host:port of each server, with IPv6 addresses in brackets.

    Raises:
        SettingsError: an endpoint is invalid, or the endpoints differ in the protocol. The message starts with the
            invalid part, so that the caller can prefix the flag or field.
    """
    protocols: set[str] = set()
    endpoints: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        match = _ENDPOINT.fullmatch(part)
        if match is None:
            raise SettingsError(_why_not(part, default_port))
        if (protocol := match["protocol"]) is not None:
            if protocol.lower() not in {"http", "https"}:
                raise SettingsError(f'"{part}" starts with {protocol}://, but etcd is reached over http:// or https://')
            protocols.add(protocol.lower())
        try:
            match["host"].encode("idna")  # like the name lookup
        except ValueError:
            raise SettingsError(_why_not(part, default_port)) from None
        port = default_port if match["port"] is None else int(match["port"])
        if not 1 <= port <= 65535:
            raise SettingsError(f'"{part}" has the port {port}; a port is a number from 1 to 65535')
        endpoints.append(f"{match['host']}:{port}")
    if len(protocols) > 1:
        raise SettingsError("all servers of one etcd use the same protocol: choose http:// or https://")
    return next(iter(protocols), None), tuple(dict.fromkeys(endpoints))


def _why_not(part: str, port: int) -> str:
    if not part:
        return "one of the addresses is empty; write host:port, several with one comma between them"
    if "@" in part:
        return "a user and password do not belong in the address; set username=… and password=… in --rdzv-conf"
    if part.count(":") > 1 and "[" not in part and "://" not in part:
        return f'"{part}" looks like an IPv6 address; put it into brackets: [{part}]:{port}'
    return f'"{part}" is not an address; write host:port, for example node-1:{port}'


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host (IPv6 without brackets) and port of an endpoint of :func:`parse_endpoints`."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value.

    Attributes:
        key: the whole key.
        value: the value.
        create_revision: the revision at which the key was created.
        mod_revision: the revision of its last change; a compare-and-swap compares it.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int

    @property
    def memory(self) -> int:
        """The maximum number of bytes in memory: a character of the key takes up to four."""
        return 400 + 4 * len(self.key) + len(self.value)


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries below a prefix, as of one revision.

    Attributes:
        revision: the store's revision at the time of reading; watch from ``revision + 1`` to get every later change.
        entries: the entries, sorted by key.
        cluster_id: the id that the server reports for its cluster. A server that was set up again without its data may
            have another id, or the same id and a lower revision.
    """

    revision: int
    entries: tuple[Entry, ...]
    cluster_id: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one key, as a watch reports it.

    Attributes:
        key: the whole key.
        entry: the new entry; None if the key was deleted or its lease expired.
        revision: the revision of the change.
    """

    key: str
    entry: Entry | None
    revision: int


class Store(Protocol):
    """A key-value store with leases, compare-and-swap and watches.

    Every method except :meth:`close` raises :class:`~torchelastic.errors.StoreUnavailable` if the store cannot be
    reached or does not answer in time, and :class:`~torchelastic.errors.StoreRefused` if a retry does not help. A write
    that raised StoreUnavailable may or may not have taken effect. Writes under a lease raise
    :class:`~torchelastic.errors.LeaseLost` if the lease does not exist.
    """

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key, or None."""

    async def list(self, prefix: str) -> Listing:
        """Return all entries below a prefix, with the store's revision."""

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Set a key; if ``lease`` is not 0, under that lease. Return the revision."""

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        """Set a key if the revision of its last change is still ``expected``.

        Args:
            key: the key.
            value: the key's new value; None deletes the key.
            expected: the revision of the last change that the caller saw; 0 if there was no such key.
            lease: the lease under which to put the key; 0 for none.

        Returns:
            The new revision; None if the key had changed.
        """

    async def delete(self, key: str) -> None:
        """Remove a key if it exists."""

    async def delete_prefix(self, prefix: str) -> None:
        """Remove all keys below a prefix."""

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        """Grant a lease that expires ``ttl`` seconds after it was last kept alive; return its id.

        Args:
            ttl: seconds; the adapters for etcd round up to whole seconds, and etcd has its own minimum.
            lease: the id for the lease, a positive number of at most 63 bits; 0 for a new id. If a lease with this id
                exists, it is kept alive; all callers pass the same ``ttl`` for one id.
        """

    async def keep_alive(self, lease: int) -> None:
        """Renew a lease; raise LeaseLost if it has expired or was revoked."""

    async def revoke(self, lease: int) -> None:
        """Delete a lease and its keys; do nothing if the lease no longer exists."""

    def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        """Yield the changes below a prefix from now on, in batches: every change once, in order.

        The first batch is empty and confirms the watch; a later empty batch means that the connection works. If the
        store has lost its data or no longer has the next change, the watch ends, and the caller lists and watches
        again. To end the watch, the caller closes the iterator (``aclosing``).

        Raises:
            StoreUnavailable: the connection broke, or the server sent no data for longer than ``silence_limit``.
        """

    async def close(self) -> None:
        """Close the connections. The leases are not revoked; they expire."""
