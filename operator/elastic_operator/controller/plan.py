"""The plan for a job: a pure function of the job, its observed state, and the time.

The function does no I/O, reads no clock, logs nothing, and never raises. It is level-triggered, and its only memory is
the status. After a plan is applied, the next plan is empty; after a part of a plan is applied, the next plan
has the rest. The function uses these modules, in this order:

==============  ==================================================================================
module          question
==============  ==================================================================================
``failures``    what does the end of each pod mean, and has the job ended?
``pods``        which pods are deleted and created, and which size do the agents get?
``status``      what are the status and its conditions?
``report``      what are the time breakdown and the report?
``messages``    which events are emitted?
==============  ==================================================================================

These functions apply the fields of the spec that decide about the life of a job:

==============================================  =====================================================
field                                           function
==============================================  =====================================================
``replicas``, ``minReplicas``, ``maxReplicas``  ``pods.plan_pods``
``spares``                                      ``pods.plan_pods``
``suspend``                                     ``_suspend``
``backoffLimit``, ``activeDeadlineSeconds``     ``failures.find_completion``
``failurePolicy``                               ``failures.classify``
``ttlSecondsAfterFinished``                     ``_clean_up``
``cleanPodPolicy``                              ``_clean_up``
``schedulingPolicy.gang``                       ``_run``
``disruptionBudget``                            ``_run``
all fields of ``AppliedSpec``                   ``_with_spec_in_effect``
==============================================  =====================================================

The pods of a job are created from the spec that was applied when the job was started or resumed. Otherwise a change of
the template would affect only later pods, and two kinds of pods would train together. The applied spec is fixed once a
pod exists or training has begun. A change takes effect when the job is suspended and resumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import CleanPodPolicy, changed_fields
from elastic_operator.api.status import JobState, JobStatus
from elastic_operator.controller import model
from elastic_operator.controller import status as statuses
from elastic_operator.controller.failures import count_failures, find_completion
from elastic_operator.controller.messages import completion_event, running_events, suspension_events
from elastic_operator.controller.pods import plan_pods
from elastic_operator.controller.report import breakdown_at_change, has_run_data, report_of

if TYPE_CHECKING:
    from collections.abc import Iterable


EXIT_PERIOD: Final = 30.0
"""Seconds that agents have to exit by themselves after the run's end, because a deleted pod loses its log."""

_RESUME_DELAY: Final = 0.1
"""Seconds until the next plan of a job that was resumed before its pods were gone."""


def plan(job: model.Job, observed: model.Observed, now: float) -> model.Plan:
    """Return the plan for the job; ``now`` is in seconds since the Unix epoch."""
    if observed.unreadable is not None:
        status = statuses.unreadable_status(job, observed.unreadable, now)
        return model.Plan(status=_unless_the_same(job.status, status), unmanaged=True)
    snapshot = model.Snapshot.of(job, observed, now)
    if job.deleting:
        # The store is kept while agents may use it to leave.
        pods = (*snapshot.live, *(pod for pod in snapshot.ended if pod.sidecars_running))
        return model.Plan(etcd=bool(snapshot.unfinished), remove=pods)
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
    failures = count_failures(snapshot)
    completion = find_completion(snapshot, failures)
    if completion is not None:
        status = statuses.finished_status(snapshot, failures, completion)
        return replace(_clean_up(snapshot, status), events=(completion_event(status),))
    if suspended:
        return _suspend(snapshot, failures, read_until)
    return _run(snapshot, failures)


def _with_spec_in_effect(snapshot: model.Snapshot, *, is_resumed: bool) -> model.Snapshot:
    """Return the input with the spec that applies to a job that is neither suspended nor finished."""
    job, spec, applied = snapshot.job, snapshot.job.spec, snapshot.job.status.applied_spec
    had_pods = bool(snapshot.gone) or job.status.size_generation > 0
    if applied is None or not (snapshot.live or (had_pods and not is_resumed)):
        return replace(snapshot, applied=None if job.problem else spec.applied)
    # The applied spec was valid when it was applied; only the bounds can be invalid now.
    problem = None if 1 <= spec.min_replicas <= spec.max_replicas else job.problem
    job = replace(job, spec=spec.with_applied(applied), problem=problem)
    return replace(snapshot, job=job, applied=applied, changes=changed_fields(spec, applied))


def _run(snapshot: model.Snapshot, failures: model.FailureCount) -> model.Plan:
    """Return the plan of an active job. If its spec is invalid, running pods continue, and nothing is created."""
    spec, before, observed = snapshot.job.spec, snapshot.job.status, snapshot.observed
    valid, breakdown = snapshot.job.problem is None, before.time_breakdown
    if valid and before.active is None and snapshot.was_suspended:
        breakdown = breakdown_at_change(snapshot.job, observed, snapshot.now)  # the job is resumed
    planned = plan_pods(snapshot, failures, breakdown)
    status = statuses.running_status(snapshot, failures, planned, breakdown)
    has_objects = valid or bool(snapshot.live)
    times = [failures.next_due, *(new.due for new in planned.missing)]
    if status.active is not None and spec.active_deadline is not None:
        deadline = status.active + spec.active_deadline
        times += [deadline, deadline + model.STORE_TIMEOUT]  # after STORE_TIMEOUT, an unread store does not extend it
    return model.Plan(
        replicas=snapshot.desired if valid and spec.replicas is None else None,
        status=_unless_the_same(before, status, planned.staying),
        events=running_events(snapshot, status, failures, planned),
        ended=failures.ended,
        # Without pods to create, the etcd is kept while it may be needed, but not created.
        etcd=(valid and observed.rejected is None)
        or observed.etcd is not model.EtcdState.ABSENT
        or bool(snapshot.unfinished),
        min_member=spec.min_replicas if has_objects and spec.scheduling.gang is not None else None,
        min_available=spec.min_replicas if has_objects and spec.disruption_budget else None,
        size=planned.announce,
        remove=planned.remove,
        create=planned.created,
        wake_at=_next_time(times, snapshot.now),
    )


