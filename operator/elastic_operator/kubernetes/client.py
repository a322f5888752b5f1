"""A small asynchronous client of the Kubernetes API: plain JSON in and out, errors as sentences.

The official client provides the connection, the credentials and their renewal. Its models are not used: decoding a
thousand pods into them takes twelve times as long as decoding the JSON, and they drop unknown fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.request import getproxies_environment

import aiohttp
import msgspec
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from elastic_operator.api.spec import GROUP, VERSION, GangScheduler
from elastic_operator.errors import BadInput, ClusterError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import kopf

    from elastic_operator.api.json_values import Json


_TIMEOUT: Final = 30.0
READ_TIMEOUT: Final = 30.0
"""Seconds without data after which a stream counts as broken."""
_CONNECTIONS: Final = 96
_MAX_ERROR_BYTES: Final = 1 << 20
"""Maximum size of an error, because a pod may send one of any length through the API server's proxy."""
_PAGE_SIZE: Final = 500
"""Objects per page of a list, because all pods of a large cluster at once would fill the memory."""
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_USER_AGENT: Final = "elastic-operator"
NETWORK_ERRORS: Final = (aiohttp.ClientError, OSError, TimeoutError)
_POLICIES: Final = ('admission webhook "', "ValidatingAdmissionPolicy '")
"""Texts before the name of an admission policy in an error message; a policy may reject with any HTTP status."""
_WEBHOOK_FAILED: Final = "failed calling webhook "
_JSON: Final = "application/json"
_MERGE_PATCH: Final = "application/merge-patch+json"
_APPLY_PATCH: Final = "application/apply-patch+yaml"
"""Server-side apply."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object.

    Attributes:
        group: the API group; empty for the core group.
        version: the API version.
        plural: the kind's name in a path.
        kind: the kind's name in an object.
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """The value of ``apiVersion`` in an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Return the path of the objects in a namespace (None: in all), of one object, or of its subresource."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = "" if namespace is None else f"namespaces/{namespace}"
        return "/".join(part for part in (root, within, self.plural, name, subresource) if part)


ELASTIC_JOBS: Final = Resource(GROUP, VERSION, "elasticjobs", "ElasticJob")
PODS: Final = Resource("", "v1", "pods", "Pod")
SERVICES: Final = Resource("", "v1", "services", "Service")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
EVENTS: Final = Resource("", "v1", "events", "Event")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
DISRUPTION_BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
SCHEDULER_PLUGINS_GROUPS: Final = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
VOLCANO_GROUPS: Final = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
POD_GROUPS: Final[Mapping[GangScheduler, Resource]] = {
    GangScheduler.SCHEDULER_PLUGINS: SCHEDULER_PLUGINS_GROUPS,
    GangScheduler.VOLCANO: VOLCANO_GROUPS,
}


class ApiError(ClusterError):
    """The API server answered with an error.

    Attributes:
        status: the HTTP status.
        reason: one word, such as NotFound, AlreadyExists, Conflict, Invalid.
        message: the server's message.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the API server refused ({status} {reason}): {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @classmethod
    def of(cls, status: int, body: bytes) -> ApiError:
        """Return the error for a response with this status and body."""
        try:
            document = json.loads(body)
            return cls(status, str(document.get("reason") or ""), str(document.get("message") or ""))
        except (ValueError, AttributeError):
            return cls(status, "", body[:500].decode(errors="replace").strip())

    @property
    def not_found(self) -> bool:
        """Whether there is no such object."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Whether an object of this name exists, or the object has changed since it was read."""
        return self.status == 409

    @property
    def transient(self) -> bool:
        """Whether the error of the server, or of a webhook that it calls, is usually temporary."""
        return self.status >= 500 or self.status == 429

    @property
    def webhook_failed(self) -> bool:
        """Whether an admission webhook cannot be called."""
        return _WEBHOOK_FAILED in self.message

    @property
    def blocked(self) -> bool:
        """Whether a permission, a quota or an admission policy forbids the request; that may change at any time."""
        denied = self.status == 403 or any(policy in self.message for policy in _POLICIES)
        return denied or self.webhook_failed

    @property
    def invalid(self) -> bool:
        """Whether the object itself is invalid, so that another attempt is useless."""
        return self.status in (400, 413, 415, 422) and not self.blocked


