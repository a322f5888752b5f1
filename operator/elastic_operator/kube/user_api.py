"""The API server as a person's command talks to it: what the operator's connection can do, and what only a person asks.

Whatever goes wrong is an error of :mod:`elastic_operator.errors` whose message a person can act upon.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import BadInput, ClusterError, ElasticJobError, NotFound
from elastic_operator.kube import kubeconfig
from elastic_operator.kube.api import Api, ApiError
from elastic_operator.kube.kubeconfig import opened
from elastic_operator.spec import GROUP

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from kubernetes.aio.client import Configuration

    from elastic_operator.kube.resources import Resource
    from elastic_operator.spec import Json

__all__ = ["UserApi", "Whereabouts", "connection", "in_words", "opened"]

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NO_SUCH_KIND: Final = "could not find the requested resource"
_SILENCE: Final = 30.0
"""Seconds without a byte after which an answer is no longer waited for."""
_NOT_NOW: Final = 9
"""How often a server may say that it has too much to do, or just learns a new kind of object."""
_BETWEEN_WATCHES: Final = 0.2
_PATIENCE: Final = 6
"""How often in a row a watch may fail, seconds apart, before that is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Which cluster, and where in it: what the command line says.

    Attributes:
        kubeconfig: the file; None for the usual ones.
        context: of the file; None for the current one.
        namespace: None for the context's own.
    """

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None


class UserApi(Api):
    """A connection for a person; an async context manager."""

    def __init__(self, configuration: Configuration, namespace: str = "default") -> None:
        super().__init__(configuration, namespace)
        configuration.connection_pool_maxsize = 0  # without a limit: each log that is followed holds a connection

    async def stamped_log(
        self, namespace: str, pod: str, container: str, *, follow: bool, since: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """What a container has printed, each line with the time at which it came before it, piece by piece.

        Args:
            namespace: of the pod.
            pod: its name.
            container: its name.
            follow: go on with what it prints from now on, until it has ended.
            since: only what came at this second (as RFC 3339 has it) or later.
        """
        query = {"container": container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if since is not None:
            query["sinceTime"] = since
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        # A log that is followed is silent as long as the program is.
        pieces = self._stream(path, query, silence=None if follow else _SILENCE)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def from_pod(self, namespace: str, pod: str, port: int, path: str, *, most: int) -> bytes:
        """What a pod serves, through the API server.

        Args:
            namespace: of the pod.
            pod: its name.
            port: on which it serves.
            path: there, with its slash.
            most: bytes that are read.

        Raises:
            ApiError: the pod does not answer, or it may not be asked.
            ClusterError: the answer is too large, or the API server cannot be reached.
        """
        pieces = self._stream(f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}", {}, silence=_SILENCE)
        data = bytearray()
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                data += piece
                if len(data) > most:
                    raise ClusterError(f"what it serves under {path} is too large")
        return bytes(data)

    async def states(
        self, resource: Resource, namespace: str, *, labels: str = "", name: str = ""
    ) -> AsyncGenerator[Mapping[str, Json], None]:
        """The objects as they are now, by UID, and again after every change; it never ends by itself.

        Args:
            resource: their kind.
            namespace: where they are.
            labels: those of them with these labels.
            name: the one with this name.

        Raises:
            ClusterError: the API server could not be reached several times in a row, or refuses.
        """
        failures = 0
        while True:
            try:
                async with contextlib.aclosing(self._states(resource, namespace, labels, name)) as states:
                    async for state in states:
                        failures = 0
                        yield state
            except ClusterError as error:
                expired = isinstance(error, ApiError) and error.status == 410
                final = isinstance(error, ApiError) and 400 <= error.status < 500 and error.status not in (410, 429)
                failures += 1
                if final or failures > _PATIENCE:
                    raise
                await asyncio.sleep(0 if expired else failures)

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        verb: str = "",
    ) -> dict[str, Any]:
        """As kubectl does: a server that says "not now" has done nothing, and is asked again."""
        tries = 0
        while True:
            try:
                return await super()._json(method, path, query=query, body=body, content_type=content_type, verb=verb)
            except ApiError as error:
                tries += 1
                if error.status != 429 or tries > _NOT_NOW:
                    raise
            await asyncio.sleep(1)

    async def _states(
        self, resource: Resource, namespace: str, labels: str, name: str
    ) -> AsyncGenerator[Mapping[str, Json], None]:
        found, version = await self.list(resource, namespace, labels=labels, name=name)
        state: dict[str, Json] = {each["metadata"]["uid"]: each for each in found}
        yield dict(state)
        while True:
            changes = self.watch(resource, namespace, start=version, labels=labels, name=name)
            async with contextlib.aclosing(changes):
                async for kind, changed in changes:
                    version = changed["metadata"]["resourceVersion"]
                    uid = changed["metadata"]["uid"]
                    if kind == "DELETED":
                        state.pop(uid, None)
                    else:
                        state[uid] = changed
                    yield dict(state)
            await asyncio.sleep(_BETWEEN_WATCHES)  # one that ends at once must not become a hot loop


async def connection(where: Whereabouts, environ: Mapping[str, str]) -> UserApi:
    """The connection that a command line asks for, in whose ``namespace`` it is meant; not opened yet.

    Args:
        where: what the command line says.
        environ: of the process.

    Raises:
        BadInput: there is no such kubeconfig or context, or one that can't be used.
    """
    if where.namespace is not None and not _LABEL.fullmatch(where.namespace):
        raise BadInput(f"there can be no namespace {where.namespace!r}; check what stands after -n")
    files = kubeconfig.find(where.kubeconfig, environ)
    api = await kubeconfig.connection(UserApi, files, where.context)
    if where.namespace is not None:
        api.namespace = where.namespace
    return api


@contextlib.contextmanager
def in_words(missing: str) -> Iterator[None]:
    """Within the block, refusals of the API server become errors that a person can act upon.

    Args:
        missing: what to say where there is no such object.
    """
    try:
        yield
    except ApiError as error:
        raise _told(error, missing) from None


def _told(error: ApiError, missing: str) -> ElasticJobError:
    match error.status:
        case 401:
            return ClusterError(
                "the API server does not accept these credentials; log in again, or name another --context"
            )
        case 403:
            return ClusterError(f"you may not do this on this cluster: {error.words}")
        case 404 if error.reason == "NotFound" and _NO_SUCH_KIND not in error.words:
            return NotFound(missing)
        case 404:
            return ClusterError(
                f"this cluster does not know ElasticJobs (elasticjobs.{GROUP}); install the operator with "
                "`helm install elastic-operator charts/`, or name another --context"
            )
        case _ if error.rejects_object:
            return BadInput(error.words)
        case _:
            return error
