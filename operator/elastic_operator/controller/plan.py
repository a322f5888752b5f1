"""What to do about a job: a pure function of the job, what was observed of it, and the time.

It does no I/O, reads no clock, logs nothing, and raises for no input. It is level-triggered and remembers nothing but
the status. A plan that was carried out leaves nothing to do; after one that was carried out in part, the next plan
does the rest. It asks these modules, in this order:

============  ===============================================================================
module        question
============  ===============================================================================
``snapshot``  which pods are live, which spec is in effect, and must the store be read first?
``failures``  what does the end of each pod mean, and has the job ended?
``scaling``   which pods are deleted and created, and what are the agents told?
``status``    what does the status say, where did the time go, and what is kept of the run?
``messages``  which events are emitted?
============  ===============================================================================
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import MANAGER, CleanPodPolicy
from elastic_operator.controller.failures import count_failures, deadline_of, find_completion
from elastic_operator.controller.messages import completion_event, running_events, suspension_events
from elastic_operator.controller.model import EtcdState, Plan, PodPhase
from elastic_operator.controller.scaling import PlannedPods, plan_pods, removals
from elastic_operator.controller.snapshot import PATIENCE, Snapshot, must_stop_first, spec_in_effect, without
from elastic_operator.controller.status import (
    finished_status,
    report_at_completion,
    report_at_suspension,
    running_status,
    suspended_status,
    unless_the_same,
    unreadable_status,
)

if TYPE_CHECKING:
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import Job, Observed, Pod
    from elastic_operator.controller.snapshot import SpecInEffect

__all__ = ["EXIT_PERIOD", "plan"]

EXIT_PERIOD: Final = 30.0
"""Seconds in which agents that know of the run's end may end by themselves: a deleted pod loses its log."""

_AT_ONCE: Final = 0.1
"""Seconds after which a job continues that was resumed before its pods were gone."""


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """What to do about the job now.

    Args:
        job: the job, with the status that was written last.
        observed: what was observed of it.
        now: seconds since the Unix epoch.
    """
    if job.spec.managed_by != MANAGER:
        return Plan(hands_off=True)
    if observed.unreadable is not None:
        status = unreadable_status(job, observed.unreadable, now)
        return Plan(status=unless_the_same(job.status, status), hands_off=True)
    snapshot = Snapshot.of(job, observed, now)
    if job.deleting:
        return _tear_down(snapshot)
    if job.status.state.finished:
        return _clean_up(snapshot, job.status)

    suspended = job.spec.suspend or must_stop_first(snapshot)
    read_until = snapshot.store_needed_until() if suspended else None
    unknown = read_until is not None if suspended else snapshot.outcome_unknown
    effect = spec_in_effect(snapshot, suspended=suspended, unknown=unknown)
    snapshot = replace(snapshot, job=replace(job, spec=effect.spec))
    count = count_failures(snapshot)
    completion = find_completion(snapshot, count)
    if completion is not None:
        status = finished_status(snapshot, count, completion)
        return replace(_clean_up(snapshot, status), events=(completion_event(status),))
    if suspended:
        return _suspend(snapshot, count, effect, read_until)
    return _run(snapshot, count, effect)


def _run(snapshot: Snapshot, count: FailureCount, effect: SpecInEffect) -> Plan:
    """Bring the job to its size; if its spec is invalid, what runs continues, and nothing is created."""
    job, observed, now = snapshot.job, snapshot.observed, snapshot.now
    if effect.problem is None:
        planned = plan_pods(snapshot, count)
    else:
        planned = PlannedPods(
            staying=snapshot.live,
            gone=without(snapshot.gone, count.pending),
            time_breakdown=job.status.time_breakdown,
            invalid=(Reason.SPEC_INVALID, effect.problem),
        )
    status = running_status(snapshot, count, effect, planned)
    can_create = planned.size is not None and observed.rejected is None
    has_objects = planned.size is not None or bool(snapshot.live)
    deadline = deadline_of(status, job.spec)
    # The deadline counts in any case once the store could not be read for a while.
    times = [count.next_due, *(slot.due for slot in planned.slots), deadline, deadline and deadline + PATIENCE]
    return Plan(
        replicas=job.spec.desired if planned.size is not None and job.spec.replicas is None else None,
        status=unless_the_same(job.status, status, planned.staying),
        events=running_events(snapshot, status, count, planned),
        ended=count.ended,
        # Without pods to create it is kept while it may be needed, and not created.
        etcd=can_create or observed.etcd is not EtcdState.ABSENT or bool(snapshot.unfinished),
        min_member=job.spec.min_replicas if has_objects and job.spec.scheduling.gang is not None else None,
        min_available=job.spec.min_replicas if has_objects and job.spec.disruption_budget else None,
        size=planned.announce,
        remove=planned.remove,
        create=planned.created,
        wake_at=_next_time(*times, now=now),
    )


def _suspend(snapshot: Snapshot, count: FailureCount, effect: SpecInEffect, read_until: float | None) -> Plan:
    """Delete all that a suspended job has, or one that was resumed before its pods were gone.

    Its store stays while agents may want to leave there, and until it has said whether the run has ended.
    """
    job, now = snapshot.job, snapshot.now
    unread = not snapshot.unfinished and (read_until is not None or bool(count.pending))
    stopped = not snapshot.unfinished and not unread
    status = suspended_status(snapshot, count, effect, unread=unread)
    continue_at = now + _AT_ONCE if stopped and not job.spec.suspend else None
    return Plan(
        report=report_at_suspension(job, status, snapshot.observed) if stopped else None,
        status=unless_the_same(job.status, status),
        events=suspension_events(job.status, status, count),
        ended=count.ended,
        etcd=snapshot.observed.etcd is not EtcdState.ABSENT and not stopped,
        remove=removals(without(snapshot.live + snapshot.ended, count.pending), "the job is suspended"),
        wake_at=_next_time(read_until, count.next_due, continue_at, now=now),
    )


def _clean_up(snapshot: Snapshot, status: JobStatus) -> Plan:
    """Delete what a finished job leaves behind; nothing is created for it any more.

    Agents that know of the end may end by themselves within :data:`EXIT_PERIOD`, and read it in the store until then.
    The policy decides on the pods that have ended. The job itself is not deleted before its agents have ended.
    """
    job, spec, now = snapshot.job, snapshot.job.spec, snapshot.now
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
    left = without(snapshot.live, delete)
    ready = sum(pod.ready for pod in left)
    status = replace(status, observed_generation=job.generation, replicas=len(left), ready_replicas=ready)
    delete_job = expired and not waiting
    return Plan(
        report=None if delete_job else report_at_completion(job, status, snapshot.observed),
        status=unless_the_same(job.status, status),
        etcd=waiting,
        remove=removals(delete, "the job has finished"),
        delete_job=delete_job,
        wake_at=min((time for time in times if time is not None), default=None),
    )


def _tear_down(snapshot: Snapshot) -> Plan:
    """Delete the pods of a job that is being deleted. Its store stays while agents may want to leave there."""
    pods = (*snapshot.live, *(pod for pod in snapshot.ended if pod.sidecars_running))
    return Plan(etcd=bool(snapshot.unfinished), remove=removals(pods, "the job is being deleted"))


def _next_time(*times: float | None, now: float) -> float | None:
    """The first of the times that are in the future."""
    return min((time for time in times if time is not None and time > now), default=None)