_HINTS: Final[tuple[tuple[str, str], ...]] = (
    (
        r"error looking up service account|serviceaccount \"[^\"]*\" not found",
        "create it, or name another one in spec.template.spec.serviceAccountName",
    ),
    (
        r"no PriorityClass with name ",
        "create it, or name another one in spec.schedulingPolicy.priorityClassName, or in the template",
    ),
    (
        r"certificate of etcd at .* cannot be trusted: .*(self.signed|issuer|first certificate)",
        "name a Secret in spec.etcd.tlsSecret whose ca.crt is the certificate of its authority",
    ),
    (r"User \"[^\"]*\" cannot \w+ resource ", "grant the operator its permissions (the chart's role has them)"),
    (r"exceeded quota: ", "raise that quota, free some of it, or reduce the requests of the job"),
    (
        r"failed quota: .* must specify ",
        "set it in spec.template.spec.containers, and for the job's etcd in spec.etcd.resources",
    ),
    (r"(secret|configmap) \"[^\"]*\" not found", "create it, or name another one in spec.template"),
    (r"violates PodSecurity ", "set it in spec.template.spec, or let the namespace admit such pods"),
)
"""Patterns of the most frequent errors of Kubernetes and etcd, and what to do about them."""


def with_hint(message: str) -> str:
    """Return an error message with the hint for it, if there is one."""
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, message)), "")
    return f"{message.removesuffix('.')}; {hint}" if hint else message


