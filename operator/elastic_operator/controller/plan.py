"""The plan for a job: a pure function of the job, its observed state, and the time.

The function does no I/O, reads no clock, logs nothing, and never raises. It is level-triggered, and its only memory is
the status. After a plan was carried out, the next plan is empty; after a plan was carried out in part, the next plan
has the rest. The function uses these modules, in this order:

==============  ==================================================================================
module          question
==============  ==================================================================================
``failures``    what does the end of each pod mean, and has the job ended?
``scaling``     which pods are deleted and created, and which size do the agents get?
``status``      what are the status, the time breakdown and the report?
``messages``    which conditions hold, and which events are emitted?
==============  ==================================================================================

The pods of a job are made from the spec that was applied when the job was started or resumed. A change of the template
would otherwise reach only the pods that are created after it, and two kinds of pods would train together. The applied
spec is fixed once there is a pod, or training has begun. A change takes effect when the job is suspended and resumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import MANAGER, CleanPodPolicy, changed_fields
from elastic_operator.api.status import JobState
from elastic_operator.controller.failures import count_failures, find_completion
from elastic_operator.controller.messages import completion_event, running_events, suspension_events
from elastic_operator.controller.model import PATIENCE, EtcdState, Plan, PodPhase, Snapshot
from elastic_operator.controller.scaling import plan_pods, removals
from elastic_operator.controller.status import (
    breakdown_at_change,
    finished_status,
    has_news,
    report_of,
    running_status,
    suspended_status,
    unreadable_status,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import Job, Observed, Pod

__all__ = ["EXIT_PERIOD", "plan"]

EXIT_PERIOD: Final = 30.0
"""Seconds that agents have to exit by themselves after the run's end: a deleted pod loses its log."""

_AT_ONCE: Final = 0.1
"""Seconds after which a job continues that was resumed before its pods were gone."""


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """Return the plan for the job.

    Args:
        job: the job, with the status that was written last.
        observed: the observed state of the job.
        now: seconds since the Unix epoch.
    """
    if job.spec.managed_by != MANAGER:
        return Plan(hands_off=True)
    if observed.unreadable is not None:
        status = unreadable_status(job, observed.unreadable, now)
        return Plan(status=_unless_the_same(job.status, status), hands_off=True)
    snapshot = Snapshot.of(job, observed, now)
    if job.deleting:
        # The store stays while agents may want to leave there.
        pods = (*snapshot.live, *(pod for pod in snapshot.ended if pod.sidecars_running))
        return Plan(etcd=bool(snapshot.unfinished), remove=removals(pods, "the job is being deleted"))
    if job.status.state.finished:
        return _clean_up(snapshot, job.status)

    is_resumed = job.status.state is JobState.SUSPENDED and not job.spec.suspend
    # If a job is resumed before it has stopped, the old pods and their store are deleted first: new agents would count
    # the leaving agents as dead, the store may not have been read yet, and the spec may name another store.
    must_stop_first = is_resumed and not snapshot.live and not job.status.holds(ConditionType.SUSPENDED)
    suspended = job.spec.suspend or must_stop_first
    read_until = snapshot.store_needed_until() if suspended else None
    if suspended:
        applied = job.status.applied_spec if snapshot.unfinished or read_until is not None else None
        snapshot = replace(snapshot, job=replace(job, spec=job.spec.with_applied(applied)), applied=applied)
    else:
        snapshot = _with_spec_in_effect(snapshot, is_resumed=is_resumed)
    count = count_failures(snapshot)
    completion = find_completion(snapshot, count)
    if completion is not None:
        status = finished_status(snapshot, count, completion)
        return replace(_clean_up(snapshot, status), events=(completion_event(status),))
    if suspended:
        return _suspend(snapshot, count, read_until)
    return _run(snapshot, count)


def _with_spec_in_effect(snapshot: Snapshot, *, is_resumed: bool) -> Snapshot:
    """Return the input with the spec that applies to a job that is neither suspended nor finished."""
    job, spec, applied = snapshot.job, snapshot.job.spec, snapshot.job.status.applied_spec
    had_pods = bool(snapshot.gone) or job.status.size_generation > 0
    if applied is None or not (snapshot.live or (had_pods and not is_resumed)):
        return replace(snapshot, applied=None if job.problem else spec.applied)
    # The applied spec was valid when it was applied; only the bounds can be invalid now.
    problem = None if 1 <= spec.min_replicas <= spec.max_replicas else job.problem
    job = replace(job, spec=spec.with_applied(applied), problem=problem)
    return replace(snapshot, job=job, applied=applied, changes=changed_fields(spec, applied))


