"""The number of pods: the size for the agents, the pods to delete, and the indices to fill.

The first size travels with the pods. A later one is written to the store before a pod is changed, with the names of
the draining pods, so that the agents form one round without them. The known sizes are observed in the store and on the
pods; the highest generation counts.

A pod that was deleted is replaced at once. One that failed is too, the first time; then its index waits longer each
time, and starts over after :data:`HEALTHY_TIME`. The number and the time of the failures travel with the pods.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import ConditionType, pod_name
from elastic_operator.api.json_values import rfc3339
from elastic_operator.controller.failures import pod_end
from elastic_operator.controller.model import EtcdState, NewPod, PodEnd, PodPhase, Removal
from torchelastic.protocol import ExitCode, ResumeRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import Job, Pod, Snapshot
    from torchelastic.protocol import TimeBreakdown

LONGEST_BACK_OFF: Final = 60.0
"""Maximum number of seconds that an index waits."""

HEALTHY_TIME: Final = 60.0
"""Seconds without a failure, excluding back-off, after which the next failure of an index counts as the first."""

ENDED_PODS_KEPT: Final = 3
"""Maximum number of replaced pods per job that are kept for their logs."""


@dataclass(frozen=True, slots=True)
class EmptySlot:
    """An index without a live pod.

    Attributes:
        index: the index.
        failures: the number of consecutive failures of its pods.
        failed: when the last of them failed; None if none has failed.
        due: when it may be filled; seconds since the Unix epoch.
        replaces: the last pod of the index, if it still exists.
        left: whether that pod left or was deleted before it ended by itself.
    """

    index: int
    failures: int = 0
    failed: float | None = None
    due: float = 0.0
    replaces: Pod | None = None
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPods:
    """The pods that the job will have after the plan is carried out.

    Attributes:
        staying: live pods that stay.
        gone: UIDs of pods that have ended, terminate, or are deleted now; without those whose failure is pending.
        created: pods that are created now.
        remove: pods that are deleted now.
        slots: the indices to fill, now or later.
        held: whether no pod is created because it is unknown whether the run has ended.
        size: the size that new pods are started with; None if no pod can be created.
        announce: the size to write into the store; None if that is not needed, or not possible now.
    """

    staying: tuple[Pod, ...]
    gone: frozenset[str]
    created: tuple[NewPod, ...] = ()
    remove: tuple[Removal, ...] = ()
    slots: tuple[EmptySlot, ...] = ()
    held: bool = False
    size: SizeRecord | None = None
    announce: SizeRecord | None = None


def plan_pods(snapshot: Snapshot, count: FailureCount, breakdown: TimeBreakdown | None) -> PlannedPods:
    """Plan the size of the job: announce it to the agents, delete surplus pods, fill empty indices.

    If no pods can be made of the spec, the job does not change.

    Args:
        snapshot: the input of the plan.
        count: the pods that ended.
        breakdown: the job's time breakdown up to its last resumption.
    """
    job, observed, now = snapshot.job, snapshot.observed, snapshot.now
    gone = frozenset([each.pod.uid for each in count.judged])
    if job.problem is not None:
        return PlannedPods(staying=snapshot.live, gone=gone)
    size, announce, surplus = _settle_size(snapshot)
    staying = _without(snapshot.live, surplus)
    etcd_waits = observed.etcd_blocked and observed.etcd is not EtcdState.READY
    yielding: tuple[Pod, ...] = ()
    if etcd_waits and job.status.started is None:  # before the job has trained, pods are useless without the store
        by_use = sorted(staying, key=lambda pod: (pod.ready, -pod.index))
        yielding = tuple(by_use[: max(len(staying) - job.spec.min_replicas, 0)])
        staying = _without(staying, yielding)
    slots = _empty_slots(snapshot, staying, surplus + yielding)
    obsolete = [pod for pod in _obsolete(snapshot.ended, slots) if pod.uid not in count.pending]
    held = (snapshot.outcome_unknown or count.may_be_fatal) and observed.rejected is None
    fillable = () if observed.rejected is not None or etcd_waits else slots
    was_suspended = job.status.condition(ConditionType.SUSPENDED) is not None
    # Live pods know the run, and can write it to a store that lost it.
    resume = None if staying and not was_suspended else _resume_record(job.status, breakdown)
    new_pod = NewPod(name="", index=0, size=size, resume=resume, excluded=count.excluded_nodes)
    due = () if held else [slot for slot in fillable if slot.due <= now]
    return PlannedPods(
        staying=staying,
        gone=gone.union([pod.uid for pod in surplus + yielding]),
        created=_fill(snapshot, due, new_pod, was_suspended=was_suspended),
        remove=(
            *removals(surplus, f"{snapshot.desired} are wanted"),
            *removals(yielding, "the job's etcd needs its room first"),
            *removals(obsolete, "it has ended and is not needed any more"),
        ),
        slots=fillable,
        held=held,
        size=size,
        announce=announce,
    )


def removals(pods: Iterable[Pod], reason: str) -> tuple[Removal, ...]:
    """Return the deletions of these pods."""
    return tuple(Removal(name=pod.name, uid=pod.uid, reason=reason) for pod in pods)


def back_off(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row: 0, 1, 2, 4 … 60."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 16), LONGEST_BACK_OFF)


def _settle_size(snapshot: Snapshot) -> tuple[SizeRecord, SizeRecord | None, tuple[Pod, ...]]:
    """Compare the size that the agents know with the desired one.

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
    # A size may have been announced to a store that cannot be read now: a new generation exceeds that, too.
    generation = max(newest if agreed else max(newest + 1, job.generation), job.status.size_generation)
    size = msgspec.structs.replace(size, generation=generation)
    announced = stored.draining if agreed and stored is not None and stored.generation == newest else ()
    # Until the agents have restored a store that lost its data, it does not say which of them are ready.
    is_lost = snapshot.observed.store_read and snapshot.observed.round is None and job.status.round > 0
    unready = [pod for pod in snapshot.live if not (pod.ready or (is_lost and pod.phase is PodPhase.RUNNING))]
    surplus = _surplus(snapshot.live, snapshot.desired, announced, {pod.uid for pod in unready})
    unaware = any(pod.size is None or pod.size.generation < generation for pod in snapshot.live)
    if not unaware or not snapshot.observed.store_read or (stored is not None and stored.generation >= generation):
        return size, None, surplus
    draining = tuple(sorted(pod.name for pod in surplus))
    return size, msgspec.structs.replace(size, draining=draining), surplus


