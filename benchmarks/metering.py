"""A proxy in front of etcd that counts: requests by kind, and the bytes that go through for each.

The counting is done outside of the clients and of etcd, on the bytes of the connections themselves, HTTP's headers
included. It takes time, so nothing is timed through it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING, Final, Self, cast

if TYPE_CHECKING:
    from types import TracebackType

_REQUEST: Final = re.compile(rb"(?:GET|POST) (/\S*) HTTP/1\.1\r\n")


class Meter:
    """Within ``async with``, what connects to :attr:`endpoint` is connected to the target, and counted.

    Args:
        target: host:port.

    Attributes:
        requests: how many, by path.
        sent: bytes from the clients, by path.
        received: bytes to the clients, by path; a watch's changes belong to the watch.
    """

    def __init__(self, target: str) -> None:
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._host, _, self._port = target.rpartition(":")
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        if self._server is None:
            raise RuntimeError("the meter is not open")
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def copy(self) -> Meter:
        """The counts as they are now."""
        snapshot = Meter("")
        snapshot.requests.update(self.requests)
        snapshot.sent.update(self.sent)
        snapshot.received.update(self.received)
        return snapshot

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ClientSide(self), "127.0.0.1", 0, backlog=4096)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for line in list(self._lines):
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    def connect(self, client: _ClientSide) -> None:
        """Give a client its connection to the server."""
        line = asyncio.create_task(self._connect(client))
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)

    async def _connect(self, client: _ClientSide) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _ServerSide(client), self._host, int(self._port))
        except OSError:
            client.hang_up()


class _ClientSide(asyncio.Protocol):
    """The connection that a client made; it knows which request is under way."""

    def __init__(self, meter: Meter) -> None:
        self.path = ""
        self._meter = meter
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast("asyncio.Transport", transport)
        self._meter.connect(self)

    def joined(self, server: asyncio.Transport) -> None:
        """The connection to the server stands."""
        self._server = server
        server.write(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        # A client waits for an answer before it asks again, so a request begins where a read begins.
        if request := _REQUEST.match(data):
            self.path = request.group(1).decode()
            self._meter.requests[self.path] += 1
        self._meter.sent[self.path] += len(data)
        if self._server is None:
            self._early += data
        else:
            self._server.write(data)

    def pass_on(self, data: bytes) -> None:
        """Give the client what the server said."""
        self._meter.received[self.path] += len(data)
        if self._client is not None:
            self._client.write(data)

    def hang_up(self) -> None:
        """The server is gone."""
        if self._client is not None:
            self._client.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._server is not None:
            self._server.close()


class _ServerSide(asyncio.Protocol):
    """The connection to the server that belongs to a client's."""

    def __init__(self, client: _ClientSide) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.joined(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._client.pass_on(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._client.hang_up()