def _suspend(snapshot: model.Snapshot, failures: model.FailureCount, read_until: float | None) -> model.Plan:
    """Return the plan that deletes all objects of a suspended job, or of one that is resumed before its pods are gone.

    The store is kept while agents may use it to leave, and until the operator has read whether the run has ended.
    """
    job, now, observed = snapshot.job, snapshot.now, snapshot.observed
    unread = not snapshot.unfinished and (read_until is not None or bool(failures.pending))
    stopped = not snapshot.unfinished and not unread
    status = statuses.suspended_status(snapshot, failures, unread=unread)
    pods = tuple([pod for pod in snapshot.live + snapshot.ended if pod.uid not in failures.pending])
    times = [read_until, failures.next_due, now + _RESUME_DELAY if stopped and not job.spec.suspend else None]
    return model.Plan(
        report=report_of(job, status, observed) if stopped and has_run_data(observed) else None,
        status=_unless_the_same(job.status, status),
        events=suspension_events(job.status, status, failures),
        ended=failures.ended,
        etcd=observed.etcd is not model.EtcdState.ABSENT and not stopped,
        remove=pods,
        wake_at=_next_time(times, now),
    )


def _clean_up(snapshot: model.Snapshot, status: JobStatus) -> model.Plan:
    """Return the plan of a finished job: it deletes the remaining objects and creates nothing.

    Agents that know of the end may exit by themselves within :data:`EXIT_PERIOD`; their store is kept until then.
    ``cleanPodPolicy`` decides which pods are deleted. The job itself is deleted after its agents have exited, if its
    ``ttlSecondsAfterFinished`` have passed.
    The report is updated until the store is deleted.
    """
    job, spec, observed, now = snapshot.job, snapshot.job.spec, snapshot.observed, snapshot.now
    completed = status.completed or 0.0
    exit_by = completed + EXIT_PERIOD
    # A completion time in the future comes from another clock, so the wait could be too long, and is skipped.
    exiting = completed <= now < exit_by
    waiting = exiting and bool(snapshot.unfinished)
    expires = None if spec.ttl_after_finished is None else completed + spec.ttl_after_finished
    expired = expires is not None and now >= expires
    times = [exit_by if waiting else None, None if expired else expires]
    finished = status.condition(ConditionType.FINISHED)
    agents_know = finished is not None and finished.reason in (Reason.RUN_SUCCEEDED, Reason.RUN_FAILED)
    delete: tuple[model.Pod, ...] = ()
    if spec.clean_pod_policy is not CleanPodPolicy.NONE:
        live = (pod for pod in snapshot.live if not (exiting and agents_know and pod.phase is model.PodPhase.RUNNING))
        is_all = spec.clean_pod_policy is CleanPodPolicy.ALL
        delete = (*live, *(pod for pod in snapshot.ended if is_all or pod.sidecars_running))
    deleted = {pod.uid for pod in delete}
    left = [pod for pod in snapshot.live if pod.uid not in deleted]
    ready = sum(pod.ready for pod in left)
    status = statuses.with_pods(replace(status, observed_generation=job.generation), spec, len(left), ready)
    delete_job = expired and not waiting
    has_own_store = spec.etcd.endpoint is None and observed.etcd is not model.EtcdState.ABSENT
    reports = not job.status.state.finished or has_own_store or has_run_data(observed)
    return model.Plan(
        report=report_of(job, status, observed) if reports and not delete_job else None,
        status=_unless_the_same(job.status, status),
        etcd=waiting,
        remove=delete,
        delete_job=delete_job,
        wake_at=min((time for time in times if time is not None), default=None),
    )


def _unless_the_same(before: JobStatus, status: JobStatus, staying: Iterable[model.Pod] = ()) -> JobStatus | None:
    """Return the status to write; None if it has no relevant change.

    The removal of UIDs of deleted pods can wait for the next write, and so can the first size generation. The removal
    of the UID of an existing pod cannot wait: a later failure of that pod would not be counted.
    """
    remembered = status.counted_pod_uids <= before.counted_pod_uids and not any(
        pod.uid in before.counted_pod_uids for pod in staying
    )
    generation = status.size_generation if before.size_generation else 0
    same = replace(status, counted_pod_uids=before.counted_pod_uids, size_generation=generation) == before
    return None if remembered and same else status


def _next_time(times: Iterable[float | None], now: float) -> float | None:
    return min((time for time in times if time is not None and time > now), default=None)
