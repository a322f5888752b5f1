"""Where the store is, as people write it: ``--rdzv-endpoint`` and ``spec.etcd.endpoint``.

Pure text: nothing is resolved or connected to.
"""

from __future__ import annotations

import re
from typing import Final

from torchelastic.errors import SettingsError

DEFAULT_PORT: Final = 2379
"""etcd's own port for clients."""

_ENDPOINT: Final = re.compile(
    r"(?:(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"/?"
)


def parse_endpoints(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Read ``host[:port][,host[:port]…]``; ``http://`` or ``https://`` may stand in front of each.

    Returns:
        The protocol, None if none is written; and host:port of each server, IPv6 addresses in brackets.

    Raises:
        SettingsError: one of them cannot be read, or they differ in the protocol. The message starts with the part that
            is wrong, so that the caller can put the flag or field in front.
    """
    protocols: set[str] = set()
    endpoints: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        match = _ENDPOINT.fullmatch(part)
        if match is None:
            raise SettingsError(_why_not(part))
        if (protocol := match["protocol"]) is not None:
            if protocol.lower() not in {"http", "https"}:
                raise SettingsError(f'"{part}" starts with {protocol}://, but etcd is reached over http:// or https://')
            protocols.add(protocol.lower())
        port = DEFAULT_PORT if match["port"] is None else int(match["port"])
        if not 1 <= port <= 65535:
            raise SettingsError(f'"{part}" has the port {port}; a port is a number from 1 to 65535')
        endpoints.append(f"{match['host']}:{port}")
    if len(protocols) > 1:
        raise SettingsError("the servers of one etcd are all reached over http:// or all over https://; choose one")
    return next(iter(protocols), None), tuple(dict.fromkeys(endpoints))


def _why_not(part: str) -> str:
    if not part:
        return "one of the addresses is empty; write host:port, several with one comma between them"
    if "@" in part:
        return "a user and password do not belong into the address; give username=… and password=… in --rdzv-conf"
    if part.count(":") > 1 and "[" not in part and "://" not in part:
        return f'"{part}" looks like an IPv6 address; put it into brackets: [{part}]:{DEFAULT_PORT}'
    return f'"{part}" is not an address; write host:port, for example etcd-server:{DEFAULT_PORT}'


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host (IPv6 without brackets) and port of an endpoint as :func:`parse_endpoints` gives it."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
