"""A watch on pods for the operator benchmark, which notes when each pod is first seen.

The watch requests only the metadata of pods, so that it costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import aiohttp

from elastic_operator.api.constants import LABEL_JOB, LABEL_ROLE, ROLE_ETCD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from types import TracebackType

    from testbed.control_plane import ControlPlane

_METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_LIMIT: Final = 300.0
_POLL: Final = 0.2


@dataclass(slots=True)
class SeenPod:
    """A pod.

    Attributes:
        metadata: the pod's metadata.
        seen_at: when the pod was first seen, by the monotonic clock.
    """

    metadata: dict[str, Any]
    seen_at: float

    @property
    def live(self) -> bool:
        """Whether the pod is not terminating."""
        return "deletionTimestamp" not in self.metadata

    @property
    def name(self) -> str:
        """The pod's name."""
        return str(self.metadata["name"])

    @property
    def counts(self) -> bool:
        """Whether this is a live worker pod, not a pod of a job's etcd."""
        return self.live and self.metadata.get("labels", {}).get(LABEL_ROLE) != ROLE_ETCD

    @property
    def job(self) -> str:
        """The name of the pod's ElasticJob; empty if the pod belongs to none."""
        return str(self.metadata.get("labels", {}).get(LABEL_JOB, ""))


class PodWatch:
    """All pods of a cluster; an async context manager that watches them.

    Args:
        cluster: the cluster.

    Attributes:
        pods: the pods by namespace and UID.
    """

    def __init__(self, cluster: ControlPlane) -> None:
        self._cluster = cluster
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._workers: Counter[str] = Counter()
        self.pods: dict[str, dict[str, SeenPod]] = {}

    async def __aenter__(self) -> Self:
        verified = ssl.create_default_context(cafile=self._cluster.control_plane.authority)
        headers = {"Authorization": f"Bearer {self._cluster.control_plane.token}"}
        connector = aiohttp.TCPConnector(ssl=verified)
        self._session = aiohttp.ClientSession(
            self._cluster.server, headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        self._task = asyncio.create_task(self._watch())
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._session is not None:
            await self._session.close()

    def there(self, namespace: str) -> dict[str, SeenPod]:
        """Return the pods of a namespace, by UID."""
        return self.pods.setdefault(namespace, {})

    def live(self, namespace: str) -> dict[str, SeenPod]:
        """Return the live worker pods of a namespace, by UID."""
        return {uid: pod for uid, pod in self.there(namespace).items() if pod.counts}

    def count(self, namespace: str) -> int:
        """Return the number of live worker pods of a namespace."""
        return self._workers[namespace]

    def has_others(self, namespace: str, known: Collection[str]) -> bool:
        """Return whether a namespace has a pod whose UID is not in ``known``."""
        return any(uid not in known for uid in self.there(namespace))

    async def until(self, true: Callable[[], bool], limit: float = _LIMIT) -> float:
        """Wait until a condition holds, checking it at each event; return the time of the monotonic clock.

        Raises:
            TimeoutError: the condition did not hold within the limit.
        """
        async with asyncio.timeout(limit):
            while not true():
                assert self._task is not None
                if self._task.done():
                    self._task.result()
                self._news.clear()
                await self._news.wait()
        return time.monotonic()

    async def until_running(self, namespace: str, count: int, limit: float = _LIMIT) -> None:
        """Wait until at least this number of pods of a namespace is running."""
        async with asyncio.timeout(limit):
            while await self._running(namespace) < count:  # noqa: ASYNC110 - the watch has only metadata
                await asyncio.sleep(_POLL)

    async def _running(self, namespace: str) -> int:
        query = {"fieldSelector": "status.phase=Running", "resourceVersion": "0"}
        found = await self._get(f"/api/v1/namespaces/{namespace}/pods", query)
        return sum("deletionTimestamp" not in item["metadata"] for item in found["items"] or ())

    async def _get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        assert self._session is not None
        async with self._session.get(path, params=query, headers={"Accept": _METADATA_LIST}) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
            return found

    async def _watch(self) -> NoReturn:
        while True:
            version = await self._list()
            with contextlib.suppress(aiohttp.ClientPayloadError):
                await self._follow(version)

    async def _list(self) -> str:
        """List all pods, also to find those that were deleted between two watches; return the resource version."""
        listed = await self._get("/api/v1/pods", {})
        there = {item["metadata"]["uid"]: item["metadata"] for item in listed["items"] or ()}
        for pods in self.pods.values():
            for uid, pod in list(pods.items()):
                if uid not in there:
                    self._take("DELETED", pod.metadata)
        for metadata in there.values():
            self._take("ADDED", metadata)
        return str(listed["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> None:
        """Watch until the API server ends the watch."""
        assert self._session is not None
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "86400"}
        async with self._session.get("/api/v1/pods", params=query, headers={"Accept": _METADATA}) as response:
            response.raise_for_status()
            async for line in _lines(response.content):
                change = json.loads(line)
                if change["type"] == "ERROR":
                    return
                self._take(change["type"], change["object"]["metadata"])

    def _take(self, kind: str, metadata: dict[str, Any]) -> None:
        namespace = metadata["namespace"]
        pods = self.there(namespace)
        known = pods.get(metadata["uid"])
        if known is not None and known.counts:
            self._workers[namespace] -= 1
        if kind == "DELETED":
            pods.pop(metadata["uid"], None)
        else:
            pod = pods[metadata["uid"]] = SeenPod(metadata, known.seen_at if known is not None else time.monotonic())
            self._workers[namespace] += pod.counts
        self._news.set()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
