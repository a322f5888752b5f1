"""The control API of a run: HTTP and JSON over a Unix socket that only this user can open.

======  ================  =================================================================================
method  path              response
======  ================  =================================================================================
GET     ``/job``          a snapshot, see :class:`elastic_operator.views.job_view.JobView`
GET     ``/watch``        one snapshot per line: now, after each change, and a last one when the run ends
PATCH   ``/job``          sets ``replicas`` or ``suspend``: 200, or 422 with ``{"message": sentence}``
DELETE  ``/job``          202; the run ends with exit code 3
======  ================  =================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from aiohttp import web

    from elastic_operator.local.run_dir import RunDir
    from elastic_operator.views.job_view import JobView

_WATCH_INTERVAL: Final = 0.1
"""Minimum number of seconds between two snapshots of a watch."""
_FIELDS: Final = {"replicas", "suspend"}


class SnapshotFeed:
    """Sends snapshots to watchers, each at its own pace: changes in quick succession share one snapshot."""

    def __init__(self, make: Callable[[], JobView]) -> None:
        self.make = make
        self._changed = asyncio.Event()
        self._closed = False

    def touch(self) -> None:
        """Report a change to the watchers."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Send a last snapshot to each watcher, and end the watches."""
        self._closed = True
        self.touch()

    async def watch(self, interval: float) -> AsyncGenerator[JobView, None]:
        """Yield a snapshot now, after each change (at most one per ``interval`` seconds), and after :meth:`close`."""
        last = False
        while not last:
            changed, last = self._changed, self._closed
            yield self.make()
            if not self._closed:
                await asyncio.sleep(interval)
            if not last:
                await changed.wait()


@contextlib.asynccontextmanager
async def control_server(
    files: RunDir, snapshots: SnapshotFeed, patch: Callable[[dict[str, Any]], None], delete: Callable[[], None]
) -> AsyncIterator[None]:
    """Serve the control API while the block runs: requests call ``patch`` and ``delete``.

    Raises:
        BadInput: the socket cannot be created.
    """
    from aiohttp import web  # takes longer to import than all else, so other processes start first

    server = web.AppRunner(
        _application(snapshots, patch, delete), access_log=None, handle_signals=False, shutdown_timeout=1.0
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, files.control, ignore_errors=True)
        try:
            files.control.mkdir(mode=0o700, exist_ok=True)
            path = stack.enter_context(files.socket())
            stack.push_async_callback(server.cleanup)
            await server.setup()
            await web.UnixSite(server, path).start()
        except OSError as error:
            raise BadInput(
                f"cannot create the control socket in {files.control}: {error.strerror}; "
                "set ELASTICJOB_HOME to a directory on a local file system"
            ) from None
        yield


def _application(
    snapshots: SnapshotFeed, patch: Callable[[dict[str, Any]], None], delete: Callable[[], None]
) -> web.Application:
    from aiohttp import web

    async def job(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(snapshots.make()), content_type="application/json")

    async def watch(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        async with contextlib.aclosing(snapshots.watch(_WATCH_INTERVAL)) as stream:
            with contextlib.suppress(ConnectionResetError):  # the client has disconnected
                async for snapshot in stream:
                    await response.write(msgspec.json.encode(snapshot) + b"\n")
        return response

    async def patch_job(request: web.Request) -> web.Response:
        fields = None
        with contextlib.suppress(ValueError):
            fields = await request.json()
        if not isinstance(fields, dict) or not fields or not fields.keys() <= _FIELDS or None in fields.values():
            return web.json_response({"message": 'send {"replicas": N} or {"suspend": true or false}'}, status=422)
        try:
            patch(fields)
        except BadInput as error:
            return web.json_response({"message": str(error)}, status=422)
        return web.json_response({})

    async def delete_job(_: web.Request) -> web.Response:
        delete()
        return web.json_response({}, status=202)

    application = web.Application(client_max_size=4096)
    application.add_routes(
        [web.get("/job", job), web.get("/watch", watch), web.patch("/job", patch_job), web.delete("/job", delete_job)]
    )
    return application
