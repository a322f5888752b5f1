"""Serving ``/metrics`` from an event loop, as the agent does."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, Self

from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from types import TracebackType

    from aiohttp import web
    from prometheus_client import CollectorRegistry


class MetricsServer:
    """Serves series under ``/metrics``, as long as its block lasts.

    It speaks OpenMetrics or Prometheus' text format, whichever the client asks for. The text is made in a thread, so
    that a scrape of many series does not hold up what else the event loop has to do.

    Args:
        registry: has the series.
        port: where; 0 for any free port.
        host: on which of the machine's addresses; None for all of them.
    """

    def __init__(self, registry: CollectorRegistry, port: int, *, host: str | None = None) -> None:
        self._registry = registry
        self._wanted = (host, port)
        self._socket: socket.socket | None = None
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port on which it serves.

        Raises:
            RuntimeError: it does not serve.
        """
        if self._socket is None:
            raise RuntimeError("The server has a port only within its block.")
        return int(self._socket.getsockname()[1])

    async def __aenter__(self) -> Self:
        """Begin to serve.

        Raises:
            SettingsError: the port or the host cannot be used.
        """
        from aiohttp import web

        host, port = self._wanted
        try:
            listening = _listen(host, port)
        except (OSError, OverflowError, UnicodeError) as error:
            raise unusable_port(port, error, host=host) from None
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        try:
            await runner.setup()
            await web.SockSite(runner, listening).start()
        except BaseException:
            listening.close()
            await runner.cleanup()
            raise
        self._socket, self._runner = listening, runner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket = self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        from aiohttp import web
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = await asyncio.to_thread(encode, self._registry)
        return web.Response(body=body, headers={"Content-Type": content_type})


def _listen(host: str | None, port: int) -> socket.socket:
    """A listening socket on one address, or on all of both families, with one port for both."""
    if not 0 <= port <= 65535:
        raise OverflowError  # the system would take the number modulo 65536
    if host is None:
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
        return socket.create_server(("", port))
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family)


def unusable_port(port: int, error: Exception, *, host: str | None = None) -> SettingsError:
    """The error to raise where /metrics cannot be served; it advises on what is wrong, the port or the address."""
    where = f"port {port}" if host is None else f"port {port} of {host}"
    other_port = " Choose another port, or 0 for any free one."
    other_address = " Choose an address of this machine, or 0.0.0.0 for all of them."
    match error:
        case socket.gaierror() | UnicodeError():
            why, advice = "that is neither an address nor a name that is known", other_address
        case OverflowError():
            why, advice = "a port is a number from 0 to 65535", other_port
        case OSError(errno=errno.EADDRINUSE):
            why, advice = "another process has it", other_port
        case OSError(errno=errno.EACCES):
            why, advice = "ports below 1024 need a privilege that this process does not have", other_port
        case OSError(errno=errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT | errno.EINVAL):
            why, advice = "this machine has no such address", other_address
        case _:
            why, advice = str(error), ""
    return SettingsError(f"/metrics cannot be served on {where}: {why}.{advice}")
