"""Kubernetes as a backend of the reconciler: observes jobs, and executes plans.

The observed state comes from the cache of objects, the job's etcd and the job's record. The backend itself
reads the API server only to find out why pods are slow to start.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.api.constants import LABEL_JOB_UID, ConditionType
from elastic_operator.api.json_values import Json, get_dict, get_int, get_str, get_time
from elastic_operator.api.spec import MANAGER, ElasticJobSpec
from elastic_operator.api.status import JobState, status_from_json
from elastic_operator.api.validation import problem_of
from elastic_operator.controller.model import EtcdState, Job, Observed, Plan, Pod, PodPhase, with_applied_spec
from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kubernetes import pod_status
from elastic_operator.kubernetes.client import EVENTS, PODS, Api, with_hint
from elastic_operator.kubernetes.job_record import CreateBackoff, JobRecord
from elastic_operator.kubernetes.object_cache import ManagedEtcd, ObjectCache, managed_etcd, owner_of, unpack_job
from elastic_operator.resources.owned_objects import ETCD

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from elastic_operator.kubernetes.executor import Executor
    from elastic_operator.kubernetes.job_store import JobStores
    from elastic_operator.store_mirror import StoreMirror

logger: Final = logging.getLogger(__name__)

_DELETION_TIMEOUT: Final = 60.0
"""Maximum number of seconds that a live kubelet needs to remove a pod without running containers."""
_DELETED_TTL: Final = 900.0
_READ_INTERVAL: Final = 15.0
"""Seconds between reads of the events of pods that do not start; the first read follows after a third of this time."""
_READ_SHARE: Final = 0.1
"""Maximum fraction of the time for these reads: for each, an API server scans all events of a namespace."""
_STARTERS: Final = frozenset({"kubelet", "attachdetach-controller"})
"""The components whose events say why a scheduled pod does not start."""


@dataclass(slots=True, kw_only=True)
class KubernetesBackend:
    """Observes the jobs of a cluster, and executes plans."""

    api: Api
    cache: ObjectCache
    stores: JobStores
    executor: Executor
    _records: dict[str, JobRecord] = field(default_factory=dict, init=False)
    _next_read: float = field(default=0.0, init=False)

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """Return the job and its observed state; None if there is no such job, or another controller manages it.

        Raises:
            BadInput: the job's status is invalid.
        """
        packed = self.cache.packed_job(key)
        self._forget_former(key, packed)
        if packed is None:
            return None
        body = unpack_job(packed)
        if get_str(body, "spec", "managedBy") not in ("", MANAGER):
            return None
        record = self._record(key, packed)
        record.packed = packed
        record.requeue = None
        try:
            job = job_of(body)
        except BadInput as error:
            logger.warning("%s: %s", key, error)
            return job_of(body, ElasticJobSpec(min_replicas=0, max_replicas=0)), Observed(unreadable=str(error))
        for creates in (record.creates, record.pdb):
            creates.reset_for(job.generation)
        return job, await self._observe(job, record)

    async def apply(self, job: Job, plan: Plan) -> float | None:
        """Execute a plan; return the seconds after which to observe the job again, or None.

        Raises:
            ClusterError: a part of the plan failed.
        """
        record = self._records[f"{job.namespace}/{job.name}"]
        before = record.problems
        if await self.executor.execute(job, plan, record) or record.problems != before:
            return 0.0  # for another plan
        for creates in (record.creates, record.pdb):
            if creates.wait > 0:
                record.requeue_after(creates.wait)
        return record.requeue

    def pod_deleted(self, body: Json, last: Pod) -> None:
        """Remember a deleted pod until it is replaced.

        A pod that was force-deleted, or had no node, may be gone at once. The plan still needs this pod: its
        successor needs another name, because its agent may still run.
        """
        owner = owner_of(body)
        if owner is None:
            return
        key = f"{body['metadata']['namespace']}/{owner['name']}"
        job = self.cache.packed_job(key)
        if job is None or job["metadata"]["uid"] != owner["uid"]:
            return
        phase = last.phase if last.phase.ended else PodPhase.FAILED
        gone = replace(last, phase=phase, ready=False, terminating=True, waiting="", sidecars_running=False)
        self._record(key, job).deleted[last.index] = (gone, time.monotonic() + _DELETED_TTL)

    def _record(self, key: str, packed: Json) -> JobRecord:
        record = self._records.get(key)
        if record is None or record.uid != packed["metadata"]["uid"]:
            # The disruption budget's error in the job's status is not reported again.
            failed = pod_status.true_condition(unpack_job(packed), ConditionType.DISRUPTION_BUDGET_FAILED)
            pdb = CreateBackoff(blocked=get_str(failed, "message") or None)
            record = self._records[key] = JobRecord(key, packed, pdb=pdb)
        return record

    def _forget_former(self, key: str, body: Json | None) -> None:
        """Forget former jobs with this key, and their runs once none of their pods is left."""
        current = body["metadata"]["uid"] if body is not None else None
        for uid in self.stores.uids_of(key):
            if uid != current and not self.cache.owned_by(PODS, key.partition("/")[0], uid):
                self.stores.unfollow(uid)
        if (record := self._records.get(key)) is not None and record.uid != current:
            del self._records[key]

    async def _observe(self, job: Job, record: JobRecord) -> Observed:
        applied = with_applied_spec(job)
        managed = managed_etcd(self.cache, job) if applied.spec.etcd.endpoint is None else None
        await self._diagnose(job, record, managed)
        # From here on, nothing is awaited, so that the state is consistent.
        etcd_error = None
        if managed is not None:
            managed = managed_etcd(self.cache, job)
            why = managed.blocked and f"its pod cannot be created for now: {managed.blocked}"
            if managed.state is EtcdState.STARTING and (why := why or record.startup.get(ETCD)):
                etcd_error = f"its etcd does not serve yet: {why}"
        pods = [self._with_diagnosis(pod, record) for pod in self.cache.pods(job.namespace, job.uid)]
        secret = applied.spec.etcd.tls_secret
        forbidden = self.stores.forbidden(job.namespace, secret) if secret is not None else None
        mirror = self._mirror(applied, record.key, pods, managed) if forbidden is None else None
        serving = _serving(job, mirror) if forbidden is None else None
        unreachable = self.stores.error(job.uid)
        if unreachable is not None and managed is not None:
            unreachable = (
                "the job's etcd is ready, but the operator cannot reach it: a NetworkPolicy may forbid it, or the node "
                f"of etcd's pod may have failed ({unreachable})"
            )
        not_ready = etcd_error or (unreachable and f"the operator cannot read the job's store: {unreachable}")
        read = (
            Observed()
            if mirror is None
            else Observed(
                store_read=mirror.readable,
                round=mirror.round,
                outcome=mirror.outcome,
                size=mirror.size,
                time_breakdown=mirror.time_breakdown,
                history=mirror.history,
            )
        )
        return replace(
            read,
            pods=(*(_ready(pod, serving, not_ready) for pod in pods), *_recently_deleted(record, pods)),
            etcd=managed.state if managed is not None else EtcdState.READY,
            rejected=record.creates.rejected,
            blocked=record.creates.blocked or (managed.blocked if managed is not None else None),
            etcd_blocked=managed is not None and managed.blocked is not None,
            store_error=forbidden or unreachable,
            store_forbidden=forbidden is not None,
            etcd_error=etcd_error,
            disruption_budget_error=record.pdb.blocked,
        )

    async def _diagnose(self, job: Job, record: JobRecord, etcd: ManagedEtcd | None) -> None:
        """Read, for one of the pods that do not start, the reason; the job's etcd pod may be one of them."""
        slow = [pod.uid for pod in self.cache.pods(job.namespace, job.uid) if _is_starting(pod)]
        if etcd is not None and etcd.state is EtcdState.STARTING and etcd.blocked is None:
            slow.insert(0, ETCD)
        why = record.startup = {uid: message for uid, message in record.startup.items() if uid in slow}
        now = time.monotonic()
        if not slow:
            record.read_at = None
            return
        if record.read_at is None or record.read_at <= now < self._next_read:
            record.read_at = now + _READ_INTERVAL / 3
        elif record.read_at <= now:
            record.read_at = self._next_read = now + _READ_INTERVAL
            uid = next((uid for uid in slow if uid not in why), next(iter(why), ""))
            message = why.pop(uid, "")
            try:
                message = await (self._why_etcd_waits(job) if uid == ETCD else self._why_not_started(job, uid))
            except ClusterError as error:
                logger.debug("%s: why its pods do not start cannot be read: %s", record.key, error)
            why[uid] = message
            self._next_read = time.monotonic() + (time.monotonic() - now) / _READ_SHARE
        record.requeue_after(record.read_at - now)

    async def _why_etcd_waits(self, job: Job) -> str:
        pods, _ = await self.api.list(PODS, job.namespace, labels=f"{LABEL_JOB_UID}={job.uid}")
        for pod in pods:
            if why := pod_status.why_waiting(pod, ETCD):
                return why
            if get_str(pod, "spec", "nodeName") and all(
                each.running is None for each in pod_status.container_states(pod)
            ):
                return await self._why_not_started(job, get_str(pod, "metadata", "uid"))
        return ""

    async def _why_not_started(self, job: Job, uid: str) -> str:
        events, _ = await self.api.list(EVENTS, job.namespace, fields=f"involvedObject.uid={uid}")
        return startup_problem(events)

    def _with_diagnosis(self, pod: Pod, record: JobRecord) -> Pod:
        """Return a pod with the reason why it does not start, or as ended if its deletion is overdue on a lost node."""
        if _is_starting(pod):
            return replace(pod, waiting=record.startup.get(pod.uid, ""))
        if pod.deletion_deadline is None or pod.phase is not PodPhase.PENDING:
            return pod
        left = pod.deletion_deadline + _DELETION_TIMEOUT - time.time()
        if left > 0:
            record.requeue_after(left)
            return pod
        return replace(pod, phase=PodPhase.FAILED, ended=pod.deletion_deadline)

    def _mirror(self, job: Job, key: str, pods: Sequence[Pod], etcd: ManagedEtcd | None) -> StoreMirror | None:
        """Return the mirror of the job's etcd, if there is one; follow the etcd if its keys may still change."""
        # While a spec is applied, the store is needed, or must still be read to learn whether the run has ended.
        suspended = job.status.state is JobState.SUSPENDED and job.spec.suspend and job.status.applied_spec is None
        over = (job.status.state.finished or suspended) and all(pod.phase.ended for pod in pods)
        external = job.spec.etcd.endpoint
        if not over and etcd is not None and etcd.endpoint is not None:
            available = etcd.state is EtcdState.READY
            tls = job.spec.etcd.has_certificates
            return self.stores.follow(job.uid, key, etcd.endpoint, external=False, available=available, tls=tls)
        if not over and external is not None:
            return self.stores.follow(
                job.uid, key, external, external=True, available=True, secret=job.spec.etcd.tls_secret
            )
        return self.stores.of(job.uid)


