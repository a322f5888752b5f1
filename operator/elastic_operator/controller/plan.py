"""What to do about a job: a pure function of the job, what was observed of it, and the time.

It does no I/O, reads no clock, logs nothing, and raises for no input. It is level-triggered and remembers nothing but
the status. A plan that was carried out leaves nothing to do; after one that was carried out in part, the next plan
does the rest.

===================  ====================================================================
module               question
===================  ====================================================================
``pods``             which pods are live, and what does the end of a pod mean?
``applied_spec``     which spec are the pods made from?
``failures``         what do the pods that ended count for?
``outcome_unknown``  must the store be read first?
``completion``       has the job ended, and what is deleted then?
``scaling``          which pods are deleted and created, and what are the agents told?
``status``           what does the status say?
``events``           what is emitted?
``run_report``       where did the time go, and what is kept of the run?
``messages``         how is it worded?
===================  ====================================================================
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import MANAGER
from elastic_operator.controller import messages
from elastic_operator.controller.applied_spec import must_stop_first, spec_in_effect
from elastic_operator.controller.completion import clean_up, deadline_of, find_completion
from elastic_operator.controller.events import completion_event, events, events_of_suspension
from elastic_operator.controller.failures import count_failures
from elastic_operator.controller.model import EtcdState, Plan, Removal
from elastic_operator.controller.outcome_unknown import PATIENCE, outcome_unknown, store_needed_until
from elastic_operator.controller.pods import PodSets, Snapshot, without
from elastic_operator.controller.run_report import breakdown_at_change, report_at_completion, report_at_suspension
from elastic_operator.controller.scaling import (
    etcd_comes_first,
    fill,
    find_empty_slots,
    pods_to_delete,
    resume_record,
    settle_size,
    was_suspended,
    yield_to_etcd,
)
from elastic_operator.controller.status import (
    InvalidSpec,
    PlannedPods,
    finished_status,
    running_status,
    suspended_status,
    unless_the_same,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.applied_spec import SpecInEffect
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import Job, Observed, Pod
    from elastic_operator.controller.scaling import EmptySlot

__all__ = ["plan"]

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
        return Plan(managed_elsewhere=True)
    pods = PodSets.of(observed)
    snapshot = Snapshot(job, observed, pods, now)
    if job.deleting:
        return _tear_down(pods)
    if job.status.state.finished:
        return _clean_up(snapshot, job.status)

    unknown = outcome_unknown(snapshot)
    suspended = job.spec.suspend or must_stop_first(job, pods)
    read_until = store_needed_until(snapshot) if suspended else None
    if suspended:
        unknown = read_until is not None
    effect = spec_in_effect(job, pods, suspended=suspended, unknown=unknown)
    snapshot = replace(snapshot, job=replace(job, spec=effect.spec))
    count = count_failures(snapshot)
    completion = find_completion(snapshot, count)
    if completion is not None:
        status = finished_status(snapshot, count, completion)
        return replace(_clean_up(snapshot, status), events=(completion_event(status),))
    if suspended:
        return _suspend(snapshot, count, effect, read_until)
    if effect.problem is not None:
        return _leave_as_it_is(snapshot, count, effect, effect.problem)
    return _scale(snapshot, count, effect, unknown=unknown)


def _suspend(snapshot: Snapshot, count: FailureCount, effect: SpecInEffect, read_until: float | None) -> Plan:
    """Delete all that a suspended job has, or one that was resumed before its pods were gone.

    Its store stays while agents may want to leave there, and until it has said whether the run has ended.
    """
    job, pods, now = snapshot.job, snapshot.pods, snapshot.now
    unread = not pods.unfinished and (read_until is not None or bool(count.pending))
    stopped = not pods.unfinished and not unread
    status = suspended_status(snapshot, count, effect, unread=unread)
    continue_at = now + _AT_ONCE if stopped and not job.spec.suspend else None
    return Plan(
        report=report_at_suspension(job, status, snapshot.observed) if stopped else None,
        status=unless_the_same(job.status, status),
        events=events_of_suspension(job.status, status, count),
        etcd=snapshot.observed.etcd is not EtcdState.ABSENT and not stopped,
        remove=_removals(without(pods.live + pods.ended, count.pending), "the job is suspended"),
        wake_at=_next_time(read_until, count.next_due, continue_at, now=now),
    )


def _leave_as_it_is(snapshot: Snapshot, count: FailureCount, effect: SpecInEffect, problem: str) -> Plan:
    """Do nothing for a job with an invalid spec; what runs continues."""
    job, pods = snapshot.job, snapshot.pods
    planned = PlannedPods(
        staying=pods.live,
        gone=without(pods.gone, count.pending),
        time_breakdown=job.status.time_breakdown,
        invalid=InvalidSpec(Reason.SPEC_INVALID, problem),
    )
    status = running_status(snapshot, count, effect, planned)
    return Plan(
        status=unless_the_same(job.status, status, pods.live),
        events=events(snapshot, status, count),
        etcd=_needs_etcd(snapshot),
        min_member=_min_member(job) if pods.live else None,
        min_available=_min_available(job) if pods.live else None,
        wake_at=_next_time(*_deadlines(status, job), count.next_due, now=snapshot.now),
    )


def _scale(snapshot: Snapshot, count: FailureCount, effect: SpecInEffect, *, unknown: bool) -> Plan:
    """Bring the job to its size: tell the agents, delete surplus pods, fill empty indices."""
    job, observed, pods, now = snapshot.job, snapshot.observed, snapshot.pods, snapshot.now
    sizing = settle_size(snapshot)
    yielding = yield_to_etcd(snapshot, without(pods.live, sizing.surplus))
    deleted = sizing.surplus + yielding
    staying = without(pods.live, deleted)
    grown = max(job.spec.desired - job.status.desired, 0)
    last = pods.last_of_each_index(job, deleted)
    slots = find_empty_slots(staying, job.spec.desired, last, now, grown=grown)
    rejected = observed.rejected is not None
    held = (unknown or count.may_be_fatal) and not rejected
    fillable = () if rejected or etcd_comes_first(observed) else slots
    due = [slot for slot in fillable if slot.due <= now and not held]
    later = tuple(slot for slot in fillable if slot.due > now)
    resumed = job.status.active is None and was_suspended(job.status)
    breakdown = breakdown_at_change(job, observed, now) if resumed else job.status.time_breakdown
    resume = resume_record(job.status, breakdown, remembered=bool(staying))
    created = fill(snapshot, due, sizing.record, resume=resume, excluded=count.excluded_nodes)

    planned = PlannedPods(
        staying=staying,
        gone=without(pods.gone, count.pending) + deleted,
        time_breakdown=breakdown,
        created=created,
        backing_off=later,
        held=held,
        rejected=rejected,
        invalid=_rejection(snapshot, slots),
        size_generation=sizing.record.generation,
        writes_replicas=job.spec.replicas is None,
    )
    status = running_status(snapshot, count, effect, planned)
    return Plan(
        replicas=job.spec.desired if planned.writes_replicas else None,
        status=unless_the_same(job.status, status, staying),
        events=events(snapshot, status, count, fillable, held=held),
        etcd=not rejected or _needs_etcd(snapshot),
        min_member=_min_member(job),
        min_available=_min_available(job),
        size=sizing.announce,
        remove=(
            *_removals(sizing.surplus, f"{job.spec.desired} are wanted"),
            *_removals(yielding, "the job's etcd needs its room first"),
            *_removals(
                without(pods_to_delete(pods.ended, slots), count.pending), "it has ended and is not needed any more"
            ),
        ),
        create=created,
        wake_at=_next_time(*(slot.due for slot in later), *_deadlines(status, job), count.next_due, now=now),
    )


def _rejection(snapshot: Snapshot, slots: Sequence[EmptySlot]) -> InvalidSpec | None:
    """That the cluster rejects the pods of this spec.

    It is remembered until a pod was accepted, or is not created for another reason: an operator that has just started
    tries once more, which is no news.
    """
    job, observed = snapshot.job, snapshot.observed
    if observed.rejected is not None:
        return InvalidSpec(Reason.REFUSED, messages.clause(observed.rejected))
    known = job.status.condition(ConditionType.INVALID)
    same_spec = job.status.observed_generation == job.generation
    if slots and observed.blocked is None and same_spec and known is not None and known.status:
        return InvalidSpec(Reason.REFUSED, known.message) if known.reason == Reason.REFUSED else None
    return None


def _clean_up(snapshot: Snapshot, status: JobStatus) -> Plan:
    """Delete what a finished job leaves behind; nothing is created for it any more."""
    job = snapshot.job
    cleanup = clean_up(snapshot, status)
    left = without(snapshot.pods.live, cleanup.delete)
    ready = sum(pod.ready for pod in left)
    status = replace(status, observed_generation=job.generation, replicas=len(left), ready_replicas=ready)
    return Plan(
        report=None if cleanup.job else report_at_completion(job, status, snapshot.observed),
        status=unless_the_same(job.status, status),
        etcd=cleanup.etcd,
        remove=_removals(cleanup.delete, "the job has finished"),
        delete_job=cleanup.job,
        wake_at=cleanup.wake_at,
    )


def _tear_down(pods: PodSets) -> Plan:
    """Delete the pods of a job that is being deleted. Its store stays while agents may want to leave there."""
    return Plan(
        etcd=bool(pods.unfinished), remove=_removals(pods.live + pods.with_sidecars, "the job is being deleted")
    )


def _needs_etcd(snapshot: Snapshot) -> bool:
    """Whether the store is kept although no pod can be created; it is not created then."""
    return snapshot.observed.etcd is not EtcdState.ABSENT or bool(snapshot.pods.unfinished)


def _min_member(job: Job) -> int | None:
    return job.spec.min_replicas if job.spec.scheduling.gang is not None else None


def _min_available(job: Job) -> int | None:
    return job.spec.min_replicas if job.spec.disruption_budget else None


def _deadlines(status: JobStatus, job: Job) -> tuple[float, ...]:
    """When the job's time is up, and when that counts although the store cannot be read."""
    deadline = deadline_of(status, job.spec)
    return () if deadline is None else (deadline, deadline + PATIENCE)


def _removals(pods: Iterable[Pod], reason: str) -> tuple[Removal, ...]:
    return tuple(Removal(name=pod.name, uid=pod.uid, reason=reason) for pod in pods)


def _next_time(*times: float | None, now: float) -> float | None:
    """The first of the times that are in the future."""
    return min((time for time in times if time is not None and time > now), default=None)