def backoff(first: float, longest: float) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: twice as long each time, up to ``longest``."""
    delay = first
    while True:
        yield delay
        delay = min(delay * 2, longest)


class Api:
    """A client of an API server; an async context manager. Methods raise ClusterError if the server is unreachable.

    Attributes:
        namespace: the namespace of the kubeconfig's context, or of this pod.
        on_request: called after each request with its verb and the HTTP status, 0 if there was no response.
    """

    def __init__(self, configuration: Configuration, namespace: str = "default") -> None:
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = None  # the caller retries
        # With trust_env, aiohttp looks for ~/.netrc before each request, so it is set only for a proxy.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
        self._configuration = configuration
        self._client: ApiClient | None = None
        self.namespace = namespace
        self.on_request: Callable[[str, int], None] = lambda _verb, _status: None

    @classmethod
    async def from_kubeconfig(
        cls, path: str | None = None, context: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> Self:
        """Create a client with the kubeconfig that kubectl would use.

        Args:
            path: the kubeconfig; None for those that KUBECONFIG names, or ``~/.kube/config``.
            context: the context in the kubeconfig; None for its current one.
            environ: the environment with KUBECONFIG.

        Raises:
            BadInput: there is no such file or context, or it is invalid.
        """
        files = _kubeconfigs(path, environ)
        configuration = Configuration()
        try:
            with _logged_errors() as problems:
                loader = await load_kube_config(files, context, configuration, persist_config=False)
            namespace = str(loader.current_context.get("context", {}).get("namespace") or "default")
        except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            why = " ".join(str(error).split())
            raise BadInput(f"the kubeconfig {files} cannot be used: {why}; correct it, or choose another") from None
        if problems:
            raise BadInput(f"the kubeconfig {files} gives no credentials: {problems[0]}")
        return cls(configuration, namespace)

    @classmethod
    async def in_cluster(cls) -> Self:
        """Create a client with the pod's service account.

        Raises:
            BadInput: this is not a pod, or its service account's token is not mounted.
        """
        configuration = Configuration()
        try:
            load_incluster_config(client_configuration=configuration)
        except ConfigException as error:
            raise BadInput(f"this is not a pod with a service account ({error}); use --kubeconfig") from None
        namespace = _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.is_file() else ""
        return cls(configuration, namespace or "default")

    def another(self) -> Self:
        """Return a client of the same API server with its own connections."""
        return type(self)(self._configuration, self.namespace)

    async def __aenter__(self) -> Self:
        """Open the connection.

        Raises:
            BadInput: the certificates or keys are invalid.
        """
        try:
            self._client = ApiClient(self._configuration)
            self._client.user_agent = _USER_AGENT
            await self._client.__aenter__()
        except (OSError, ValueError) as error:
            raise BadInput(f"the certificates for {self._configuration.host} cannot be used: {error}") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(kind, error, trace)

    async def access(self) -> kopf.ConnectionInfo:
        """Return kopf's connection to the same API server, with a fresh token."""
        import kopf  # slow to import, and `elasticjob` does not need it

        configuration = self._configuration
        authorization = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        scheme, _, token = (authorization or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert or None,
            ca_data=configuration.ca_cert_data or None,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file or None,
            private_key_path=configuration.key_file or None,
            scheme=(scheme or "Bearer") if token else None,
            token=token or None,
            proxy_url=configuration.proxy or None,
        )

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """Read an object."""
        return self._decoded(await self._send("GET", resource.path(namespace, name)))

    async def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", name: str = "", fields: str = ""
    ) -> tuple[list[Json], str]:
        """List the objects of a namespace (None: of all); return them and the resource version of the list."""
        query = selectors(labels, name, fields)
        found = self._decoded(await self._send("GET", resource.path(namespace), query, verb="LIST"))
        return list(found.get("items") or ()), str(found["metadata"]["resourceVersion"])

    async def pages(
        self, resource: Resource, namespace: str | None, *, labels: str = ""
    ) -> AsyncGenerator[tuple[Sequence[Json], str], None]:
        """Yield the objects of a namespace (None: of all) in pages, each with the resource version of the list.

        Raises:
            ApiError: 410 if reading took so long that the list has expired.
        """
        query = {**selectors(labels), "limit": str(_PAGE_SIZE)}
        while True:
            found = self._decoded(await self._send("GET", resource.path(namespace), query, verb="LIST"))
            try:
                items, version = found["items"] or (), found["metadata"]["resourceVersion"]
                after = found["metadata"].get("continue")
            except (KeyError, TypeError):
                raise self._not_an_api_server() from None
            yield items, version
            if not after:
                return
            query["continue"] = after
            del found, items  # or two pages would fill the memory

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        """Create an object; unknown and duplicate fields are rejected. Return the object as created."""
        query = {"fieldValidation": "Strict"}
        return self._decoded(await self._send("POST", resource.path(namespace), query, body))

    async def replace(self, resource: Resource, namespace: str, name: str, body: Json, subresource: str = "") -> Json:
        """Replace an object, or its subresource, that still has the same resource version."""
        return self._decoded(await self._send("PUT", resource.path(namespace, name, subresource), body=body))

    async def patch(self, resource: Resource, namespace: str, name: str, body: Json, subresource: str = "") -> Json:
        """Change an object, or its subresource, with a JSON merge patch."""
        path = resource.path(namespace, name, subresource)
        return self._decoded(await self._send("PATCH", path, body=body, content_type=_MERGE_PATCH))

    async def apply(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """Apply an object on the server side, with force; return the new object."""
        query = {"fieldManager": _USER_AGENT, "force": "true", "fieldValidation": "Strict"}
        path = resource.path(namespace, name)
        return self._decoded(await self._send("PATCH", path, query, body, content_type=_APPLY_PATCH, verb="APPLY"))

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str | None = None, grace: int | None = None
    ) -> Json:
        """Delete an object, and in the background the objects that it owns.

        Args:
            resource: the kind of the object.
            namespace: the namespace of the object.
            name: the name of the object.
            uid: the UID that the object must have; None for any.
            grace: the grace period of the pod in seconds; None for the pod's own.
        """
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        return self._decoded(await self._send("DELETE", resource.path(namespace, name), body=body))

    async def stream(
        self, path: str, query: Mapping[str, str], *, verb: str = "", silence: float | None = READ_TIMEOUT
    ) -> AsyncGenerator[bytes, None]:
        """Yield a response in parts; raise ClusterError after ``silence`` seconds without data (None: no limit)."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT, sock_read=silence)
        try:
            response = await self._request("GET", path, query, None, _JSON, limit, verb)
            with contextlib.closing(response):
                if response.status >= 400:
                    raise ApiError.of(response.status, await _beginning(response))
                async for piece in response.content.iter_any():
                    yield piece
        except NETWORK_ERRORS as error:
            raise unreachable(error) from None

    async def execute(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """Execute a command in a container; return the connection to its standard streams.

        Each message begins with a byte: 0 for standard input, 1 and 2 for standard output and error, and 3 for the
        status at the end, as JSON.
        """
        if self._client is None:
            raise RuntimeError("used outside of its `async with` block")
        query = [("container", container), ("stdin", "1"), ("stdout", "1"), ("stderr", "1")]
        _, url, headers, _, _ = await self._client.param_serialize(
            "GET",
            PODS.path(namespace, pod, "exec"),
            query_params=query + [("command", word) for word in command],
            header_params={},
            auth_settings=["BearerToken"],
        )
        rest = self._client.rest_client
        if rest.pool_manager is None:  # before the first request
            rest.pool_manager = rest._create_pool_manager()  # noqa: SLF001 - as its own first request does
        try:
            return await rest.pool_manager.ws_connect(
                url,
                headers=headers,
                protocols=("v4.channel.k8s.io",),
                heartbeat=_TIMEOUT,
                max_msg_size=0,
                proxy=rest.proxy,
                proxy_headers=rest.proxy_headers,
            )
        except aiohttp.WSServerHandshakeError as error:
            forbidden = f"executing a program in the pod {pod} needs the permissions get and create of pods/exec"
            raise ApiError(error.status, "", forbidden if error.status == 403 else error.message) from None
        except NETWORK_ERRORS as error:
            raise unreachable(error) from None

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        *,
        content_type: str = _JSON,
        verb: str = "",
    ) -> bytes:
        try:
            response = await self._request(method, path, query or {}, body, content_type, _TIMEOUT, verb)
            with contextlib.closing(response):
                data = await response.read()
        except NETWORK_ERRORS as error:
            raise unreachable(error) from None
        if response.status >= 400:
            raise ApiError.of(response.status, data)
        return data

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        content_type: str,
        limit: float | aiohttp.ClientTimeout,
        verb: str,
    ) -> aiohttp.ClientResponse:
        if self._client is None:
            raise RuntimeError("used outside of its `async with` block")
        headers = {"Accept": _JSON, "Content-Type": content_type}
        _, url, headers, _, _ = await self._client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        status = 0
        try:
            answer = await self._client.call_api(method, url, headers, body=body, _request_timeout=limit)
            response: aiohttp.ClientResponse = answer.response
            status = response.status
        finally:
            self.on_request(verb or method, status)
        return response

    def _decoded(self, data: bytes) -> dict[str, Any]:
        try:
            found: dict[str, Any] = msgspec.json.decode(data)
        except ValueError:  # not JSON, or not UTF-8
            raise self._not_an_api_server() from None
        return found

    def _not_an_api_server(self) -> ClusterError:
        return ClusterError(f"the server at {self._configuration.host} is not a Kubernetes API server")


def selectors(labels: str = "", name: str = "", fields: str = "") -> dict[str, str]:
    """Return the parameters of a request that select by labels, and by a name or by fields."""
    given = {"labelSelector": labels, "fieldSelector": f"metadata.name={name}" if name else fields}
    return {kind: selector for kind, selector in given.items() if selector}


def unreachable(error: Exception) -> ClusterError:
    """Return the error for one of :data:`NETWORK_ERRORS`."""
    if isinstance(error, asyncio.TimeoutError):
        return ClusterError("the API server does not answer in time")
    return ClusterError(f"the API server cannot be reached: {str(error) or type(error).__name__}")


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) >= _MAX_ERROR_BYTES:
            break
    return bytes(data)


def _kubeconfigs(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the existing files, separated by colons."""
    if given is not None:
        path = Path(os.path.expanduser(given))
        if not path.is_file():
            raise BadInput(f"there is no kubeconfig {given}; check the path after --kubeconfig")
        return str(path)
    named = [Path(os.path.expanduser(part)) for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    usual = Path(os.path.expanduser("~/.kube/config"))
    found = [str(path) for path in named or [usual] if path.is_file()]
    if not found:
        where = f"KUBECONFIG names {os.pathsep.join(map(str, named))}" if named else "~/.kube/config does not exist"
        raise BadInput(f"there is no kubeconfig ({where}); name one with --kubeconfig")
    return os.pathsep.join(found)


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the errors that the official client logs: without credentials, it logs an error but raises none."""
    messages: list[str] = []
    logger, handler = logging.getLogger("kubernetes.aio.config"), logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
