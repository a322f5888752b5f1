"""An HTTP server on loopback with answers from a test."""

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
    """Give this answer to each request; yields the access for a Kubernetes client."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield configuration
    finally:
        await runner.cleanup()
