"""The API server, as the operator and ``elasticjob`` talk to it: plain JSON in and out, and errors as sentences.

The official client brings the connection, the credentials and their renewal. Its models are passed by: to read a
thousand pods into them takes twelve times as long as to read the JSON, and they drop what they do not know.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.request import getproxies_environment

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kube.api_error import ApiError, refusal, unreachable
from elastic_operator.kube.page import Page

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
    from types import TracebackType

    from elastic_operator.kube.resources import Resource
    from elastic_operator.spec import Json

__all__ = ["APPLY_PATCH", "MERGE_PATCH", "Access", "Api", "ApiError"]

_TIMEOUT: Final = 30.0
_WATCHED: Final = 300
"""Seconds after which the server is to end a watch."""
_CONNECTIONS: Final = 96
_LONGEST_REFUSAL: Final = 1 << 20
"""Bytes that are read of why not; a pod that is asked through the API server may write for ever."""
_PAGE: Final = 500
"""So many objects are read at once: all pods of a large cluster at once would fill the memory."""
_OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_USER_AGENT: Final = "elastic-operator"
_NETWORK_ERRORS: Final = (aiohttp.ClientError, OSError, TimeoutError)

MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML, too."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where an API server is and how it is reached, for whoever has a connection of his own.

    Attributes:
        server: its URL.
        authority_file: with the certificate that vouches for it; None for what the system trusts.
        authority: the certificate itself.
        certificate_file: the client's; None where it has none.
        key_file: of the client's certificate.
        insecure: whether nobody has to vouch for the server.
        authorization: the header of that name; None where there is none. A secret.
        proxy: URL of a proxy; None where there is none.
    """

    server: str
    authority_file: str | None = None
    authority: str | bytes | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    insecure: bool = False
    authorization: str | None = field(default=None, repr=False)
    proxy: str | None = None