def _run(snapshot: Snapshot, count: FailureCount) -> Plan:
    """Bring the job to its size; if its spec is invalid, running pods continue, and nothing is created."""
    spec, before, observed = snapshot.job.spec, snapshot.job.status, snapshot.observed
    valid, breakdown = snapshot.job.problem is None, before.time_breakdown
    if valid and before.active is None and before.condition(ConditionType.SUSPENDED) is not None:
        breakdown = breakdown_at_change(snapshot.job, observed, snapshot.now)  # it is resumed
    planned = plan_pods(snapshot, count, breakdown)
    status = running_status(snapshot, count, planned, breakdown)
    has_objects = valid or bool(snapshot.live)
    times = [count.next_due, *(slot.due for slot in planned.slots)]
    if status.active is not None and spec.active_deadline is not None:
        deadline = status.active + spec.active_deadline
        times += [deadline, deadline + PATIENCE]  # then the deadline counts even if the store could not be read
    return Plan(
        replicas=snapshot.desired if valid and spec.replicas is None else None,
        status=_unless_the_same(before, status, planned.staying),
        events=running_events(snapshot, status, count, planned),
        ended=count.ended,
        # Without pods to create, the etcd is kept while it may be needed, but not created.
        etcd=(valid and observed.rejected is None)
        or observed.etcd is not EtcdState.ABSENT
        or bool(snapshot.unfinished),
        min_member=spec.min_replicas if has_objects and spec.scheduling.gang is not None else None,
        min_available=spec.min_replicas if has_objects and spec.disruption_budget else None,
        size=planned.announce,
        remove=planned.remove,
        create=planned.created,
        wake_at=_next_time(times, snapshot.now),
    )


def _suspend(snapshot: Snapshot, count: FailureCount, read_until: float | None) -> Plan:
    """Delete all objects of a suspended job, or of a job that was resumed before its pods were gone.

    The store stays while agents may need it to leave, and until the operator has read whether the run has ended.
    """
    job, now, observed = snapshot.job, snapshot.now, snapshot.observed
    unread = not snapshot.unfinished and (read_until is not None or bool(count.pending))
    stopped = not snapshot.unfinished and not unread
    status = suspended_status(snapshot, count, unread=unread)
    pods = [pod for pod in snapshot.live + snapshot.ended if pod.uid not in count.pending]
    times = [read_until, count.next_due, now + _AT_ONCE if stopped and not job.spec.suspend else None]
    return Plan(
        report=report_of(job, status, observed) if stopped and has_news(observed) else None,
        status=_unless_the_same(job.status, status),
        events=suspension_events(job.status, status, count),
        ended=count.ended,
        etcd=observed.etcd is not EtcdState.ABSENT and not stopped,
        remove=removals(pods, "the job is suspended"),
        wake_at=_next_time(times, now),
    )


def _clean_up(snapshot: Snapshot, status: JobStatus) -> Plan:
    """Delete the remaining objects of a finished job; nothing is created for it any more.

    Agents that know of the end may end by themselves within :data:`EXIT_PERIOD`, and read it in the store until then.
    The policy decides on the pods that have ended. The job itself is not deleted before its agents have ended.
    The report is updated until the store is gone, or has nothing new.
    """
    job, spec, observed, now = snapshot.job, snapshot.job.spec, snapshot.observed, snapshot.now
    completed = status.completed or 0.0
    exit_by = completed + EXIT_PERIOD
    # A completion in the future is by another clock: it is unknown how long to wait.
    exiting = completed <= now < exit_by
    waiting = exiting and bool(snapshot.unfinished)
    expires = None if spec.ttl_after_finished is None else completed + spec.ttl_after_finished
    expired = expires is not None and now >= expires
    times = [exit_by if waiting else None, None if expired else expires]
    finished = status.condition(ConditionType.FINISHED)
    agents_know = finished is not None and finished.reason in (Reason.RUN_SUCCEEDED, Reason.RUN_FAILED)
    delete: tuple[Pod, ...] = ()
    if spec.clean_pod_policy is not CleanPodPolicy.NONE:
        live = (pod for pod in snapshot.live if not (exiting and agents_know and pod.phase is PodPhase.RUNNING))
        is_all = spec.clean_pod_policy is CleanPodPolicy.ALL
        delete = (*live, *(pod for pod in snapshot.ended if is_all or pod.sidecars_running))
    deleted = {pod.uid for pod in delete}
    left = [pod for pod in snapshot.live if pod.uid not in deleted]
    ready = sum(pod.ready for pod in left)
    status = replace(status, observed_generation=job.generation, replicas=len(left), ready_replicas=ready)
    delete_job = expired and not waiting
    has_own_store = spec.etcd.endpoint is None and observed.etcd is not EtcdState.ABSENT
    reports = not job.status.state.finished or has_own_store or has_news(observed)
    return Plan(
        report=report_of(job, status, observed) if reports and not delete_job else None,
        status=_unless_the_same(job.status, status),
        etcd=waiting,
        remove=removals(delete, "the job has finished"),
        delete_job=delete_job,
        wake_at=min((time for time in times if time is not None), default=None),
    )


def _unless_the_same(before: JobStatus, after: JobStatus, staying: Iterable[Pod] = ()) -> JobStatus | None:
    """Return the status to write; None if it has no relevant change.

    The removal of UIDs of deleted pods can wait for the next write, and so can the first size generation. The removal
    of the UID of an existing pod cannot wait: its failure would not be counted.
    """
    remembered = after.counted_pod_uids <= before.counted_pod_uids and not any(
        pod.uid in before.counted_pod_uids for pod in staying
    )
    generation = after.size_generation if before.size_generation else 0
    same = replace(after, counted_pod_uids=before.counted_pod_uids, size_generation=generation) == before
    return None if remembered and same else after


def _next_time(times: Iterable[float | None], now: float) -> float | None:
    """Return the first of the times that are in the future."""
    return min((time for time in times if time is not None and time > now), default=None)
