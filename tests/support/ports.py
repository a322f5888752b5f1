"""Ports of this machine: some that are free, and those on which processes listen."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.config.settings import PortRange

if TYPE_CHECKING:
    from collections.abc import Iterable


def free_range(count: int) -> PortRange:
    """Return consecutive free ports below those that the kernel assigns; no other process of the tests returns them."""
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
    """The live processes among these and all their descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = set(roots)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: Iterable[int]) -> set[int]:
    """The ports of TCP on which any of these processes listens."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found
