"""The plan for a job: a pure function of the job, its observed state, and the time.

The function does no I/O, reads no clock, logs nothing, and never raises. It is level-triggered, and its only memory is
the status. After a plan is carried out, the next plan is empty; after a part of a plan is carried out, the next plan
has the rest. The function uses these modules, in this order:

==============  ==================================================================================
module          question
==============  ==================================================================================
``failures``    what does the end of each pod mean, and has the job ended?
``plan``        which pods are deleted and created, and which size do the agents get?
``status``      what are the status, its conditions, the time breakdown and the report?
``messages``    which events are emitted?
==============  ==================================================================================

The pods of a job are created from the spec that was applied when the job was started or resumed. Otherwise a change of
the template would affect only later pods, and two kinds of pods would train together. The applied spec is fixed once a
pod exists or training has begun. A change takes effect when the job is suspended and resumed.

The annotations of a pod contain the size with which it was started. A later size is written to the store, with the
names of the draining pods, before a pod is changed, so that the agents form one round without the draining pods. The
known sizes are observed in the store and on the pods; the highest generation counts.

A deleted pod is replaced at once, and so is the first failed pod of an index. After each further failure, the index
waits longer, until :data:`HEALTHY_TIME` passes without a failure. The annotations of a pod contain the number of
earlier failures and the time of the last one.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.json_values import rfc3339
from elastic_operator.api.spec import CleanPodPolicy, changed_fields
from elastic_operator.api.status import JobState, JobStatus
from elastic_operator.controller import model
from elastic_operator.controller import status as statuses
from elastic_operator.controller.failures import FailureCount, count_failures, find_completion, pod_end
from elastic_operator.controller.messages import completion_event, running_events, suspension_events
from torchelastic.protocol.pod import LEFT_CODES, ExitCode
from torchelastic.protocol.records import ResumeRecord, SizeRecord, TimeBreakdown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


EXIT_PERIOD: Final = 30.0
"""Seconds that agents have to exit by themselves after the run's end, because a deleted pod loses its log."""

LONGEST_BACK_OFF: Final = 60.0
"""Maximum number of seconds by which repeated failures delay the creation of a pod's successor."""

HEALTHY_TIME: Final = 60.0
"""Seconds without a failure, excluding back-off, after which the next failure of an index counts as the first."""

ENDED_PODS_KEPT: Final = 3
"""Maximum number of replaced pods per job that are kept for their logs."""

_RESUME_DELAY: Final = 0.1
"""Seconds until the next plan of a job that was resumed before its pods were gone."""

