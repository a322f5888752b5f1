"""How other terminals reach a run: HTTP and JSON over a Unix socket that only this user can reach.

======  ================  ==========================================================================
method  path              what it does
======  ================  ==========================================================================
GET     ``/job``          a snapshot, see :mod:`elastic_operator.local.snapshot`
GET     ``/job/report``   what would be kept of the run if it ended now, see :mod:`elastic_operator.report_json`
GET     ``/watch``        snapshots, one a line: now, after every change, and the last one at the end
PATCH   ``/job/scale``    ``{"replicas": n}``: 200, or 422 with ``{"message": sentence}``
PATCH   ``/job/suspend``  ``{"suspend": true or false}``: likewise
DELETE  ``/job``          202, and the run ends with exit code 3; whoever watches sees it end
======  ================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from elastic_operator.local.publisher import Publisher

WATCH_INTERVAL: Final = 0.1
"""Seconds between two snapshots of a watch, at least."""

_LONGEST_BODY: Final = 4096


class Controlled(Protocol):
    """What can be done to a run from outside."""

    publisher: Publisher

    def report(self) -> bytes:
        """What would be kept of the run if it ended now, as JSON."""

    def scale(self, replicas: int) -> None:
        """Ask for another number of pods.

        Raises:
            BadInput: that number cannot be.
        """

    def suspend(self, *, rest: bool) -> None:
        """Have the job rest, or go on.

        Raises:
            BadInput: the job is over.
        """

    def delete(self) -> None:
        """End the run."""


@contextlib.asynccontextmanager
async def control_server(run: Controlled, socket: Path) -> AsyncIterator[None]:
    """Serve the control API for as long as the block runs.

    Raises:
        BadInput: the socket cannot be made.
    """
    runner = web.AppRunner(_application(run), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.UnixSite(runner, str(socket)).start()
        except OSError as error:
            raise BadInput(f"cannot make the control socket {socket}: {error.strerror}") from None
        yield
    finally:
        await runner.cleanup()
        socket.unlink(missing_ok=True)


def _application(run: Controlled) -> web.Application:
    async def job(_: web.Request) -> web.Response:
        return web.json_response(run.publisher.now())

    async def report(_: web.Request) -> web.Response:
        return web.Response(body=run.report(), content_type="application/json")

    async def watch(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        async with contextlib.aclosing(run.publisher.snapshots(interval=WATCH_INTERVAL)) as snapshots:
            async for snapshot in snapshots:
                await response.write(json.dumps(snapshot).encode() + b"\n")
        await response.write_eof()
        return response

    async def scale(request: web.Request) -> web.Response:
        replicas = await _sent(request, "replicas")
        if type(replicas) is not int:
            return _refusal('send {"replicas": N}, where N is a whole number')
        return _answer(lambda: run.scale(replicas))

    async def suspend(request: web.Request) -> web.Response:
        rest = await _sent(request, "suspend")
        if type(rest) is not bool:
            return _refusal('send {"suspend": true} or {"suspend": false}')
        return _answer(lambda: run.suspend(rest=rest))

    async def delete(_: web.Request) -> web.Response:
        run.delete()
        return web.json_response({}, status=202)

    application = web.Application(client_max_size=_LONGEST_BODY)
    application.add_routes(
        [
            web.get("/job", job),
            web.get("/job/report", report),
            web.get("/watch", watch),
            web.patch("/job/scale", scale),
            web.patch("/job/suspend", suspend),
            web.delete("/job", delete),
        ]
    )
    return application


async def _sent(request: web.Request, field: str) -> object:
    """What the request's body has for this field; None where it has nothing."""
    try:
        found: object = (await request.json())[field]
    except (ValueError, KeyError, TypeError):
        return None
    return found


def _answer(do: Callable[[], None]) -> web.Response:
    try:
        do()
    except BadInput as error:
        return _refusal(str(error))
    return web.json_response({})


def _refusal(sentence: str) -> web.Response:
    return web.json_response({"message": sentence}, status=422)
