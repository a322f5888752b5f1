"""All that carries out plans, on a small API server; in the place of watches, a test tells the cache."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

from elastic_operator.kube.api import Api
from elastic_operator.kube.cache import Cache
from elastic_operator.kube.cluster import KubernetesCluster
from elastic_operator.kube.departed import Departed
from elastic_operator.kube.etcd_objects import etcd_name
from elastic_operator.kube.etcd_secrets import EtcdSecrets
from elastic_operator.kube.events import Events
from elastic_operator.kube.kept import Kept
from elastic_operator.kube.ledger import Ledger
from elastic_operator.kube.managed_etcd import ManagedEtcd
from elastic_operator.kube.observing import Observing
from elastic_operator.kube.pod_starts import PodStarts
from elastic_operator.kube.reports import Reports
from elastic_operator.kube.resources import DEPLOYMENTS, ELASTIC_JOBS, EVENTS, PODS
from elastic_operator.kube.settings import PodSettings
from elastic_operator.kube.stores import Stores
from elastic_operator.kube.writer import Writer
from elastic_operator.reconcile import Reconciler, WorkQueue
from tests.support.object_server import MADE, NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.kube.resources import Resource

NAME = "digits"

_PATIENCE = 30.0

_READY = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
_RUNS = {"name": "worker", "ready": True, "state": {"running": {"startedAt": MADE}}}


class OperatedCluster:
    """Works within ``async with``.

    Args:
        away: seconds for which the store of a job may be away before anybody is told.
        lasting: seconds for which the API server may fail before anybody is told.

    Attributes:
        server: what the operator talks to.
        api: how.
        cache: what it knows.
        queue: what wants its attention.
        cluster: what carries out its plans.
        departed: the pods that are gone.
    """

    def __init__(self, *, away: float = 0.5, lasting: float = 0.5) -> None:
        self._away = away
        self._lasting = lasting
        self._looked = asyncio.Event()
        self._last_look = 0.0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self.server = await stack.enter_async_context(ObjectServer())
            api = self.api = await stack.enter_async_context(Api(self.server.configuration))
            self.queue = WorkQueue()
            self.cache = Cache(changed=self.queue.put)
            self.events = await stack.enter_async_context(Events(api, "operator-0"))
            secrets, settings = EtcdSecrets(api, ()), PodSettings()
            stores = Stores(self.queue.put, secrets=secrets, patience=self._away, own_patience=self._away)
            await stack.enter_async_context(stores)
            writer = Writer(api, self.cache)
            etcd = ManagedEtcd(api, self.cache, writer, settings)
            ledger = Ledger(lasting=self._lasting)
            self.departed = Departed()
            observing = Observing(
                cache=self.cache,
                etcd=etcd,
                starts=PodStarts(api),
                stores=stores,
                ledger=ledger,
                departed=self.departed,
                secrets=secrets,
                wake=self.queue.put,
            )
            cluster = self.cluster = KubernetesCluster(
                observing=observing,
                cache=self.cache,
                writer=writer,
                etcd=etcd,
                reports=Reports(api),
                kept=Kept(self.cache, writer),
                stores=stores,
                events=self.events,
                ledger=ledger,
                settings=settings,
                wake=self.queue.put,
            )
            work = asyncio.create_task(Reconciler(cluster, queue=self.queue, reconciled=self._on_look).run())
            stack.push_async_callback(_end, work)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def add_job(self, **spec: Any) -> None:
        """Make a job of two pods, or change its spec."""
        whole = {"minReplicas": 2, "maxReplicas": 2, "replicas": 2, "image": "i", "args": ["a.py"], **spec}
        self.change(ELASTIC_JOBS, NAME, spec=whole)

    def change(self, resource: Resource, name: str, **body: Any) -> None:
        """Have an object say this, and the operator know it."""
        self.cache.put(resource, self.server.put(resource, name, **body))

    def run_pods(self) -> None:
        """Have all pods run."""
        for pod in self.server.of_kind(PODS):
            self.run_pod(pod["metadata"]["name"])

    def run_pod(self, name: str) -> None:
        """Have a pod run."""
        self.change(PODS, name, status={"phase": "Running", "conditions": _READY, "containerStatuses": [_RUNS]})

    def tell_of_etcd(self, **status: Any) -> None:
        """Have the Deployment of the job's etcd say this of itself."""
        self.change(DEPLOYMENTS, etcd_name(NAME), status={"observedGeneration": 1, **status})

    @property
    def status(self) -> dict[str, Any]:
        """The job's status."""
        status: dict[str, Any] = self.server.get(ELASTIC_JOBS, NAME).get("status", {})
        return status

    def holds(self, condition: str) -> bool:
        """Whether a condition of the job holds."""
        return self.message(condition) is not None

    def message(self, condition: str) -> str | None:
        """What a condition of the job that holds says; None where it does not hold."""
        for each in self.status.get("conditions", ()):
            if (each["type"], each["status"]) == (condition, "True"):
                return str(each["message"])
        return None

    def told(self, reason: str) -> list[str]:
        """What was told of the job for this reason."""
        return [event["message"] for event in self.server.of_kind(EVENTS) if event["reason"] == reason]

    async def look(self) -> None:
        """Have the operator look at the job, and wait until it has done what it then does."""
        asked = time.monotonic()
        self.queue.put(f"{NAMESPACE}/{NAME}")
        async with asyncio.timeout(_PATIENCE):
            while self._last_look < asked:
                self._looked.clear()
                await self._looked.wait()

    def _on_look(self, seconds: float, _outcome: str) -> None:
        self._last_look = time.monotonic() - seconds
        self._looked.set()

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait until this is so."""
        await self.server.until(what)

    async def have_pods(self, number: int = 2) -> None:
        """Wait until so many pods are there."""
        await self.until(lambda: len(self.server.of_kind(PODS)) == number)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
