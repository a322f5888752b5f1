"""A server in place of etcd, with answers from a test."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def http(status: str, body: str) -> Callable[[str], bytes]:
    """The same answer to every request."""
    return lambda _: (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n{body}".encode()
    )


@contextlib.asynccontextmanager
async def fake_etcd(answer: Callable[[str], bytes], port: int = 0) -> AsyncIterator[str]:
    """Listen within the block, and give this answer to the first line of each connection.

    Args:
        answer: maps the first line of a request to the bytes that are sent back before the connection is closed.
        port: where it listens on loopback; 0 for any free port.

    Yields:
        host:port.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            first = await reader.readline()
            writer.write(answer(first.decode("latin-1")))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