_SUFFIX_LENGTH: Final = 5
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""No vowels, and no characters that look alike."""


def plan(job: model.Job, observed: model.Observed, now: float) -> model.Plan:
    """Return the plan for the job.

    Args:
        job: the job, with the status that was written last.
        observed: the observed state of the job.
        now: seconds since the Unix epoch.
    """
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


def _run(snapshot: model.Snapshot, failures: FailureCount) -> model.Plan:
    """Return the plan of an active job. If its spec is invalid, running pods continue, and nothing is created."""
    spec, before, observed = snapshot.job.spec, snapshot.job.status, snapshot.observed
    valid, breakdown = snapshot.job.problem is None, before.time_breakdown
    if valid and before.active is None and snapshot.was_suspended:
        breakdown = statuses.breakdown_at_change(snapshot.job, observed, snapshot.now)  # the job is resumed
    planned = plan_pods(snapshot, failures, breakdown)
    status = statuses.running_status(snapshot, failures, planned, breakdown)
    has_objects = valid or bool(snapshot.live)
    times = [failures.next_due, *(new.due for new in planned.missing)]
    if status.active is not None and spec.active_deadline is not None:
        deadline = status.active + spec.active_deadline
        times += [deadline, deadline + model.PATIENCE]  # after PATIENCE, an unread store does not extend it
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


def _suspend(snapshot: model.Snapshot, failures: FailureCount, read_until: float | None) -> model.Plan:
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
        report=statuses.report_of(job, status, observed) if stopped and statuses.has_run_data(observed) else None,
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
    status = replace(status, observed_generation=job.generation, replicas=len(left), ready_replicas=ready)
    delete_job = expired and not waiting
    has_own_store = spec.etcd.endpoint is None and observed.etcd is not model.EtcdState.ABSENT
    reports = not job.status.state.finished or has_own_store or statuses.has_run_data(observed)
    return model.Plan(
        report=statuses.report_of(job, status, observed) if reports and not delete_job else None,
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


def plan_pods(snapshot: model.Snapshot, failures: FailureCount, breakdown: TimeBreakdown | None) -> model.PlannedPods:
    """Plan the size of the job: announce it to the agents, delete surplus pods, fill empty indices.

    If the spec is invalid, the pods do not change.

    Args:
        snapshot: the input of the plan.
        failures: the pods that ended.
        breakdown: the job's time breakdown up to its last resumption.
    """
    job, observed, now = snapshot.job, snapshot.observed, snapshot.now
    gone = frozenset([each.pod.uid for each in failures.judged])
    if job.problem is not None:
        return model.PlannedPods(staying=snapshot.live, gone=gone)
    size, announce, surplus = _settle_size(snapshot)
    staying = _without(snapshot.live, surplus)
    etcd_waits = observed.etcd_blocked and observed.etcd is not model.EtcdState.READY
    yielding: tuple[model.Pod, ...] = ()
    if etcd_waits and job.status.started is None:  # before the job has trained, pods are useless without the store
        by_use = sorted(staying, key=lambda pod: (pod.ready, -pod.index))
        yielding = tuple(by_use[: max(len(staying) - job.spec.min_replicas, 0)])
        staying = _without(staying, yielding)
    held = (snapshot.outcome_unknown or failures.may_be_fatal) and observed.rejected is None
    # The agents in live pods restore the run in a store that lost it.
    resume = None if staying and not snapshot.was_suspended else _resume_record(job.status, breakdown)
    new = model.NewPod(name="", index=0, size=size, resume=resume, excluded=failures.excluded_nodes)
    missing = _missing_pods(snapshot, staying, surplus + yielding, new)
    obsolete = [pod for pod in _obsolete(snapshot.ended, missing) if pod.uid not in failures.pending]
    if observed.rejected is not None or etcd_waits:
        missing = ()
    return model.PlannedPods(
        staying=staying,
        gone=gone.union([pod.uid for pod in surplus + yielding]),
        created=() if held else tuple([new for new in missing if new.due <= now]),
        remove=(*surplus, *yielding, *obsolete),
        missing=missing,
        held=held,
        size=size,
        announce=announce,
    )


def pod_name(job: str, job_uid: str, index: int, replaces: str) -> str:
    """Return the name of a pod. All operators that observe the same pods choose the same name.

    Args:
        job: the job's name.
        job_uid: the UID of the job.
        index: the index of the pod.
        replaces: the UID of the pod that it replaces; empty for the first of its index.
    """
    digest = hashlib.blake2b(f"{job_uid}\n{index}\n{replaces}".encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    suffix = ""
    for _ in range(_SUFFIX_LENGTH):
        number, letter = divmod(number, len(_SUFFIX_LETTERS))
        suffix += _SUFFIX_LETTERS[letter]
    return f"{job}-{index}-{suffix}"


def back_off(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row: 0, 1, 2, 4 … 60."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 16), LONGEST_BACK_OFF)


def _settle_size(snapshot: model.Snapshot) -> tuple[SizeRecord, SizeRecord | None, tuple[model.Pod, ...]]:
    """Compare the size that the agents have received with the desired size.

    Returns:
        The size that new pods are started with; the size to write into the store, or None; and the pods to delete.
    """
    job, spec, stored = snapshot.job, snapshot.job.spec, snapshot.observed.size
    known = [pod.size for pod in snapshot.live + snapshot.gone if pod.size is not None]
    if stored is not None:
        known.append(stored)
    newest = max((size.generation for size in known), default=0)
    size = SizeRecord(generation=newest, min=spec.min_replicas, max=spec.max_replicas, desired=snapshot.desired)
    agreed = bool(known) and all(
        (each.min, each.max, each.desired) == (size.min, size.max, size.desired)
        for each in known
        if each.generation == newest
    )
    # A store that cannot be read now may have a size with the status' generation, so no lower generation is used.
    generation = max(newest if agreed else max(newest + 1, job.generation), job.status.size_generation)
    size = msgspec.structs.replace(size, generation=generation)
    announced = stored.draining if agreed and stored is not None and stored.generation == newest else ()
    # Until the agents have restored a store that lost its data, the store does not show which of them are ready.
    is_lost = snapshot.observed.store_read and snapshot.observed.round is None and job.status.round > 0
    unready = [pod for pod in snapshot.live if not (pod.ready or (is_lost and pod.phase is model.PodPhase.RUNNING))]
    surplus = _surplus(snapshot.live, snapshot.desired, announced, {pod.uid for pod in unready})
    unaware = any(pod.size is None or pod.size.generation < generation for pod in snapshot.live)
    if not unaware or not snapshot.observed.store_read or (stored is not None and stored.generation >= generation):
        return size, None, surplus
    draining = tuple(sorted(pod.name for pod in surplus))
    return size, msgspec.structs.replace(size, draining=draining), surplus


def _surplus(
    live: Sequence[model.Pod], desired: int, announced: Sequence[str], unready: Collection[str]
) -> tuple[model.Pod, ...]:
    """Return the pods to delete.

    Pods that are announced as draining come first, because no round includes them; then all but one pod of each index,
    because two operators may have created them; then pods that are not ready; then the highest indices.
    """
    surplus = [pod for pod in live if pod.name in announced]
    by_index: dict[int, model.Pod] = {}
    for pod in sorted(live, key=lambda pod: (pod.uid in unready, pod.created, pod.uid)):
        if pod.name in announced:
            continue
        if pod.index in by_index:
            surplus.append(pod)
        else:
            by_index[pod.index] = pod
    staying = sorted(by_index.values(), key=lambda pod: (pod.uid not in unready, -pod.index))
    return (*surplus, *staying[: max(len(staying) - max(desired, 0), 0)])


def _missing_pods(
    snapshot: model.Snapshot, staying: Sequence[model.Pod], deleted: Iterable[model.Pod], new: model.NewPod
) -> tuple[model.NewPod, ...]:
    """Return the missing pods, for the lowest empty indices, each with a name that no other pod has.

    Args:
        snapshot: the input of the plan.
        staying: the live pods that stay, of any index.
        deleted: live pods that are about to be deleted.
        new: the values that the missing pods have in common.
    """
    job, stored = snapshot.job, snapshot.observed.size
    by_index: dict[int, list[model.Pod]] = {}
    for pod in (*snapshot.gone, *(replace(pod, terminating=True) for pod in deleted)):
        by_index.setdefault(pod.index, []).append(pod)
    filled = {pod.index for pod in staying}
    number = max(snapshot.desired - len(staying), 0)
    # If an index is needed only because the job grows now, its deleted pod was surplus.
    grown = max(snapshot.desired - job.status.desired, 0)
    taken = {pod.name for pod in snapshot.observed.pods}.union(stored.draining if stored is not None else ())
    # After a suspension, names differ from the former names, because the last round may still contain those.
    active = snapshot.now if job.status.active is None else job.status.active
    first = rfc3339(active) if snapshot.was_suspended else ""
    missing: list[model.NewPod] = []
    for index in itertools.islice((index for index in itertools.count() if index not in filled), number):
        made = replace(new, index=index)
        if (pods := by_index.get(index)) is not None:
            made = _successor(made, _last(job, pods), snapshot.now, wanted=len(missing) < number - grown)
        name = pod_name(job.name, job.uid, index, first if made.replaces is None else made.replaces.uid)
        while name in taken:
            name = pod_name(job.name, job.uid, index, name)
        missing.append(replace(made, name=name))
    return tuple(missing)


def _successor(new: model.NewPod, last: model.Pod, now: float, *, wanted: bool) -> model.NewPod:
    began, ended = (_by_our_clock(time, last, now) for time in (last.started, last.ended))
    healthy_since = began if last.failed is None else min(began, last.failed + back_off(last.failures))
    was_healthy = (now if last.ended is None else ended) - healthy_since >= HEALTHY_TIME
    before = 0 if was_healthy else max(last.failures, 0)
    has_run = last.started is not None or last.exit_code is not None
    gave_way = has_run and (last.terminating or last.termination_cause is not None)
    if _left(last) and (gave_way or not wanted):
        return replace(new, failures=before, failed=last.failed if before else None, replaces=last)
    failures = before + 1
    failed = began if last.ended is None else ended
    if failed > now:  # the operator's clock is wrong
        return replace(new, failures=failures, failed=now, due=now, replaces=last)
    return replace(new, failures=failures, failed=failed, due=failed + back_off(failures), replaces=last)


def _last(job: model.Job, pods: list[model.Pod]) -> model.Pod:
    """Return the newest pod of one index: by creation time and, because times are coarse, by replacement."""
    by_name = {pod.name: pod for pod in pods}
    last = max(pods, key=lambda pod: (pod.created, pod.uid))
    while (successor := by_name.pop(pod_name(job.name, job.uid, last.index, last.uid), None)) is not None:
        last = successor
    return last


def _by_our_clock(time: float | None, pod: model.Pod, now: float) -> float:
    """Return a time by the node's clock if it is plausible; else the pod's creation, by the API server's clock."""
    return time if time is not None and pod.created <= time <= now else pod.created


