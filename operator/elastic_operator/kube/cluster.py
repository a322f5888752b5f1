"""Kubernetes as a place where jobs run: what is known of a job, and how a plan is carried out.

What is observed comes from the cache and the mirrors of the stores; nothing is asked of the API server for it. What is
written goes through the cache, so that the next look at the job is not older than that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.kept import Unguarded, unguarded_before
from elastic_operator.kube.ledger import Ledger
from elastic_operator.kube.misread import called_invalid
from elastic_operator.kube.observation import job_of
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.scraping import FoundPorts
from elastic_operator.kube.worker_pod import worker_pod
from elastic_operator.kube.writer import Hindered, Refused, Unmade, raise_first
from elastic_operator.model import EtcdState, JobEvent, Observed
from elastic_operator.names import EventReason
from elastic_operator.pinned import as_pinned
from elastic_operator.plan import words
from elastic_operator.spec import MANAGER
from elastic_operator.unchecked import text
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.events import Events
    from elastic_operator.kube.kept import Kept
    from elastic_operator.kube.managed_etcd import ManagedEtcd
    from elastic_operator.kube.observing import Observing
    from elastic_operator.kube.reports import Reports
    from elastic_operator.kube.settings import PodSettings
    from elastic_operator.kube.stores import Stores
    from elastic_operator.kube.writer import Writer
    from elastic_operator.model import Job, NewPod, Plan, Removal
    from elastic_operator.report import Report
    from elastic_operator.spec import Json
    from torchelastic.contract import NodeRecord

_log: Final = logging.getLogger(__name__)

_LARGEST_BATCH: Final = 64

_LONGEST_TURN: Final = 10.0
"""Seconds for which pods of a job are made without looking at it again."""


class KubernetesCluster:
    """The cluster of all jobs that the operator looks after.

    Args:
        observing: looks at jobs.
        cache: what the API server has.
        writer: writes to it.
        etcd: the jobs' own etcds.
        kept: the jobs' PodGroups and disruption budgets.
        reports: keeps what is known of a run when its store goes.
        stores: what the agents say.
        events: tells what a person would want to know.
        ledger: remembers what could not be made.
        settings: what pods are made with where the job does not say.
        wake: called with a job's key, and the seconds after which it is to be looked at once more.
        written: called when a job's status was written, with the job as it was before and the plan that was its reason.
    """

    def __init__(
        self,
        *,
        observing: Observing,
        cache: Cache,
        writer: Writer,
        etcd: ManagedEtcd,
        kept: Kept,
        reports: Reports,
        stores: Stores,
        events: Events,
        ledger: Ledger,
        settings: PodSettings,
        wake: Callable[[str, float], None],
        written: Callable[[Job, Plan], None] = lambda _job, _plan: None,
    ) -> None:
        self._observing = observing
        self._cache = cache
        self._writer = writer
        self._etcd = etcd
        self._kept = kept
        self._reports = reports
        self._stores = stores
        self._events = events
        self._ledger = ledger
        self._settings = settings
        self._wake = wake
        self._written = written
        self._observed: dict[str, Json] = {}
        self._unguarded: dict[str, str | None] = {}
        self._found = FoundPorts(writer, lambda job, wait: wake(_key(job), wait))
        self._guards = Ledger()  # what is held against a disruption budget keeps no pod from being made

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and all that is known of it; None where there is no such job (any more).

        Raises:
            BadInput: the job, or its status, can't be understood.
        """
        body = self._cache.job(key)
        self._take_leave(key, body)
        if body is None or text(body, "spec", "managedBy") not in ("", MANAGER):
            return None
        try:
            job = job_of(body)
        except BadInput as error:
            if (status := called_invalid(body, str(error), time.time())) is not None:
                try:
                    await self._writer.write_status(body, status)
                except ClusterError as failure:
                    _log.warning("%s: its status does not say that it cannot be read: %s", key, failure)
            raise
        self._observed[key] = body
        unguarded = self._unguarded.setdefault(job.uid, unguarded_before(job))
        return job, await self._observing.observe(key, job, as_pinned(job), unguarded=unguarded)

    async def apply(self, job: Job, plan: Plan) -> None:
        """Do what the plan says, in its order.

        Raises:
            ClusterError: something of it could not be done.
        """
        if plan.hands_off:
            return
        key = _key(job)
        body = self._observed[key]
        if plan.report is not None:
            await self._keep(job, body, plan.report)
        if plan.replicas is not None:
            body = await self._writer.write_replicas(body, plan.replicas)
            job = replace(job, generation=body["metadata"]["generation"])  # what is refused now is refused of this one
        if plan.status is not None:
            try:
                await self._writer.write_status(body, plan.status)
            except ClusterError as error:
                if not isinstance(error, ApiError) or error.passes:
                    self._tell(body, plan)  # it may be written, and then this is no news the next time
                raise
            self._written(job, plan)
        self._tell(body, plan)
        try:
            await self._apply_below(as_pinned(job, plan), plan)
        except Refused as refusal:
            _log.warning("%s: its pods are refused: %s", key, refusal)
            self._ledger.refuse(job, str(refusal))
            self._wake(key, 0.0)  # now the plan is another
        except Hindered as hindrance:
            self._hinder(job, str(hindrance))
        except Unmade as failure:
            if not self._ledger.fails(job):
                raise
            self._hinder(job, failure.words)

    def _tell(self, body: Json, plan: Plan) -> None:
        """Tell of the job as it was before: whatever has to be told twice of that is there once."""
        for event in plan.events:
            self._events.tell(body, event)

    async def _keep(self, job: Job, body: Json, report: Report) -> None:
        """Keep what is known of the job's run; that this can't be done keeps nothing else from being done."""
        why = await self._reports.keep(job, report)
        if why is not None:
            _log.warning("%s: %s", _key(job), why)
            self._events.tell(body, JobEvent(EventReason.REPORT_NOT_KEPT, why, warning=True))

    def _hinder(self, job: Job, why: str) -> None:
        """Something is not made for now."""
        if why != self._ledger.hindrance(job):
            _log.warning("%s: pods cannot be made for now: %s", _key(job), why)
        self._ledger.hinder(job, why)
        self._wake(_key(job), 0.0)  # the plan says so, and with it comes the next try

    async def _apply_below(self, job: Job, plan: Plan) -> None:
        """Do what the plan says of what belongs to the job. One thing that fails keeps no other from being done."""
        waits = self._must_wait(job)
        troubles: list[ClusterError] = []
        store: str | None = None
        try:
            store = await self._provide_store(job, plan)
        except ClusterError as error:
            troubles.append(error)
        try:
            store = store if await self._gather(job, plan) else None
        except ClusterError as error:
            troubles.append(error)
            store = None
        unmade = bool(troubles)
        try:
            await self._guard(job, plan)
        except ClusterError as error:
            troubles.append(error)
        if plan.size is not None:
            try:
                await self._stores.write_size(job.uid, plan.size)
            except StoreError as error:
                troubles.append(ClusterError(f"the wanted size could not be written to the store: {error}"))
        try:
            await self._remove(job, plan.remove)
        except ClusterError as error:
            troubles.append(error)
        if store is not None and plan.create:
            try:
                if not waits:
                    await self._create(job, plan.create, store)
            except ClusterError as error:
                troubles.append(error)
        elif not unmade and not waits and self._ledger.refusal(job) is None:
            self._clear(job)
        await self._found.note(job, self._cache.pods(job.namespace, job.uid), self._nodes(job))
        raise_first(troubles)
        if plan.delete_job:
            await self._writer.remove_job(job)

    def _take_leave(self, key: str, body: Json | None) -> None:
        """Forget the former jobs of this key, and their runs as soon as none of their pods is left."""
        current = body["metadata"]["uid"] if body is not None else None
        for uid in self._stores.runs_of(key):
            if uid != current and not self._cache.belongings(PODS, key.partition("/")[0], uid):
                self._stores.leave(uid)
        former = self._observed.get(key)
        if former is not None and former["metadata"]["uid"] != current:
            del self._observed[key]
            self._ledger.forget(former["metadata"]["uid"])
            self._found.forget(former["metadata"]["uid"])
            self._guards.forget(former["metadata"]["uid"])
            self._observing.forget(former["metadata"]["uid"])
            self._unguarded.pop(former["metadata"]["uid"], None)
            self._reports.forget(former["metadata"]["uid"])

    def _nodes(self, job: Job) -> Iterable[NodeRecord]:
        """What the job's agents say of themselves."""
        mirror = self._stores.of(job.uid)
        return () if mirror is None else mirror.nodes.values()

    async def _provide_store(self, job: Job, plan: Plan) -> str | None:
        """Have the job's own etcd there, or gone, as the plan wants it; gives back where pods find the store."""
        external = job.spec.etcd.endpoint
        if not plan.etcd:
            pending = self._reports.pending(job) if plan.report is not None else None
            if pending is not None:
                raise ClusterError(f"what is known of its run could not be kept yet, so its store stays: {pending}")
            if external is None or all(pod.phase.ended for pod in self._cache.pods(job.namespace, job.uid)):
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

    async def _gather(self, job: Job, plan: Plan) -> bool:
        """Have the PodGroup there, or gone, as the plan wants it; gives back whether pods may be made beside it."""
        if job.deleting or self._ledger.refusal(job) is not None:
            return not job.deleting
        if plan.together is not None and self._must_wait(job):
            return self._kept.has_gang(job)
        await self._kept.gang(job, plan.together)
        return True

    async def _guard(self, job: Job, plan: Plan) -> None:
        """Have the disruption budget there, or gone, as the plan wants it; why it can't be made is told once."""
        if job.deleting or (plan.guarded is not None and self._must_wait(job, self._guards)):
            return
        try:
            await self._kept.guard(job, plan.guarded)
        except ClusterError as error:
            self._guards.hinder(job, str(error))
            self._must_wait(job, self._guards)
            if not isinstance(error, Unguarded):
                raise
            self._unguard(job, str(error))
            return
        self._guards.clear(job)
        if self._unguarded.get(job.uid) is not None:
            self._unguarded[job.uid] = None
            self._wake(_key(job), 0.0)  # now the plan is another

    def _unguard(self, job: Job, why: str) -> None:
        """The disruption budget is not made for now."""
        known = self._unguarded.get(job.uid)
        if known is None or words.clause(known) != words.clause(why):  # the status says it as a clause
            _log.warning("%s: %s", _key(job), why)
            if (body := self._cache.job(_key(job))) is not None:
                self._events.tell(body, JobEvent(EventReason.HINDERED, why, warning=True))
        if known != why:
            self._unguarded[job.uid] = why
            self._wake(_key(job), 0.0)  # now the plan is another

    def _clear(self, job: Job) -> None:
        """All that was asked for is there; where that is news, the plan is another."""
        if self._ledger.clear(job):
            self._wake(_key(job), 0.0)

    def _must_wait(self, job: Job, ledger: Ledger | None = None) -> bool:
        """Whether it is too early to try again what could not be made; then it is tried when it is time."""
        wait = (ledger or self._ledger).wait(job)
        if wait > 0:
            self._wake(_key(job), wait)
        return wait > 0

    async def _remove(self, job: Job, removals: Sequence[Removal]) -> None:
        """Remove pods, so many at a time that others have their turn; one that is not removed keeps none of the others.

        Where nobody answers, no more of them are tried.
        """
        results: list[object] = []
        for done in range(0, len(removals), _LARGEST_BATCH):
            results += await asyncio.gather(
                *(
                    self._writer.remove(PODS, job.namespace, each.name, each.uid)
                    for each in removals[done : done + _LARGEST_BATCH]
                ),
                return_exceptions=True,
            )
            if any(isinstance(result, BaseException) and not isinstance(result, ApiError) for result in results):
                break
        raise_first(results)

    async def _create(self, job: Job, pods: Sequence[NewPod], store: str) -> None:
        """Make pods in batches that grow: where the first is not taken, none of the others is tried.

        Where that takes its time, the job is looked at anew before it goes on: by then it may want something else.
        """
        done, batch = 0, 1
        begun = time.monotonic()
        while done < len(pods):
            results = await asyncio.gather(
                *(
                    self._writer.create(PODS, job, worker_pod(job, new, self._settings, store=store))
                    for new in pods[done : done + batch]
                ),
                return_exceptions=True,
            )
            if not all(isinstance(result, BaseException) for result in results):
                self._ledger.made(job)
            raise_first(results)
            done += batch
            batch = min(batch * 2, _LARGEST_BATCH)
            if done < len(pods) and time.monotonic() - begun > _LONGEST_TURN:
                self._wake(_key(job), 0.0)
                return
        self._clear(job)


def _key(job: Job) -> str:
    return f"{job.namespace}/{job.name}"
