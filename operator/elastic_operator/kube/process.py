"""The operator's process, put together: what runs, in which order it begins, and in which it ends.

Every copy watches and lists, so that it could act at once. The one that leads has a reconciler and all that it works
with, for as long as it leads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.kube.cache import Cache, owner_of
from elastic_operator.kube.cluster import KubernetesCluster
from elastic_operator.kube.departed import Departed
from elastic_operator.kube.etcd_secrets import EtcdSecrets
from elastic_operator.kube.events import Events
from elastic_operator.kube.farewell import farewell
from elastic_operator.kube.kept import Kept
from elastic_operator.kube.leading import Leadership, LeaseSettings
from elastic_operator.kube.ledger import Ledger
from elastic_operator.kube.listing import Listings
from elastic_operator.kube.managed_etcd import ManagedEtcd
from elastic_operator.kube.metrics import OperatorMetrics
from elastic_operator.kube.observing import Observing
from elastic_operator.kube.pod_starts import PodStarts
from elastic_operator.kube.reports import Reports
from elastic_operator.kube.resources import ELASTIC_JOBS, PODS
from elastic_operator.kube.stores import Stores
from elastic_operator.kube.watching import Watches
from elastic_operator.kube.web import Web
from elastic_operator.kube.writer import Writer
from elastic_operator.reconcile import Reconciler, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_operator.kube.api import Api
    from elastic_operator.kube.options import OperatorSettings
    from elastic_operator.kube.resources import Resource
    from elastic_operator.model import Job, Pod
    from elastic_operator.spec import Json

_log: Final = logging.getLogger(__name__)

_STUCK: Final = 600.0
"""Seconds after which a job that is being worked on will never be done with."""


class Operator:
    """One copy of the operator.

    Args:
        settings: how it is run.
        api: the connection; open.
    """

    def __init__(self, settings: OperatorSettings, api: Api) -> None:
        self._settings = settings
        self._api = api
        self._metrics = OperatorMetrics()
        self._queue = WorkQueue(self._metrics.waited)
        self._cache = Cache(changed=self._on_change, gone=self._on_gone)
        self._listings = Listings(api, self._cache, namespaces=settings.namespaces)
        self._reconciler: Reconciler | None = None
        self._take_leave: Callable[[Json], None] | None = None
        api.asked = self._metrics.asked

    async def run(self, stop: asyncio.Event) -> None:
        """Work until told to stop.

        Args:
            stop: set when it is to end.

        Raises:
            BadInput: what it was started with cannot be.
        """
        web = Web(self._settings.listen, metrics=self._metrics.page, ill=self._ill, unready=self._unready)
        async with web:
            self._measure()
            whose = ", ".join(self._settings.namespaces) or "all namespaces"
            _log.info("looking after the ElasticJobs of %s; /metrics on port %d", whose, web.port)
            async with asyncio.TaskGroup() as background:
                knowing = [background.create_task(part) for part in (self._watch(), self._listings.run())]
                await _until(stop, asyncio.create_task(self._act()))
                for task in knowing:
                    task.cancel()
        _log.info("ended")

    async def _watch(self) -> NoReturn:
        """Watch as soon as there is what is to be watched."""
        watches = Watches(
            access=self._api.access,
            hear=self._hear,
            possible=self._listings.list_all,
            outdated=self._listings.others_than,
            began=self._listings.doubt,
        )
        await watches.run()

    async def _act(self) -> None:
        """Act whenever this copy leads."""
        await self._listings.complete.wait()
        settings = self._settings
        if not settings.leader_elect:
            await self._work()
            return
        lease = LeaseSettings(
            namespace=settings.lease_namespace or self._api.namespace,
            name=settings.lease_name,
            identity=settings.identity,
        )
        # On connections of its own: where this copy writes much, the lease must not wait for its turn.
        async with self._api.another() as api:
            api.asked = self._metrics.asked
            await Leadership(api, lease).run(self._work)

    async def _work(self) -> None:
        """What a leader does."""
        settings = self._settings
        secrets = EtcdSecrets(self._api, settings.etcd_secrets_namespaces)
        async with (
            Events(self._api, settings.identity) as events,
            Stores(self._on_change, secrets=secrets) as stores,
        ):
            writer = Writer(self._api, self._cache, self._metrics.made)
            departed = Departed()
            etcd = ManagedEtcd(self._api, self._cache, writer, settings.pods)
            ledger = Ledger()
            observing = Observing(
                cache=self._cache,
                etcd=etcd,
                starts=PodStarts(self._api),
                stores=stores,
                ledger=ledger,
                departed=departed,
                secrets=secrets,
                wake=self._queue.put,
            )
            cluster = KubernetesCluster(
                observing=observing,
                cache=self._cache,
                writer=writer,
                etcd=etcd,
                kept=Kept(self._cache, writer),
                reports=Reports(self._api),
                stores=stores,
                events=events,
                ledger=ledger,
                settings=settings.pods,
                wake=self._queue.put,
                written=lambda job, plan: self._metrics.written(job, plan, self._pods(job, departed), time.time()),
            )
            self._reconciler = Reconciler(
                cluster, queue=self._queue, list_keys=self._keys, reconciled=self._metrics.reconciled
            )
            self._take_leave = lambda pod: self._take_leave_of(pod, departed, events)
            try:
                await self._reconciler.run()
            finally:
                self._reconciler = self._take_leave = None
                self._queue.clear()

    def _pods(self, job: Job, departed: Departed) -> Iterator[Pod]:
        """All pods of a job that there are, or were just now."""
        there = self._cache.pods(job.namespace, job.uid)
        yield from there
        yield from departed.of(job.uid, there)

    def _jobs(self) -> Iterator[Json]:
        return (body for key in self._cache.keys if (body := self._cache.job(key)) is not None)

    async def _keys(self) -> tuple[str, ...]:
        return self._cache.keys

    def _hear(self, resource: Resource, kind: str | None, body: Json) -> None:
        """Take over what a watch tells."""
        if kind == "DELETED":
            self._cache.remove(resource, body)
            return
        self._cache.put(resource, body)

    def _on_change(self, key: str) -> None:
        """A job is to be looked at. Who begins to lead looks at all of them, so that nobody else has to remember."""
        if self._reconciler is not None:
            self._queue.put(key)

    def _on_gone(self, resource: Resource, body: Json) -> None:
        if resource == PODS and self._take_leave is not None:
            self._take_leave(body)

    def _take_leave_of(self, pod: Json, departed: Departed, events: Events) -> None:
        owner = owner_of(pod)
        job = self._cache.job(f"{pod['metadata']['namespace']}/{owner.name}") if owner is not None else None
        if job is None or owner is None or job["metadata"]["uid"] != owner.uid:
            return  # nobody would read it
        departed.add(owner.uid, pod)
        event = farewell(pod)
        if event is not None:
            events.tell(job, event)

    def _measure(self) -> None:
        self._metrics.gauge("elastic_operator_leads", "Whether this copy acts.", lambda: float(self._acts))
        self._metrics.gauge(
            "elastic_operator_queue_depth", "Jobs that wait to be looked at.", lambda: self._queue.depth
        )
        for resource in (ELASTIC_JOBS, PODS):
            count = functools.partial(self._cache.count, resource)
            self._metrics.gauge(f"elastic_operator_{resource.plural}", "How many of them the operator knows.", count)
        self._metrics.jobs(self._jobs, lambda: self._acts)

    @property
    def _acts(self) -> bool:
        return self._reconciler is not None

    def _ill(self) -> str:
        reconciler = self._reconciler
        if reconciler is not None and reconciler.longest > _STUCK:
            return f"a job has been worked on for {reconciler.longest:.0f} s"
        return ""

    def _unready(self) -> str:
        if self._listings.complete.is_set():
            return ""
        return self._listings.complaint or "not everything that there is has been listed yet"


async def _until(stop: asyncio.Event, work: asyncio.Task[None]) -> None:
    """Let it work until told to stop; its errors are raised."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, stopping):
            task.cancel()
        await asyncio.wait({work, stopping})
    if not work.cancelled():
        work.result()
