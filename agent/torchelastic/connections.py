"""Bounds on file descriptors and connections, so that strangers who open connections cannot exhaust this process."""

from __future__ import annotations

import asyncio
import resource
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from aiohttp import web

_MAX_DESCRIPTORS: Final = 65536
_SHARE: Final = 8
"""A server has at most one connection without a request for this many descriptors of the process."""

_MIN_CONNECTIONS: Final = 8
_HTTP_CONNECTIONS: Final = 64
_HTTP_BACKLOG: Final = 16
_HTTP_TIMEOUT: Final = 10.0
"""Seconds for a client to send the complete header of a request."""

_Connection = TypeVar("_Connection")


_former: list[int] = []


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors of this process, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        _former[:] = [soft]


@contextmanager
def former_descriptor_limit() -> Iterator[None]:
    """Restore the former soft limit in this block, for new processes: select() fails for high descriptors."""
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_former[0] if _former else now, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))


def connection_limit(most: int) -> int:
    """Return the maximum number of connections without a request: at most ``most``, and a share of the descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(min(most, soft // _SHARE), _MIN_CONNECTIONS)


def excess(addresses: Mapping[_Connection, str], new: str, limit: int) -> _Connection | None:
    """Return the connection to close before another one from the address ``new`` is accepted; None for none.

    One address has at most half of the connections. The oldest one is closed, so that new clients are always served.

    Args:
        addresses: the address of each connection, from the oldest connection to the newest one.
        new: the address of the new connection.
        limit: the maximum number of connections.
    """
    of_address = [connection for connection, address in addresses.items() if address == new]
    if len(of_address) >= limit // 2:
        return of_address[0]
    return next(iter(addresses)) if len(addresses) >= limit else None


@asynccontextmanager
async def serve_http(app: web.Application, **where: Any) -> AsyncIterator[int]:  # noqa: ANN401 - asyncio's arguments
    """Serve an application until the block ends, and yield the port; ``where`` are arguments of ``create_server``.

    Raises:
        OSError: the address is not available.
    """
    from aiohttp import web

    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=_HTTP_TIMEOUT)
    await runner.setup()
    http, limit = cast("web.Server", runner.server), connection_limit(_HTTP_CONNECTIONS)

    class Bounded(asyncio.Protocol):
        """Closes the oldest connection if there are too many; then aiohttp's protocol takes over the new one."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            # A handler without a transport has lost its connection, but its task has not ended.
            transports = (each.transport for each in http.connections if each.transport is not None)
            current = {each: _address(each) for each in transports if not each.is_closing()}
            oldest = excess(current, _address(transport), limit)
            if oldest is not None:
                oldest.abort()
            protocol = http()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)

    try:
        server = await asyncio.get_running_loop().create_server(Bounded, backlog=_HTTP_BACKLOG, **where)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _address(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""