def job_of(body: Json, spec: ElasticJobSpec | None = None) -> Job:
    """Convert the object of a job; ``spec`` replaces the object's spec.

    Raises:
        BadInput: the spec does not match this operator's CRD, or the status is invalid.
    """
    if spec is None:
        try:
            spec = ElasticJobSpec.of(msgspec.convert(body.get("spec"), dict[str, Any]))
        except msgspec.ValidationError as error:
            raise BadInput(
                f"the spec of the job {get_str(body, 'metadata', 'name')} does not match this operator's definition "
                f"({error}); update the definition (crds/elasticjob.yaml), or the job"
            ) from None
    metadata = get_dict(body, "metadata")
    return Job(
        name=get_str(metadata, "name"),
        namespace=get_str(metadata, "namespace"),
        uid=get_str(metadata, "uid"),
        generation=get_int(metadata, "generation") or 0,
        spec=spec,
        status=status_from_json(body.get("status")),
        created=get_time(metadata, "creationTimestamp") or 0.0,
        deleting=bool(metadata.get("deletionTimestamp")),
        problem=problem_of(spec),
    )


def startup_problem(events: Iterable[Json]) -> str:
    """Return why a scheduled pod does not start, from its last event, as a clause; empty if unknown."""
    of_starters = [
        event
        for event in events
        if (get_str(event, "source", "component") or get_str(event, "reportingComponent")) in _STARTERS
    ]
    if not of_starters:
        return ""
    # Of two events in the same second, a warning counts as the last.
    last = max(of_starters, key=lambda event: (pod_status.event_time(event), get_str(event, "type") == "Warning"))
    message = pod_status.in_a_line(get_str(last, "message"))
    if get_str(last, "type") == "Warning":
        return with_hint(message or get_str(last, "reason"))
    return f"its node is {message[:1].lower()}{message[1:]}" if message and get_str(last, "reason") == "Pulling" else ""


