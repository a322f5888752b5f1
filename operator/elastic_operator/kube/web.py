"""What probes and Prometheus ask of the operator: /healthz, /readyz and /metrics.

/healthz answers 200 as long as the process does its work, or waits for its turn to; whether the API server can be
reached has no part in it, for a new start would not help. /readyz answers 200 once the operator knows what there is, so
that it could act at once.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from aiohttp import web

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from elastic_operator.kube.options import Address

    Complaint = Callable[[], str]
    """Gives what is wrong, as a sentence; empty where nothing is."""


class Web:
    """Serves as long as its block lasts.

    Args:
        listen: where; without a host on all addresses of the machine, IPv4 and IPv6.
        metrics: gives what /metrics shows and its type, for the types that are understood.
        ill: gives what is wrong with the process, as a sentence; empty where nothing is.
        unready: gives what the operator waits for before it could act; empty where for nothing.
    """

    def __init__(
        self, listen: Address, *, metrics: Callable[[str], tuple[bytes, str]], ill: Complaint, unready: Complaint
    ) -> None:
        self._listen = listen
        self._page = metrics
        self._answers = {"/healthz": ill, "/readyz": unready}
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        """Begin to serve.

        Raises:
            BadInput: the address can't be listened on.
        """
        listening = _socket(self._listen)
        self.port = listening.getsockname()[1]
        app = web.Application()
        for path, complaint in self._answers.items():
            app.router.add_get(path, _probe(complaint))
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        self._runner = runner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        page, content_type = self._page(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})


def _probe(complaint: Complaint) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        wrong = complaint()
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
