"""The HTTP server of the agent's ``/metrics``."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web
    from prometheus_client import CollectorRegistry


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry, port: int, *, host: str | None = None) -> AsyncIterator[int]:
    """Serve series under ``/metrics`` until the block ends, and yield the port.

    The response is OpenMetrics or Prometheus' text format, as requested. A thread generates it, so that a scrape of
    many series does not block the event loop.

    Args:
        registry: has the series.
        port: the port; 0 for any free port.
        host: the address to listen on; None for all addresses.

    Raises:
        SettingsError: the port or the host cannot be used.
    """
    from aiohttp import web
    from prometheus_client.exposition import choose_encoder

    async def answer(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = await asyncio.to_thread(encode, registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    try:
        listening = _listen(host, port)
    except (OSError, OverflowError, UnicodeError) as error:
        raise unusable_port(port, error, host=host) from None
    with listening:
        app = web.Application()
        app.router.add_get("/metrics", answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        try:
            await runner.setup()
            await web.SockSite(runner, listening).start()
            yield listening.getsockname()[1]
        finally:
            await runner.cleanup()


def _listen(host: str | None, port: int) -> socket.socket:
    """Return a listening socket on one address, or on all IPv4 and IPv6 addresses."""
    if not 0 <= port <= 65535:
        raise OverflowError  # the system would use the number modulo 65536
    if host is None:
        both = socket.has_dualstack_ipv6()
        return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family)


def unusable_port(port: int, error: Exception, *, host: str | None = None) -> SettingsError:
    """Return the error to raise if /metrics cannot be served."""
    where = f"port {port}" if host is None else f"port {port} of {host}"
    why = "a port is a number from 0 to 65535" if isinstance(error, OverflowError) else str(error)
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
        why = os.strerror(error.errno or 0)
    return SettingsError(
        f"/metrics cannot be served on {where}: {why}. Choose another port, or 0 for any free one, or another address."
    )
