"""The reconciler and its backend on a small API server; the object cache is updated by tests instead of watches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

from elastic_operator.controller.reconciler import Reconciler
from elastic_operator.kubernetes.backend import KubernetesBackend
from elastic_operator.kubernetes.client import DEPLOYMENTS, ELASTIC_JOBS, EVENTS, PODS, Api
from elastic_operator.kubernetes.etcd_endpoints import EtcdEndpoints
from elastic_operator.kubernetes.executor import Executor
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.kubernetes.object_cache import ObjectCache
from elastic_operator.kubernetes.writer import Writer
from elastic_operator.resources.owned_objects import PodSettings, etcd_name
from tests.support.certificates import CERTIFICATES
from tests.support.object_server import MADE, NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.api.json_values import Json
    from elastic_operator.controller.model import Pod
    from elastic_operator.kubernetes.client import Resource
    from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates

NAME = "digits"

_TIMEOUT = 30.0
_ETCD_TIMEOUT = 0.5

_READY = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
_RUNS = {"name": "worker", "ready": True, "state": {"running": {"startedAt": MADE}}}


class OperatedCluster:
    """An operator without watches, which soon reports an unreachable etcd; it runs within ``async with``.

    Args:
        certificates: issues the certificates of the job's etcd.

    Attributes:
        server: the API server.
        api: the operator's connection.
        cache: the operator's cache of objects.
        backend: the backend of its reconciler.
    """

    def __init__(self, certificates: EtcdCertificates = CERTIFICATES) -> None:
        self._certificates = certificates
        self._looked = asyncio.Event()
        self._last_look = 0.0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self.server = await stack.enter_async_context(ObjectServer())
            api = self.api = await stack.enter_async_context(Api(self.server.configuration))
            certificates = self._certificates
            cache = self.cache = ObjectCache(changed=self._on_change, pod_deleted=self._on_pod_deleted)
            writer = await stack.enter_async_context(Writer(api, cache))
            stores = JobStores(
                api,
                self._on_change,
                certificates,
                endpoints=EtcdEndpoints(["127.0.0.0/8"]),
                timeout=_ETCD_TIMEOUT,
                managed_timeout=_ETCD_TIMEOUT,
            )
            await stack.enter_async_context(stores)
            executor = Executor(
                cache=cache, writer=writer, stores=stores, certificates=certificates, settings=PodSettings()
            )
            self.backend = KubernetesBackend(api=api, cache=cache, stores=stores, executor=executor)
            self._reconciler = Reconciler(self.backend, reconciled=self._on_reconcile)
            work = asyncio.create_task(self._reconciler.run())
            stack.push_async_callback(_end, work)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def add_job(self, **spec: Any) -> None:
        """Create a job of two pods, or change its spec."""
        whole = {"minReplicas": 2, "maxReplicas": 2, "replicas": 2, "image": "i", "args": ["a.py"], **spec}
        self.change(ELASTIC_JOBS, NAME, spec=whole)

    def change(self, resource: Resource, name: str, **body: Any) -> None:
        """Change an object on the server and in the operator's cache."""
        self.cache.put(resource, self.server.put(resource, name, **body))

    def run_pods(self) -> None:
        """Make all pods run."""
        for pod in self.server.of_kind(PODS):
            status = {"phase": "Running", "conditions": _READY, "containerStatuses": [_RUNS]}
            self.change(PODS, pod["metadata"]["name"], status=status)

    def set_etcd_status(self, **status: Any) -> None:
        """Set the status of the Deployment of the job's etcd."""
        self.change(DEPLOYMENTS, etcd_name(NAME), status={"observedGeneration": 1, **status})

    @property
    def status(self) -> dict[str, Any]:
        """The job's status."""
        status: dict[str, Any] = self.server.get(ELASTIC_JOBS, NAME).get("status", {})
        return status

    def holds(self, condition: str) -> bool:
        """Return whether a condition of the job holds."""
        return self.message(condition) is not None

    def message(self, condition: str) -> str | None:
        """Return the message of a true condition of the job, or None for a false condition."""
        for each in self.status.get("conditions", ()):
            if (each["type"], each["status"]) == (condition, "True"):
                return str(each["message"])
        return None

    def events(self, reason: str) -> list[str]:
        """Return the messages of the job's events with this reason."""
        return [event["message"] for event in self.server.of_kind(EVENTS) if event["reason"] == reason]

    async def reconcile(self) -> None:
        """Reconcile the job once."""
        asked = time.monotonic()
        self._on_change(f"{NAMESPACE}/{NAME}")
        async with asyncio.timeout(_TIMEOUT):
            while self._last_look < asked:
                self._looked.clear()
                await self._looked.wait()

    def _on_change(self, key: str) -> None:
        self._reconciler.wake(key)

    def _on_pod_deleted(self, body: Json, last: Pod) -> None:
        self.backend.pod_deleted(body, last)

    def _on_reconcile(self, seconds: float, _outcome: str) -> None:
        self._last_look = time.monotonic() - seconds
        self._looked.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is met."""
        await self.server.wait_for(condition)

    async def wait_for_pods(self, number: int = 2) -> None:
        """Wait until there is exactly this number of pods."""
        await self.wait_for(lambda: len(self.server.of_kind(PODS)) == number)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
