"""Find and cut the TCP connections between agents while both sides live."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438


def links_to(pid: int, port: int) -> dict[int, int]:
    """Connections that a process has accepted on a port: its descriptors by the other side's port."""
    ours = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        if local == port and fields[3] == "01":
            ours[f"socket:[{fields[9]}]"] = remote
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            name = str(link.readlink())
            if name in ours:
                found[ours[name]] = int(link.name)
    return found


def cut(pid: int, descriptor: int) -> None:
    """End a connection of another process, as a firewall would: both sides see it end, and live on."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        copy = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"process {pid}'s descriptor {descriptor} cannot be had")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)
