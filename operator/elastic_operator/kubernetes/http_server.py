"""Serves the operator's /healthz, /readyz and /metrics."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from elastic_operator.errors import BadInput
from torchelastic.connections import serve_http

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable


@contextlib.asynccontextmanager
async def http_server(
    listen: tuple[str, int], *, metrics: Callable[[str], tuple[bytes, str]], unready: Callable[[], str]
) -> AsyncGenerator[int, None]:
    """Serve /healthz, /readyz and /metrics; yield the port.

    Args:
        listen: the host and the port; without a host, all IPv4 and IPv6 addresses.
        metrics: returns the page and its content type for an Accept header.
        unready: returns why the operator is not ready, as a sentence.

    Raises:
        BadInput: the address is not available.
    """

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            page, content_type = metrics(request.headers.get("Accept", ""))
            return web.Response(body=page, headers={"Content-Type": content_type})
        wrong = unready() if request.path == "/readyz" else ""
        return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

    host, port = listen
    app = web.Application()
    app.add_routes([web.get(path, answer) for path in ("/healthz", "/readyz", "/metrics")])
    async with contextlib.AsyncExitStack() as stack:
        try:
            served_on = await stack.enter_async_context(serve_http(app, host=host or None, port=port))
        except OSError as error:
            raise BadInput(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address with --listen"
            ) from None
        yield served_on
