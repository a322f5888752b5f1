"""Connections to a port on loopback that never send anything."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 90.0


class IdleConnections:
    """Open connections; the kernel connects them in the background."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets

    async def until_closed(self) -> None:
        """Wait until the server has closed the first of the connections."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT):
            with contextlib.suppress(OSError):
                assert await loop.sock_recv(self._sockets[0], 1) == b""


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[IdleConnections]:
    """Open idle connections until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 1000)), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        sockets = []
        for _ in range(count):
            sockets.append(connection := stack.enter_context(socket.socket()))
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        yield IdleConnections(sockets)
