"""Kubernetes as a backend of the reconciler: observes jobs, and carries out plans."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.json_access import integer, text
from elastic_operator.api.spec import MANAGER
from elastic_operator.api.status import Condition, status_from_json
from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kubernetes.job_record import JobRecord
from elastic_operator.kubernetes.kinds import PODS
from elastic_operator.kubernetes.observe import deleted_pod_event, job_of, remember_deleted
from elastic_operator.kubernetes.store import owner_of

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, Observed, Plan
    from elastic_operator.kubernetes.apply import Applier
    from elastic_operator.kubernetes.events import EventRecorder
    from elastic_operator.kubernetes.job_store import JobStores
    from elastic_operator.kubernetes.observe import Observer
    from elastic_operator.kubernetes.store import Store
    from elastic_operator.kubernetes.writer import Writer

_log: Final = logging.getLogger(__name__)


class KubernetesBackend:
    """The jobs of a cluster.

    Args:
        store: the known objects.
        observer: observes jobs.
        applier: carries out plans.
        writer: writes the status of invalid jobs.
        stores: the jobs' etcds.
        events: tells users.
    """

    def __init__(
        self,
        *,
        store: Store,
        observer: Observer,
        applier: Applier,
        writer: Writer,
        stores: JobStores,
        events: EventRecorder,
    ) -> None:
        self._store = store
        self._observer = observer
        self._applier = applier
        self._writer = writer
        self._stores = stores
        self._events = events
        self._records: dict[str, JobRecord] = {}

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and everything that is known of it; None if there is no such job.

        Raises:
            BadInput: the job, or its status, is invalid.
        """
        body = self._store.job(key)
        self._forget_former(key, body)
        if body is None or text(body, "spec", "managedBy") not in ("", MANAGER):
            return None
        try:
            job = job_of(body)
        except BadInput as error:
            await self._write_invalid(key, body, str(error))
            raise
        if (record := self._records.get(key)) is None:
            record = self._records[key] = JobRecord(key, body)
        if not record.observed:
            record.observed = True
            record.pdb_error = _pdb_error(job.status)
        record.body = body
        record.requeue = None
        for backoff in (record.creates, record.pdb, record.annotations):
            backoff.see(job.generation)
        return job, await self._observer.observe(job, record)

    async def apply(self, job: Job, plan: Plan) -> float | None:
        """Carry out a plan; return the seconds after which to look at the job again, None for no need.

        Raises:
            ClusterError: a part of it failed.
        """
        record = self._records[f"{job.namespace}/{job.name}"]
        await self._applier.apply(job, plan, record)
        return record.requeue

    def pod_deleted(self, pod: Json) -> None:
        """A pod is gone: remember it until it is replaced, and tell its last words."""
        owner = owner_of(pod)
        key = f"{pod['metadata']['namespace']}/{owner.name}" if owner is not None else ""
        job = self._store.job(key)
        if job is None or owner is None or job["metadata"]["uid"] != owner.uid:
            return
        record = self._records.get(key)
        if record is None or record.uid != owner.uid:
            record = self._records[key] = JobRecord(key, job)
        remember_deleted(record, pod)
        if (event := deleted_pod_event(pod)) is not None:
            self._events.event(job, event)

    def _forget_former(self, key: str, body: Json | None) -> None:
        """Forget former jobs with this key, and their runs once none of their pods is left."""
        current = body["metadata"]["uid"] if body is not None else None
        for uid in self._stores.uids_of(key):
            if uid != current and not self._store.owned_by(PODS, key.partition("/")[0], uid):
                self._stores.leave(uid)
        if (record := self._records.get(key)) is not None and record.uid != current:
            del self._records[key]

    async def _write_invalid(self, key: str, body: Json, why: str) -> None:
        """Write the condition Invalid; the rest of the status stays."""
        try:
            before = status_from_json(body.get("status"))
        except BadInput:
            return  # nothing of an unreadable status may be lost
        generation = integer(body, "metadata", "generation") or 0
        others = tuple(each for each in before.conditions if each.type != ConditionType.INVALID)
        former = next((each for each in before.conditions if each.type == ConditionType.INVALID), None)
        since = former.since if former is not None and former.status else time.time()
        invalid = Condition(
            type=ConditionType.INVALID, status=True, reason=Reason.SPEC_INVALID, message=why, since=since
        )
        if former == invalid and before.observed_generation == generation:
            return
        try:
            await self._writer.write_status(
                body, replace(before, observed_generation=generation, conditions=(*others, invalid))
            )
        except ClusterError as error:
            _log.warning("%s: its status does not say that it cannot be read: %s", key, error)


def _pdb_error(status: JobStatus) -> str | None:
    """Why the disruption budget could not be created, by the status: it is not reported again."""
    for condition in status.conditions:
        if condition.type == ConditionType.DISRUPTION_BUDGET_FAILED and condition.status:
            return condition.message
    return None
