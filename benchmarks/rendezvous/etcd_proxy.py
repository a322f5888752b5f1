"""A proxy in front of etcd that counts requests and bytes, including HTTP headers.

The proxy delays requests, so no time is measured through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

_REQUEST: Final = re.compile(rb"(?:GET|POST) (/\S*) HTTP/1\.1\r\n")


class Meter:
    """A counting proxy, open within ``async with``: connections to :attr:`endpoint` are forwarded to the target.

    Args:
        target: host:port of the server.

    Attributes:
        requests: the number of requests, by path.
        sent: bytes from the clients, by path.
        received: bytes to the clients, by path; the events of a watch count for the path of the watch.
    """

    def __init__(self, target: str) -> None:
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._host, _, self._port = target.rpartition(":")
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        if self._server is None:
            raise RuntimeError("the meter is not open")
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def copy(self) -> Meter:
        """Return a copy of the current counts."""
        snapshot = Meter("")
        snapshot.requests.update(self.requests)
        snapshot.sent.update(self.sent)
        snapshot.received.update(self.received)
        return snapshot

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=4096)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _forward(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        path = ""

        async def send() -> None:
            nonlocal path
            while data := await client.read(1 << 16):
                # A client waits for the answer before its next request, so a request starts at the start of a read.
                if request := _REQUEST.match(data):
                    path = request.group(1).decode()
                    self.requests[path] += 1
                self.sent[path] += len(data)
                to_server.write(data)
                await to_server.drain()

        async def receive() -> None:
            while data := await server.read(1 << 16):
                self.received[path] += len(data)
                to_client.write(data)
                await to_client.drain()

        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.callback(to_client.close)
            server, to_server = await asyncio.open_connection(self._host, int(self._port))
            stack.callback(to_server.close)
            directions = [asyncio.create_task(send()), asyncio.create_task(receive())]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
