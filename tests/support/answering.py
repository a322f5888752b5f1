"""A server of HTTP on the loopback that answers as a test says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiohttp import web
from kubernetes.aio.client import Configuration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


@contextlib.asynccontextmanager
async def answering(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> AsyncIterator[Configuration]:
    """Have each request answered so; gives back how a client of Kubernetes reaches the server."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield configuration
    finally:
        await runner.cleanup()
