"""Kubernetes as a place where jobs run: what is known of a job, and how a plan is carried out.

What is observed comes from the cache and the mirrors of the stores; nothing is asked of the API server for it. What is
written goes through the cache, so that the next look at the job is not older than that.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.observation import job_of, pod_of
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.worker_pod import worker_pod
from elastic_operator.kube.writer import Hindered, Refused, raise_first
from elastic_operator.model import EtcdState, Observed, PodPhase
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.departed import Departed
    from elastic_operator.kube.events import Events
    from elastic_operator.kube.ledger import Ledger
    from elastic_operator.kube.managed_etcd import EtcdSeen, ManagedEtcd
    from elastic_operator.kube.settings import PodSettings
    from elastic_operator.kube.stores import Stores
    from elastic_operator.kube.writer import Writer
    from elastic_operator.model import Job, NewPod, Plan, Pod, Removal
    from elastic_operator.spec import Json
    from elastic_operator.store_mirror import StoreMirror

_log: Final = logging.getLogger(__name__)

_LARGEST_BATCH: Final = 64


class KubernetesCluster:
    """The cluster of all jobs that the operator looks after.

    Args:
        cache: what the API server has.
        writer: writes to it.
        etcd: the jobs' own etcds.
        stores: what the agents say.
        events: tells what a person would want to know.
        ledger: remembers what could not be made.
        departed: remembers pods that are gone.
        settings: what pods are made with where the job does not say.
        wake: called with a job's key, and the seconds after which it is to be looked at once more.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        writer: Writer,
        etcd: ManagedEtcd,
        stores: Stores,
        events: Events,
        ledger: Ledger,
        departed: Departed,
        settings: PodSettings,
        wake: Callable[[str, float], None],
    ) -> None:
        self._cache = cache
        self._writer = writer
        self._etcd = etcd
        self._stores = stores
        self._events = events
        self._ledger = ledger
        self._departed = departed
        self._settings = settings
        self._wake = wake
        self._observed: dict[str, Json] = {}

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and all that is known of it; None where there is no such job (any more).

        Raises:
            BadInput: the job, or its status, can't be understood.
        """
        body = self._cache.job(key)
        self._take_leave(key, body)
        if body is None:
            return None
        job = job_of(body)
        self._observed[key] = body
        pods = tuple(map(pod_of, self._cache.belongings(PODS, job.uid)))
        managed = self._etcd.seen(job) if job.spec.etcd.endpoint is None else None
        state = managed.state if managed is not None else EtcdState.READY
        mirror = self._mirror(job, key, pods, managed)
        serving = _serving(job, mirror)
        trouble = self._trouble(job)
        hindrance = self._ledger.hindrance(job) or (managed.hindrance if managed is not None else None)
        if hindrance is None and all(pod.phase.ended for pod in pods):
            hindrance = trouble  # nothing is started while nobody knows whether the run has ended
        ready = (replace(pod, ready=pod.ready and (serving is None or pod.name in serving)) for pod in pods)
        return job, Observed(
            pods=(*(_explained(pod, trouble) for pod in ready), *self._departed.of(job.uid, pods)),
            etcd=state,
            store_read=mirror is not None and mirror.readable,
            epoch=mirror.epoch if mirror is not None else None,
            outcome=mirror.outcome if mirror is not None else None,
            size=mirror.size if mirror is not None else None,
            refusal=self._ledger.refusal(job),
            hindrance=hindrance,
        )

    async def apply(self, job: Job, plan: Plan) -> None:
        """Do what the plan says, in its order.

        Raises:
            ClusterError: something of it could not be done.
        """
        key = _key(job)
        body = self._observed[key]
        if plan.replicas is not None:
            body = await self._writer.write_replicas(body, plan.replicas)
            job = replace(job, generation=body["metadata"]["generation"])  # what is refused now is refused of this one
        if plan.status is not None:
            body = await self._writer.write_status(body, plan.status)
        for event in plan.events:
            self._events.tell(body, event)
        try:
            await self._apply_below(job, plan)
        except Refused as refusal:
            _log.warning("%s: its pods are refused: %s", key, refusal)
            self._ledger.refuse(job, str(refusal))
            self._wake(key, 0.0)  # now the plan is another
        except Hindered as hindrance:
            if str(hindrance) != self._ledger.hindrance(job):
                _log.warning("%s: pods cannot be made for now: %s", key, hindrance)
            self._ledger.hinder(job, str(hindrance))
            self._wake(key, 0.0)  # the plan says so, and with it comes the next try

    async def _apply_below(self, job: Job, plan: Plan) -> None:
        """Do what the plan says of what belongs to the job. One thing that fails keeps no other from being done."""
        trouble: ClusterError | None = None
        store: str | None = None
        try:
            store = await self._provide_store(job, plan)
        except ClusterError as error:
            trouble = error
        if plan.size is not None:
            try:
                await self._stores.write_size(job.uid, plan.size)
            except StoreError as error:
                trouble = trouble or ClusterError(f"the wanted size could not be written to the store: {error}")
        await self._remove(job, plan.remove)
        if store is not None and plan.create:
            await self._create(job, plan.create, store)
        elif trouble is None and self._ledger.refusal(job) is None and not self._must_wait(job):
            self._clear(job)
        if trouble is not None:
            raise trouble

    def _take_leave(self, key: str, body: Json | None) -> None:
        """Forget the former jobs of this key, and their runs as soon as none of their pods is left."""
        current = body["metadata"]["uid"] if body is not None else None
        for uid in self._stores.runs_of(key):
            if uid != current and not self._cache.belongings(PODS, uid):
                self._stores.leave(uid)
        former = self._observed.get(key)
        if former is not None and former["metadata"]["uid"] != current:
            del self._observed[key]
            self._ledger.forget(former["metadata"]["uid"])
            self._departed.forget(former["metadata"]["uid"])

    def _trouble(self, job: Job) -> str | None:
        """That a store which was there before cannot be read, in words; None where it can, or nobody needs to know."""
        trouble = self._stores.trouble(job.uid) if job.spec.etcd.endpoint is not None else None
        return None if trouble is None else f"the operator cannot read the job's store: {trouble}"

    def _mirror(self, job: Job, key: str, pods: Sequence[Pod], managed: EtcdSeen | None) -> StoreMirror | None:
        """What stands in the job's store, which is followed as long as anything can happen there."""
        over = job.status.state.finished and all(pod.phase.ended for pod in pods)
        if managed is not None:
            if managed.endpoint is not None and not over:
                up = managed.state is EtcdState.READY
                return self._stores.follow(job.uid, key, managed.endpoint, lasts=False, up=up)
        elif (endpoint := job.spec.etcd.endpoint) is not None and not over and _had_pods(job, pods):
            return self._stores.follow(job.uid, key, endpoint, lasts=True, up=True)
        return self._stores.of(job.uid)

    async def _provide_store(self, job: Job, plan: Plan) -> str | None:
        """Have the job's own etcd there, or gone, as the plan wants it; gives back where pods find the store."""
        external = job.spec.etcd.endpoint
        if not plan.etcd:
            if external is None or all(pod_of(pod).phase.ended for pod in self._cache.belongings(PODS, job.uid)):
                self._stores.leave(job.uid)
            await self._etcd.remove(job)
            return None
        # Of a job that is being deleted, what is missing was perhaps removed with it: it is kept, and never made anew.
        if job.deleting or self._ledger.refusal(job) is not None:
            return None
        if external is not None:
            return external
        if self._etcd.seen(job).state is EtcdState.ABSENT and self._must_wait(job):
            return None
        return await self._etcd.ensure(job)

    def _clear(self, job: Job) -> None:
        """All that was asked for is there; where that is news, the plan is another."""
        if self._ledger.clear(job):
            self._wake(_key(job), 0.0)

    def _must_wait(self, job: Job) -> bool:
        """Whether it is too early to try again what could not be made; then it is tried when it is time."""
        wait = self._ledger.wait(job)
        if wait > 0:
            self._wake(_key(job), wait)
        return wait > 0

    async def _remove(self, job: Job, removals: Sequence[Removal]) -> None:
        results = await asyncio.gather(
            *(self._writer.remove(PODS, job.namespace, each.name, each.uid) for each in removals),
            return_exceptions=True,
        )
        raise_first(results)

    async def _create(self, job: Job, pods: Sequence[NewPod], store: str) -> None:
        """Make pods in batches that grow: where the first is not taken, none of the others is tried."""
        if self._must_wait(job):
            return
        done, batch = 0, 1
        while done < len(pods):
            results = await asyncio.gather(
                *(
                    self._writer.create(PODS, job, worker_pod(job, new, self._settings, store=store))
                    for new in pods[done : done + batch]
                ),
                return_exceptions=True,
            )
            raise_first(results)
            done += batch
            batch = min(batch * 2, _LARGEST_BATCH)
        self._clear(job)


def _serving(job: Job, mirror: StoreMirror | None) -> Collection[str] | None:
    """The pods whose agents serve, by name; None: all that run.

    Where the store can't be read, those whose agents have ever been there are taken for serving: training goes on
    without the store. Where nothing is known of them at all, all are, once training has started.
    """
    if mirror is not None and mirror.readable:
        return {node.name for node in mirror.nodes.values()}
    if mirror is not None and mirror.names:
        return set(mirror.names.values())
    return None if job.status.started is not None else ()


def _key(job: Job) -> str:
    return f"{job.namespace}/{job.name}"


def _had_pods(job: Job, pods: Sequence[Pod]) -> bool:
    return bool(pods) or job.status.size_generation > 0


def _explained(pod: Pod, trouble: str | None) -> Pod:
    """A pod that runs and is not ready, with what may keep it from that: its agent looks for the same store."""
    if trouble is None or pod.ready or pod.phase is not PodPhase.RUNNING:
        return pod
    return replace(pod, waiting=pod.waiting or trouble)