def _surplus(live: Sequence[Pod], desired: int, announced: Sequence[str], unready: Collection[str]) -> tuple[Pod, ...]:
    """Return the pods to delete.

    Pods that are announced as draining come first, because no round includes them; then the younger one of two pods
    with the same index, which two operators may have created; then pods that are not ready, then the highest indices.
    """
    surplus = [pod for pod in live if pod.name in announced]
    by_index: dict[int, Pod] = {}
    for pod in sorted(live, key=lambda pod: (pod.uid in unready, pod.created, pod.uid)):
        if pod.name in announced:
            continue
        if pod.index in by_index:
            surplus.append(pod)
        else:
            by_index[pod.index] = pod
    staying = sorted(by_index.values(), key=lambda pod: (pod.uid not in unready, -pod.index))
    return (*surplus, *staying[: max(len(staying) - max(desired, 0), 0)])


def _empty_slots(snapshot: Snapshot, staying: Sequence[Pod], deleted: Iterable[Pod]) -> tuple[EmptySlot, ...]:
    """Return the lowest empty indices, as many as pods are missing.

    Args:
        snapshot: the input of the plan.
        staying: the live pods that stay, of any index.
        deleted: live pods that are about to be deleted.
    """
    job = snapshot.job
    by_index: dict[int, list[Pod]] = {}
    for pod in (*snapshot.gone, *(replace(pod, terminating=True) for pod in deleted)):
        by_index.setdefault(pod.index, []).append(pod)
    taken = {pod.index for pod in staying}
    missing = max(snapshot.desired - len(staying), 0)
    # Deleted pods with an index that is only needed now, because the job grows, were surplus.
    grown = max(snapshot.desired - job.status.desired, 0)
    slots = []
    for index in itertools.islice((index for index in itertools.count() if index not in taken), missing):
        if (pods := by_index.get(index)) is None:
            slots.append(EmptySlot(index))
        else:
            slots.append(_slot_of(_last(job, pods), snapshot.now, wanted=len(slots) < missing - grown))
    return tuple(slots)


