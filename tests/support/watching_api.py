"""A client of the API server that also watches, so that tests see each state without polling."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Final

from elastic_operator.client.cluster import UserApi
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import ApiError, selectors

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from elastic_operator.api.json_values import Json
    from elastic_operator.kubernetes.client import Resource

_WATCH_SECONDS: Final = 300
"""Seconds after which the server ends a watch."""
_WATCH_DELAY: Final = 0.2
_MAX_WATCH_FAILURES: Final = 6
"""Maximum number of consecutive failures; the error of the next failure is raised."""
_READ_TIMEOUT: Final = 30.0


class WatchingApi(UserApi):
    """A connection that can watch; an async context manager."""

    async def states(
        self, resource: Resource, namespace: str, *, labels: str = "", name: str = ""
    ) -> AsyncGenerator[Mapping[str, Json], None]:
        """Yield the objects by UID, now and after every change; never ends by itself.

        Raises:
            ClusterError: the API server rejects a request, or cannot be reached several times in a row.
        """
        failures = 0
        while True:
            try:
                found, version = await self.list(resource, namespace, labels=labels, name=name)
                state: dict[str, Json] = {each["metadata"]["uid"]: each for each in found}
                yield dict(state)
                failures = 0
                changes = self.watch(resource, namespace, start=version, labels=labels, name=name)
                async with contextlib.aclosing(changes):
                    async for kind, changed in changes:
                        state[changed["metadata"]["uid"]] = changed
                        if kind == "DELETED":
                            del state[changed["metadata"]["uid"]]
                        yield dict(state)
                await asyncio.sleep(_WATCH_DELAY)  # a watch that ends at once must not become a hot loop
            except ClusterError as error:
                status = error.status if isinstance(error, ApiError) else 0
                failures += 1
                if (400 <= status < 500 and status not in (410, 429)) or failures > _MAX_WATCH_FAILURES:
                    raise
                await asyncio.sleep(0 if status == 410 else failures)

    async def watch(
        self, resource: Resource, namespace: str, *, start: str, labels: str = "", name: str = ""
    ) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield every change (ADDED, MODIFIED or DELETED) after a resource version until the server ends the watch.

        Raises:
            ApiError: 410 if the resource version has expired: list again.
        """
        query = {**selectors(labels, name), "watch": "true", "resourceVersion": start}
        query["timeoutSeconds"] = str(_WATCH_SECONDS)
        # The server ends the watch after this time. If the end does not arrive, the connection is broken.
        pieces = self.stream(resource.path(namespace), query, verb="WATCH", silence=_WATCH_SECONDS + _READ_TIMEOUT)
        begun = b""  # the limit of aiohttp for a line is too low for a large object
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                *lines, begun = (begun + piece).split(b"\n")
                for line in lines:
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        error = change["object"]
                        raise ApiError(int(error.get("code", 500)), str(error.get("reason")), str(error.get("message")))
                    yield change["type"], change["object"]