class Api:
    """A connection to an API server; an async context manager.

    Attributes:
        namespace: the one that the kubeconfig's context names, or of the pod that this runs in; "default" where there
            is none.
        asked: called after each request with its verb and the HTTP status of the answer, 0 where there was none.
    """

    def __init__(self, configuration: Configuration, namespace: str = "default") -> None:
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = None  # what fails is tried again where it is known whether that makes sense
        # Where the environment names no proxy, there is nothing in it to trust: aiohttp would look for a ~/.netrc, in
        # another thread, before each request.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
        self._configuration = configuration
        self._client: ApiClient | None = None
        self.namespace = namespace
        self.asked: Callable[[str, int], None] = lambda _verb, _status: None

    @classmethod
    async def from_kubeconfig(cls, path: str | None = None, context: str | None = None) -> Self:
        """What a kubeconfig says.

        Args:
            path: the file; None for what KUBECONFIG names, or ``~/.kube/config``.
            context: which of its contexts; None for the current one.

        Raises:
            BadInput: it can't be read, or has no such context.
        """
        configuration = Configuration()
        try:
            loader = await load_kube_config(
                config_file=path, context=context, client_configuration=configuration, persist_config=False
            )
            current = loader.current_context
        except (ConfigException, OSError, ValueError) as error:
            what = path or "the kubeconfig"
            raise BadInput(f"{what} cannot be used: {error}; name one with --kubeconfig and --context") from None
        return cls(configuration, str(current.get("context", {}).get("namespace") or "default"))

    @classmethod
    async def in_cluster(cls) -> Self:
        """What a pod is given.

        Raises:
            BadInput: this runs in no pod, or its service account's token isn't mounted.
        """
        configuration = Configuration()
        try:
            load_incluster_config(client_configuration=configuration)
        except ConfigException as error:
            raise BadInput(f"this is not a pod with a service account ({error}); use --kubeconfig") from None
        try:
            namespace = _OWN_NAMESPACE.read_text().strip()
        except OSError:
            namespace = ""
        return cls(configuration, namespace or "default")

    def another(self) -> Self:
        """The same, with connections of its own: what is asked there waits for nothing that is asked here."""
        return type(self)(self._configuration, self.namespace)

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._configuration)
        self._client.user_agent = _USER_AGENT
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(kind, error, trace)

    async def access(self) -> Access:
        """What another client needs to reach the same API server; a token that expires is a fresh one."""
        configuration = self._configuration
        return Access(
            server=configuration.host,
            authority_file=configuration.ssl_ca_cert or None,
            authority=configuration.ca_cert_data or None,
            certificate_file=configuration.cert_file or None,
            key_file=configuration.key_file or None,
            insecure=not configuration.verify_ssl,
            authorization=await configuration.get_api_key_with_prefix("BearerToken", alias="authorization"),
            proxy=configuration.proxy or None,
        )

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """One object.

        Raises:
            ApiError: there is none (404), or it may not be read.
            ClusterError: the API server can't be reached; so for every method.
        """
        return await self._json("GET", resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", name: str = "", fields: str = ""
    ) -> tuple[list[Json], str]:
        """The objects of a namespace (None: of all) with these labels, and the resource version of the listing.

        Args:
            resource: their kind.
            namespace: where.
            labels: a label selector.
            name: only the one of this name.
            fields: a field selector, where no name is given.
        """
        query = _selection(labels, name, fields)
        listing = await self._json("GET", resource.path(namespace), query=query, verb="LIST")
        return list(listing.get("items") or ()), str(listing["metadata"]["resourceVersion"])

    async def pages(self, resource: Resource, namespace: str | None, *, labels: str = "") -> AsyncGenerator[Page, None]:
        """What :meth:`list` gives, some hundred objects at a time.

        Raises:
            ApiError: also where reading took so long that the listing is no longer kept (410): begin again.
        """
        query = {**_selection(labels), "limit": str(_PAGE)}
        while True:
            text = await self._text("GET", resource.path(namespace), query=query, verb="LIST")
            try:
                page = Page.of(text)
            except ValueError:
                raise self._stranger() from None
            del text
            yield page
            if not page.after:
                return
            query["continue"] = page.after

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        """Make an object; unknown and repeated fields are refused (``fieldValidation=Strict``).

        Returns:
            The object as it was made.
        """
        return await self._json("POST", resource.path(namespace), query={"fieldValidation": "Strict"}, body=body)

    async def replace(self, resource: Resource, namespace: str, name: str, body: Json, subresource: str = "") -> Json:
        """Put an object, or its subresource, in the place of the one with the same resource version."""
        return await self._json("PUT", resource.path(namespace, name, subresource), body=body)

    async def patch(self, resource: Resource, namespace: str, name: str, body: Json, subresource: str = "") -> Json:
        """Change an object, or its subresource, by a JSON merge patch; only the resource version that it may name."""
        return await self._json(
            "PATCH", resource.path(namespace, name, subresource), body=body, content_type=MERGE_PATCH
        )

    async def apply(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """Have an object say this, whoever said otherwise, and make it if need be; what others say beside it stays.

        Returns:
            The object as it is now.
        """
        return await self._json(
            "PATCH",
            resource.path(namespace, name),
            query={"fieldManager": _USER_AGENT, "force": "true", "fieldValidation": "Strict"},
            body=body,
            content_type=APPLY_PATCH,
            verb="APPLY",
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str | None = None, grace: int | None = None
    ) -> Json:
        """Remove an object, and in the background what it owns.

        Args:
            resource: its kind.
            namespace: where it is.
            name: its name.
            uid: only if it is this very one.
            grace: seconds that its containers get; None for what the pod says.
        """
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        return await self._json("DELETE", resource.path(namespace, name), body=body)

    async def watch(
        self, resource: Resource, namespace: str | None, *, start: str, labels: str = "", name: str = ""
    ) -> AsyncGenerator[tuple[str, Json], None]:
        """Every change from a resource version on: ADDED, MODIFIED or DELETED, with the object, for some minutes.

        Raises:
            ApiError: the resource version is no longer kept (410): list again.
        """
        query = {**_selection(labels, name), "watch": "true", "resourceVersion": start}
        query["timeoutSeconds"] = str(_WATCHED)
        # The server ends it by then: where not even that is heard, the connection is dead.
        pieces = self._stream(resource.path(namespace), query, verb="WATCH", silence=_WATCHED + _TIMEOUT)
        async with contextlib.aclosing(pieces):
            async for line in _lines(pieces):
                change = json.loads(line)
                if change["type"] == "ERROR":
                    told = change["object"]
                    raise ApiError(int(told.get("code", 500)), str(told.get("reason")), str(told.get("message")))
                yield change["type"], change["object"]

    async def _stream(
        self, path: str, query: Mapping[str, str], *, verb: str = "", silence: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """An answer that comes little by little, as it comes.

        Args:
            path: of what is asked for.
            query: how.
            verb: what it is counted as.
            silence: seconds without a byte after which it is no longer waited for; None for no limit.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT, sock_read=silence)
        try:
            response = await self._request("GET", path, query=query, time_limit=limit, verb=verb)
            with contextlib.closing(response):
                if response.status >= 400:
                    raise refusal(response.status, await _beginning(response))
                async for piece in response.content.iter_any():
                    yield piece
        except _NETWORK_ERRORS as error:
            raise unreachable(error) from None

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
        data = await self._text(method, path, query=query, body=body, content_type=content_type, verb=verb)
        try:
            found: dict[str, Any] = msgspec.json.decode(data)
        except ValueError:  # it is no JSON, or no UTF-8
            raise self._stranger() from None
        return found

    async def _text(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        verb: str = "",
    ) -> bytes:
        """An answer that says that it was done, as it was written."""
        try:
            response = await self._request(method, path, query=query, body=body, content_type=content_type, verb=verb)
            with contextlib.closing(response):
                data = await response.read()
        except _NETWORK_ERRORS as error:
            raise unreachable(error) from None
        if response.status >= 400:
            raise refusal(response.status, data)
        return data

    def _stranger(self) -> ClusterError:
        return ClusterError(f"what answers under {self._configuration.host} is no Kubernetes API server")

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        time_limit: float | aiohttp.ClientTimeout = _TIMEOUT,
        verb: str = "",
    ) -> aiohttp.ClientResponse:
        if self._client is None:
            raise RuntimeError("used outside of its `async with` block")
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        method, url, headers, _, _ = request
        status = 0
        try:
            answer = await self._client.call_api(method, url, headers, body=body, _request_timeout=time_limit)
            response: aiohttp.ClientResponse = answer.response
            status = response.status
        finally:
            self.asked(verb or method, status)
        return response


def _selection(labels: str = "", name: str = "", fields: str = "") -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": f"metadata.name={name}" if name else fields}
    return {kind: selector for kind, selector in selectors.items() if selector}


async def _lines(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, however long: an object may have megabytes, and aiohttp gives up on a line long before."""
    begun: list[bytes] = []
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end))
            begun.clear()
        begun.append(rest)


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) >= _LONGEST_REFUSAL:
            break
    return bytes(data)
