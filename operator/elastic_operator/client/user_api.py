"""The API server for the commands of a user: logs, the pod proxy, errors that say what to do."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Final

from elastic_operator.api.spec import GROUP
from elastic_operator.errors import BadInput, ClusterError, ElasticJobError, NotFound
from elastic_operator.kubernetes.client import Api, ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from kubernetes.aio.client import Configuration

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_UNKNOWN_KIND: Final = "could not find the requested resource"
_READ_TIMEOUT: Final = 30.0
"""Seconds without data after which a response counts as broken."""


class UserApi(Api):
    """A connection for a command of a user; an async context manager."""

    def __init__(self, configuration: Configuration, namespace: str = "default") -> None:
        super().__init__(configuration, namespace)
        configuration.connection_pool_maxsize = 0  # unlimited: each log that is followed holds a connection

    async def log(
        self, namespace: str, pod: str, container: str, *, follow: bool, since: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield a container's log with timestamps, from a time (RFC 3339) on, or until the container has ended."""
        query = {"container": container, "timestamps": "true"}
        query |= ({"follow": "true"} if follow else {}) | ({"sinceTime": since} if since is not None else {})
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        # A log that is followed is silent as long as the program is.
        pieces = self._stream(path, query, silence=None if follow else _READ_TIMEOUT)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def from_pod(self, namespace: str, pod: str, port: int, path: str, *, most: int) -> bytes:
        """GET a path of a pod through the API server's proxy.

        Raises:
            ApiError: the pod does not answer, or the user has no permission to use the proxy.
            ClusterError: the answer has more than ``most`` bytes.
        """
        pieces = self._stream(
            f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}", {}, silence=_READ_TIMEOUT
        )
        data = bytearray()
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                data += piece
                if len(data) > most:
                    raise ClusterError(f"what it serves under {path} is too large")
        return bytes(data)


@contextlib.asynccontextmanager
async def connect(
    environ: Mapping[str, str],
    *,
    kubeconfig: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> AsyncGenerator[UserApi, None]:
    """Connect to the cluster that the command line names; None stands for the defaults of the kubeconfig.

    Raises:
        BadInput: the kubeconfig, context or namespace is invalid.
    """
    if namespace is not None and not _LABEL.fullmatch(namespace):
        raise BadInput(f"invalid namespace {namespace!r}; check the value of -n")
    api = await UserApi.from_kubeconfig(kubeconfig, context, environ)
    api.namespace = namespace or api.namespace
    async with api:
        yield api


@contextlib.contextmanager
def readable_errors(not_found: str) -> Iterator[None]:
    """Within the block, turn refusals of the API server into errors that say what to do."""
    try:
        yield
    except ApiError as error:
        raise _readable(error, not_found) from None


def _readable(error: ApiError, not_found: str) -> ElasticJobError:
    match error.status:
        case 401:
            return ClusterError(
                "the API server does not accept these credentials; log in again, or name another --context"
            )
        case 403:
            return ClusterError(f"you may not do this on this cluster: {error.message}")
        case 404 if error.reason == "NotFound" and _UNKNOWN_KIND not in error.message:
            return NotFound(not_found)
        case 404:
            return ClusterError(
                f"this cluster does not know ElasticJobs (elasticjobs.{GROUP}); install the operator with "
                "`helm install elastic-operator charts/`, or name another --context"
            )
        case _ if error.invalid:
            return BadInput(error.message)
        case _:
            return error
