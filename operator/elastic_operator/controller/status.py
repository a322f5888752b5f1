"""The status of a job with its conditions.

They describe the job after the plan is applied, so applying the plan does not change them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.status import Condition, JobState, JobStatus
from elastic_operator.controller import messages
from elastic_operator.controller.report import breakdown_at_change, breakdown_at_suspension
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.records import RoundRecord, TimeBreakdown, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.controller.failures import Completion
    from elastic_operator.controller.model import FailureCount, Job, Observed, PlannedPods, Pod, Snapshot

Value = tuple[bool, Reason, str]
"""The value of a condition: whether the condition holds, the reason, and the message."""


def running_status(
    snapshot: Snapshot, failures: FailureCount, planned: PlannedPods, breakdown: TimeBreakdown | None
) -> JobStatus:
    """Return the status of a job that is neither suspended nor finished; its time breakdown is ``breakdown``."""
    job, before, observed, round = snapshot.job, snapshot.job.status, snapshot.observed, snapshot.observed.round
    size_generation = before.size_generation
    # The first pods have the size once they exist, later pods when they are about to be created.
    if planned.staying or planned.gone or (size_generation and planned.created):
        size_generation = max(size_generation, planned.size.generation if planned.size is not None else 0, 1)
    pods = len(planned.staying) + (len(planned.created) if observed.blocked is None else 0)
    ready = len([pod for pod in planned.staying if pod.ready])
    enough = ready >= job.spec.min_replicas
    # If the operator has no permission to read the store, enough ready pods count as training.
    unheard = observed.store_forbidden and enough
    started = before.started
    if started is None and ((round is not None and round.members) or unheard):
        started = snapshot.now
    world_size = before.world_size if round is None else _world_size(round, planned.staying)
    trains = started is not None and enough and (world_size > 0 or unheard)
    writes_replicas = job.problem is None and job.spec.replicas is None
    status = replace(
        with_pods(_counted(snapshot, failures, planned.gone), job.spec, pods, ready),
        state=JobState.RUNNING if trains else JobState.PENDING if started is None else JobState.WAITING,
        observed_generation=job.generation + (1 if writes_replicas else 0),
        world_size=world_size if ready else 0,
        size_generation=size_generation,
        started=started,
        active=snapshot.now if before.active is None and job.problem is None else before.active,
        applied_spec=snapshot.applied,
        time_breakdown=breakdown,
    )
    return replace(status, conditions=running_conditions(snapshot, status, planned))


def suspended_status(snapshot: Snapshot, failures: FailureCount, *, unread: bool) -> JobStatus:
    """Return the status of a suspended job; if ``unread``, its store must be read before it may be deleted."""
    job, before = snapshot.job, snapshot.job.status
    stopping = bool(snapshot.unfinished)
    gone = frozenset([pod.uid for pod in snapshot.gone + snapshot.live if pod.uid not in failures.pending])
    breakdown = before.time_breakdown
    if not (stopping or unread or before.suspended):
        breakdown = breakdown_at_suspension(job, snapshot.observed, snapshot.now)
    return replace(
        _counted(snapshot, failures, gone),
        state=JobState.SUSPENDED,
        observed_generation=job.generation,
        desired=0,
        replicas=0,
        ready_replicas=0,
        ready_spares=0,
        world_size=0,
        active=None,
        size_generation=max(before.size_generation, 1 if gone else 0) if stopping or unread else 0,
        applied_spec=snapshot.applied,
        time_breakdown=breakdown,
        conditions=suspended_conditions(snapshot, stopping=stopping, unread=unread),
    )


def finished_status(snapshot: Snapshot, failures: FailureCount, completion: Completion) -> JobStatus:
    """Return the status of a job that has just finished; the clean-up sets the number of its pods."""
    before, round, now = snapshot.job.status, snapshot.observed.round, snapshot.now
    counted = _counted(snapshot, failures, frozenset())
    failure = completion.failure
    if failure is None and not any(each.charged for each in failures.ended):
        failure = failures.last_failure
    trained = completion.round > 0 or (round is not None and bool(round.members))
    return replace(
        counted,
        state=JobState.SUCCEEDED if completion.failure is None else JobState.FAILED,
        desired=before.desired or snapshot.desired,
        round=max(counted.round, completion.round),
        world_size=(round.world_size if round is not None else 0) or before.world_size,
        restarts=max(counted.restarts, completion.restarts),
        pod_failures=failures.pod_failures if completion.counts_pods else before.pod_failures,
        started=now if before.started is None and trained else before.started,
        completed=now,
        time_breakdown=breakdown_at_change(snapshot.job, snapshot.observed, now),
        last_failure=failure or before.last_failure,
        conditions=finished_conditions(before, completion, now),
    )


def unreadable_status(job: Job, problem: str, now: float) -> JobStatus:
    """Return the status of a job whose spec cannot be read: only the condition Invalid and the generation change."""
    before = job.status
    others = tuple(each for each in before.conditions if each.type != ConditionType.INVALID)
    invalid = with_times(before, {ConditionType.INVALID: (True, Reason.SPEC_INVALID, problem)}, now)
    return replace(before, observed_generation=job.generation, conditions=(*others, *invalid))


def with_pods(status: JobStatus, spec: ElasticJobSpec, pods: int, ready: int) -> JobStatus:
    """Return the status of a job with this many pods; those beyond the desired number are spares."""
    ready_spares = _spares(status, spec, ready)
    return replace(
        status,
        replicas=pods - _spares(status, spec, pods),
        ready_replicas=ready - ready_spares,
        ready_spares=ready_spares,
    )


def _spares(status: JobStatus, spec: ElasticJobSpec, pods: int) -> int:
    return min(max(pods - status.desired, 0), spec.spares)


def _counted(snapshot: Snapshot, failures: FailureCount, gone: frozenset[str]) -> JobStatus:
    """Return the status with its counters, which never decrease."""
    before, round = snapshot.job.status, snapshot.observed.round
    return replace(
        before,
        desired=snapshot.desired,
        round=max(before.round, round.number if round is not None else 0),
        restarts=max(before.restarts, round.restarts if round is not None else 0),
        uncharged_restarts=max(before.uncharged_restarts, round.uncharged_restarts if round is not None else 0),
        pod_failures=failures.pod_failures,
        counted_pod_uids=gone,
        last_failure=failures.last_failure,
        excluded_nodes=failures.excluded_nodes,
    )


def _world_size(round: RoundRecord, staying: Iterable[Pod]) -> int:
    """Return the number of workers in a round; 0 if all its pods are gone, for example after a suspension."""
    names = {pod.name for pod in staying}
    return round.world_size if any(name_of(node) in names for node in round.nodes) else 0


def running_conditions(snapshot: Snapshot, status: JobStatus, planned: PlannedPods) -> tuple[Condition, ...]:
    """Return the conditions of a job that is neither suspended nor finished."""
    observed, before, problem = snapshot.observed, snapshot.job.status, snapshot.job.problem
    too_few, incomplete = messages.missing_pods(snapshot, status, planned)
    waiting = _waiting(snapshot, status, planned, too_few)
    values: dict[str, Value] = {
        ConditionType.RUNNING: _running(observed, status, waiting, messages.spares(snapshot, status, planned)),
        ConditionType.WAITING: waiting,
        ConditionType.DEGRADED: _degraded(observed, status, incomplete),
    }
    budget_ok = Reason.BUDGET_CREATED if snapshot.job.spec.disruption_budget else Reason.NOT_REQUESTED
    # These conditions are absent until they first become true, and are kept from then on.
    rare: dict[str, tuple[Reason, str | None, Reason]] = {
        ConditionType.INVALID: (
            Reason.REFUSED if problem is None else Reason.SPEC_INVALID,
            problem or (observed.rejected and messages.clause(observed.rejected)),
            Reason.SPEC_VALID,
        ),
        ConditionType.SUSPENDED: (Reason.SUSPENDED, None, Reason.RESUMED),
        ConditionType.RESTART_REQUIRED: (
            Reason.SPEC_CHANGED,
            messages.spec_changes(snapshot.changes) if snapshot.changes else None,
            Reason.SPEC_IN_EFFECT,
        ),
        ConditionType.STORE_UNREACHABLE: (
            Reason.NOT_ALLOWED if observed.store_forbidden else Reason.UNREACHABLE,
            observed.store_error and messages.clause(observed.store_error),
            Reason.REACHABLE,
        ),
        ConditionType.RESOURCES_BLOCKED: (
            Reason.RESOURCES_BLOCKED,
            observed.blocked and messages.clause(observed.blocked),
            Reason.RESOURCES_AVAILABLE,
        ),
        ConditionType.DISRUPTION_BUDGET_FAILED: (
            Reason.BUDGET_REJECTED,
            observed.disruption_budget_error and messages.clause(observed.disruption_budget_error),
            budget_ok,
        ),
        ConditionType.STEPS_DIFFER: (Reason.STEPS_DIFFER, messages.different_steps(observed), Reason.STEPS_AGREE),
    }
    if snapshot.job.spec.etcd.is_open:
        values[ConditionType.ETCD_OPEN] = (True, Reason.NOT_SECURED, messages.ETCD_OPEN)
    known = {condition.type for condition in before.conditions}
    for kind, (reason, message, reason_if_false) in rare.items():
        if message is not None:
            values[kind] = (True, reason, message)
        elif kind in known:
            values[kind] = (False, reason_if_false, "")
    return with_times(before, values, snapshot.now)


def suspended_conditions(snapshot: Snapshot, *, stopping: bool, unread: bool) -> tuple[Condition, ...]:
    """Return the conditions of a suspended job; see :func:`suspended_status`."""
    before = snapshot.job.status
    no: Value = (False, Reason.SUSPENDED, "")
    if stopping:
        suspended: Value = (False, Reason.STOPPING, "the pods are terminating")
    elif unread:
        suspended = (False, Reason.STORE_UNREADABLE, messages.OUTCOME_UNKNOWN)
    else:
        suspended = (True, Reason.SUSPENDED, "no pod is created until spec.suspend is false again")
    why = messages.store_unread(snapshot.observed) if unread else ""
    values: dict[str, Value] = {
        ConditionType.RUNNING: no,
        ConditionType.WAITING: (True, Reason.STORE_UNREADABLE, why) if unread else no,
        ConditionType.DEGRADED: no,
        ConditionType.SUSPENDED: suspended,
    }
    for condition in before.conditions:
        values.setdefault(condition.type, no)
    if snapshot.job.problem is not None:
        values[ConditionType.INVALID] = (True, Reason.SPEC_INVALID, snapshot.job.problem)
    elif ConditionType.INVALID in values:
        values[ConditionType.INVALID] = (False, Reason.SPEC_VALID, "")
    if unread and before.state is not JobState.SUSPENDED:
        # The time of this condition is the start of the wait for the store.
        others = tuple(condition for condition in before.conditions if condition.type != ConditionType.WAITING)
        before = replace(before, conditions=others)
    return with_times(before, values, snapshot.now)


def finished_conditions(before: JobStatus, completion: Completion, now: float) -> tuple[Condition, ...]:
    """Return the conditions of a finished job."""
    no: Value = (False, completion.reason, "")
    yes: Value = (True, completion.reason, completion.failure.message if completion.failure is not None else "")
    values: dict[str, Value] = {
        ConditionType.RUNNING: no,
        ConditionType.WAITING: no,
        ConditionType.DEGRADED: no,
        ConditionType.SUCCEEDED if completion.failure is None else ConditionType.FAILED: yes,
        ConditionType.FINISHED: yes,
    }
    for condition in before.conditions:
        values.setdefault(condition.type, no)
    return with_times(before, values, now)


def with_times(before: JobStatus, values: Mapping[str, Value], now: float) -> tuple[Condition, ...]:
    """Return the conditions, each with the time of its last change between true and false."""
    since = {(condition.type, condition.status): condition.since for condition in before.conditions}
    return tuple(
        [
            Condition(kind, holds, reason, shorten(message, messages.MESSAGE_LIMIT), since.get((kind, holds), now))
            for kind, (holds, reason, message) in values.items()
        ]
    )


def _waiting(snapshot: Snapshot, status: JobStatus, planned: PlannedPods, message: str) -> Value:
    if status.ready_replicas >= snapshot.job.spec.min_replicas:
        return (False, Reason.ENOUGH_PODS, "")
    if planned.held:
        return (True, Reason.STORE_UNREADABLE, message)
    return (True, Reason.BELOW_MINIMUM if snapshot.observed.blocked is None else Reason.RESOURCES_BLOCKED, message)


def _running(observed: Observed, status: JobStatus, waiting: Value, spares: str) -> Value:
    if status.state is JobState.RUNNING:
        known = f"round {status.round} with world size {status.world_size}"
        if not status.world_size:
            known = "enough pods are ready; the operator cannot read the round"
        return (True, Reason.TRAINING, f"{known}; {spares}" if spares else known)
    waits, reason, _ = waiting
    if waits:
        return (False, Reason.NOT_STARTED if status.started is None else reason, "")
    cause = observed.round.cause if observed.round is not None and not observed.round.members else ""
    return (False, Reason.STARTING, cause or "the agents have not formed a round yet")


def _degraded(observed: Observed, status: JobStatus, message: str) -> Value:
    if status.started is None:
        return (False, Reason.NOT_STARTED, "")
    if status.ready_replicas >= status.desired:
        return (False, Reason.ALL_PODS, "")
    return (True, Reason.BELOW_DESIRED if observed.blocked is None else Reason.RESOURCES_BLOCKED, message)
