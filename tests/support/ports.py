"""Find free ports, list the TCP sockets of a process, and close its connections."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.config.settings import PortRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PIDFD_GETFD = 438
_STATES = {"0A": True, "01": False}
"""Whether a socket listens, by its state in /proc/net/tcp: LISTEN or ESTABLISHED."""


def free_range(count: int) -> PortRange:
    """Return consecutive free ports below the ephemeral port range; no other test process gets them."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = 20000 + 1000 * (process % 10)
    for first in range(begin, begin + 1000 - count, count):
        ports = PortRange(first, first + count - 1)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports.after(0):
                stack.enter_context(socket.create_server(("", port)))
            return ports
    raise AssertionError("no ports are free")


def descendants(roots: Iterable[int]) -> set[int]:
    """Return these processes and all their live descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = set(roots)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@dataclass(frozen=True)
class Socket:
    """A TCP socket of a process; IPv6 addresses are as in /proc."""

    descriptor: int
    address: str
    port: int
    remote_port: int
    listens: bool


def sockets(pid: int) -> Iterator[Socket]:
    """Yield the TCP sockets of a process that listen or are connected."""
    descriptors = {}
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            descriptors[str(link.readlink())] = int(link.name)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            (host, port), (_, remote) = (field.split(":") for field in fields[1:3])
            name = f"socket:[{fields[9]}]"
            if fields[3] in _STATES and name in descriptors:
                address = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host
                yield Socket(descriptors[name], address, int(port, 16), int(remote, 16), _STATES[fields[3]])


def accepted_connections(pid: int, port: int) -> dict[int, int]:
    """Return the connections that a process has accepted on a port: its descriptors by the port of the peer."""
    return {each.remote_port: each.descriptor for each in sockets(pid) if each.port == port and not each.listens}


def cut(pid: int, descriptor: int) -> None:
    """Shut down a connection of another process: both sides notice the end of the connection, and continue."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        copy = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"process {pid}'s descriptor {descriptor} cannot be opened")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)
