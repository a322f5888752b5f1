"""The HTTP server for probes and Prometheus: /healthz, /readyz and /metrics.

/healthz does not depend on the API server, for a restart would not help. /readyz fails until all objects are known.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from aiohttp import web

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from elastic_operator.kubernetes.options import Address


class HttpServer:
    """Serves within ``async with``.

    Args:
        listen: where; without a host on all addresses, IPv4 and IPv6.
        metrics: returns the page and its content type for an Accept header.
        unhealthy: returns why the process is not healthy, as a sentence.
        unready: returns why the operator is not ready.
    """

    def __init__(
        self,
        listen: Address,
        *,
        metrics: Callable[[str], tuple[bytes, str]],
        unhealthy: Callable[[], str],
        unready: Callable[[], str],
    ) -> None:
        self._listen = listen
        self._page = metrics
        self._probes = {"/healthz": unhealthy, "/readyz": unready}
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        """Start to serve.

        Raises:
            BadInput: the address is not available.
        """
        listening = _socket(self._listen)
        self.port = listening.getsockname()[1]
        app = web.Application()
        for path, problem in self._probes.items():
            app.router.add_get(path, _probe(problem))
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        self._runner = runner
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        page, content_type = self._page(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})


def _probe(problem: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        wrong = problem()
        return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

    return answer


def _socket(listen: Address) -> socket.socket:
    try:
        if not listen.host:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", listen.port), family=family, dualstack_ipv6=both)
        family, _, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise BadInput(
            f"nothing can be served on {listen.host}:{listen.port}: {error.strerror or error}; choose another address "
            "with --listen"
        ) from None