def _recently_deleted(record: JobRecord, pods: Sequence[Pod]) -> tuple[Pod, ...]:
    filled = {pod.index for pod in pods if not pod.terminating and not pod.phase.ended}
    now = time.monotonic()
    record.deleted = {index: gone for index, gone in record.deleted.items() if index not in filled and gone[1] > now}
    return tuple(pod for pod, _ in record.deleted.values())


def _serving(job: Job, mirror: StoreMirror | None) -> Collection[str] | None:
    """Return the names of the pods whose agents serve; None for all running pods.

    While the store cannot be read, all agents that were ever registered count as serving, because training continues.
    """
    if mirror is not None and mirror.readable:
        return {node.name for node in mirror.nodes.values()}
    if mirror is not None and mirror.names:
        return set(mirror.names.values())
    return None if job.status.started is not None else ()


def _ready(pod: Pod, serving: Collection[str] | None, not_ready: str | None) -> Pod:
    """Return the pod as ready only if its agent serves; otherwise with the reason why it is not ready."""
    if pod.ready and serving is not None and pod.name not in serving:
        pod = replace(pod, ready=False)
    if not_ready is None or pod.ready or pod.phase is not PodPhase.RUNNING:
        return pod
    return replace(pod, waiting=pod.waiting or not_ready)


def _is_starting(pod: Pod) -> bool:
    return pod.phase is PodPhase.PENDING and bool(pod.node) and not pod.waiting and not pod.terminating