def _slot_of(last: Pod, now: float, *, wanted: bool) -> EmptySlot:
    """Return the slot of an index with this last pod."""
    began, ended = (_by_our_clock(time, last, now) for time in (last.started, last.ended))
    healthy_since = began if last.failed is None else min(began, last.failed + back_off(last.failures))
    was_healthy = (now if last.ended is None else ended) - healthy_since >= HEALTHY_TIME
    before = 0 if was_healthy else max(last.failures, 0)
    has_run = last.started is not None or last.exit_code is not None
    gave_way = has_run and (last.terminating or last.termination_cause is not None)
    left = _left(last)
    if left and (gave_way or not wanted):
        return EmptySlot(last.index, before, last.failed if before else None, replaces=last, left=left)
    failures = before + 1
    failed = began if last.ended is None else ended
    if failed > now:  # this clock is wrong
        return EmptySlot(last.index, failures, now, now, last, left)
    return EmptySlot(last.index, failures, failed, failed + back_off(failures), last, left)


def _last(job: Job, pods: list[Pod]) -> Pod:
    """Return the newest pod of one index: by creation time and, because times are coarse, by replacement."""
    by_name = {pod.name: pod for pod in pods}
    last = max(pods, key=lambda pod: (pod.created, pod.uid))
    while (successor := by_name.pop(pod_name(job.name, job.uid, last.index, last.uid), None)) is not None:
        last = successor
    return last


def _by_our_clock(time: float | None, pod: Pod, now: float) -> float:
    """Return a time by the node's clock if it is plausible; else the pod's creation, by the API server's clock."""
    return time if time is not None and pod.created <= time <= now else pod.created


def _left(pod: Pod) -> bool:
    """Return whether the pod left or was deleted before it ended by itself."""
    if pod_end(pod) is not PodEnd.LEFT:
        return False
    asked_to = (None, ExitCode.SUCCEEDED, ExitCode.INTERRUPTED, ExitCode.LEFT)
    return not pod.phase.ended or pod.exit_code in asked_to


def _obsolete(ended: Sequence[Pod], slots: Sequence[EmptySlot]) -> tuple[Pod, ...]:
    """Return the ended pods that are no longer needed.

    The last pod of an empty index is kept: its successor's name and back-off derive from it. A replaced pod with a
    running sidecar is not kept for its log.
    """
    replaced = _without(ended, [slot.replaces for slot in slots if slot.replaces is not None])
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


def _fill(
    snapshot: Snapshot, slots: Iterable[EmptySlot], new_pod: NewPod, *, was_suspended: bool
) -> tuple[NewPod, ...]:
    """Return the pods for these slots, each with a name that no other pod has."""
    job, stored = snapshot.job, snapshot.observed.size
    taken = {pod.name for pod in snapshot.observed.pods}.union(stored.draining if stored is not None else ())
    # After a suspension names differ, because the last round may still name the former pods.
    active = snapshot.now if job.status.active is None else job.status.active
    first = rfc3339(active) if was_suspended else ""
    created = []
    for slot in slots:
        name = pod_name(job.name, job.uid, slot.index, first if slot.replaces is None else slot.replaces.uid)
        while name in taken:
            name = pod_name(job.name, job.uid, slot.index, name)
        created.append(replace(new_pod, name=name, index=slot.index, failures=slot.failures, failed=slot.failed))
    return tuple(created)


def _without(pods: Iterable[Pod], others: Iterable[Pod]) -> tuple[Pod, ...]:
    """Return the pods that are not among the others."""
    uids = {pod.uid for pod in others}
    return tuple(pod for pod in pods if pod.uid not in uids)
