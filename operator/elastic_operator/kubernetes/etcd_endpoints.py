"""The addresses at which the operator may use an etcd that a job names in spec.etcd.endpoint."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any, Final

from torchelastic.store.api import split_endpoint
from torchelastic.store.etcd_errors import AddressRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_METADATA: Final = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"))
)
"""Addresses of cloud providers with the credentials of a node; the others are link-local."""

_SPECIAL: Final = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "2002::/16")))
"""Protocol assignments of the IETF, and 6to4, which contains any IPv4 address."""


class EtcdEndpoints:
    """The allowed endpoints.

    Args:
        allowed: ranges of addresses, such as ``10.0.0.0/8``, and endings of names, such as ``.svc``. Addresses in these
            ranges are allowed without exception. Without entries, and for these names, all public and private unicast
            addresses are allowed, but not loopback, link-local and metadata addresses.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        ranges, endings = [], []
        for each in allowed:
            try:
                ranges.append(ipaddress.ip_network(each))
            except ValueError:
                endings.append("." + each.lower().strip("."))
        self._ranges, self._endings = ranges, tuple(endings)

    def socket_for(self, endpoints: Sequence[str]) -> Callable[[tuple[Any, ...]], socket.socket]:
        """Return a function that opens sockets for these endpoints; it raises AddressRefused for a refused address."""
        hosts = [split_endpoint(each)[0].lower().rstrip(".") for each in endpoints]
        named = not (self._ranges or self._endings) or all(f".{host}".endswith(self._endings) for host in hosts)

        def open_socket(info: tuple[Any, ...]) -> socket.socket:
            family, kind, protocol, _, (host, *_) = info
            address = ipaddress.ip_address(host.partition("%")[0])
            address = getattr(address, "ipv4_mapped", None) or address
            if not any(address in each for each in self._ranges) and not (named and _is_harmless(address)):
                raise AddressRefused(
                    "the operator does not connect to its address; see the chart's etcd.allowedEndpoints"
                )
            return socket.socket(family, kind, protocol)

        return open_socket


def _is_harmless(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    special = address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    special = special or address.is_reserved or any(address in each for each in _SPECIAL)
    return not special and address not in _METADATA