def _left(pod: model.Pod) -> bool:
    """Return whether the pod left or was deleted before it ended by itself."""
    if pod_end(pod) is not model.PodEnd.LEFT:
        return False
    return not pod.phase.ended or pod.exit_code in {None, ExitCode.SUCCEEDED, *LEFT_CODES}


def _obsolete(ended: Sequence[model.Pod], missing: Iterable[model.NewPod]) -> tuple[model.Pod, ...]:
    """Return the ended pods that are no longer needed.

    The last pod of an empty index is kept: its successor's name and back-off derive from it. A replaced pod with a
    running sidecar is not kept for its log.
    """
    replaced = _without(ended, [new.replaces for new in missing if new.replaces is not None])
    finished = [pod for pod in replaced if not pod.sidecars_running]
    finished.sort(key=lambda pod: (pod.ended or 0.0, pod.created, pod.name), reverse=True)
    kept = max(ENDED_PODS_KEPT - (len(ended) - len(replaced)), 0)
    return (*(pod for pod in replaced if pod.sidecars_running), *finished[kept:])


def _resume_record(status: JobStatus, breakdown: TimeBreakdown | None) -> ResumeRecord | None:
    """Return the state of the run for new agents, whose store may be empty; None for a new run."""
    known = ResumeRecord(
        round=status.round,
        restarts=status.restarts,
        uncharged_restarts=status.uncharged_restarts,
        time_breakdown=breakdown,
    )
    return known if known != ResumeRecord() else None


def _without(pods: Iterable[model.Pod], others: Iterable[model.Pod]) -> tuple[model.Pod, ...]:
    uids = {pod.uid for pod in others}
    return tuple(pod for pod in pods if pod.uid not in uids)
