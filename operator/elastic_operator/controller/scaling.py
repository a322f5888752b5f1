"""How many pods there should be: what the agents are told, which pods are deleted, and which indices are filled.

The first size travels with the pods. A later one is written to the store before a pod is changed, with the names of
the draining pods, so that the agents form one round without them. The known sizes are observed in the store and on the
pods; the highest generation counts.

A pod that was deleted is replaced at once. One that failed is too, the first time; then its index waits longer each
time, and starts over after :data:`HEALTHY_TIME`. The number and the time of the failures travel with the pods.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, pod_name
from elastic_operator.api.wire import rfc3339
from elastic_operator.controller import messages
from elastic_operator.controller.model import EtcdState, NewPod
from elastic_operator.controller.pods import PodEnd, pod_end, without
from torchelastic.protocol import ExitCode, ResumeRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, Observed, Pod
    from elastic_operator.controller.pods import Snapshot
    from torchelastic.protocol import TimeBreakdown

LONGEST_BACK_OFF: Final = 60.0
"""Seconds that an index waits at most."""

HEALTHY_TIME: Final = 60.0
"""Seconds without a failure, back-off aside, after which the next failure of an index counts as its first."""

ENDED_PODS_KEPT: Final = 3
"""Ended pods that are kept for their logs although they were replaced, per job."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What follows from the wanted size.

    Attributes:
        record: what new pods are started with.
        announce: what to write into the store; None if that is not needed, or not possible now.
        surplus: pods to delete, as there are too many.
    """

    record: SizeRecord
    announce: SizeRecord | None
    surplus: tuple[Pod, ...]


def settle_size(snapshot: Snapshot) -> Sizing:
    """Compare the size that the agents know with the wanted one."""
    job, spec, pods, stored = snapshot.job, snapshot.spec, snapshot.pods, snapshot.observed.size
    known = [pod.size for pod in pods.live + pods.gone if pod.size is not None]
    if stored is not None:
        known.append(stored)
    newest = max((size.generation for size in known), default=0)
    agreed = bool(known) and all(
        (size.min, size.max, size.desired) == (spec.min_replicas, spec.max_replicas, spec.desired)
        for size in known
        if size.generation == newest
    )
    # A size may have been announced to a store that cannot be read now: a new generation exceeds that, too.
    generation = max(newest if agreed else max(newest + 1, job.generation), job.status.size_generation)
    stored_generation = stored.generation if stored is not None else 0
    announced = stored.draining if agreed and stored is not None and stored_generation == newest else ()
    surplus = _surplus(pods.live, spec.desired, announced)
    unaware = any(pod.size is None or pod.size.generation < generation for pod in pods.live)
    tell = unaware and snapshot.observed.store_read and stored_generation < generation

    def size(draining: tuple[str, ...] = ()) -> SizeRecord:
        return SizeRecord(
            generation=generation,
            min=spec.min_replicas,
            max=spec.max_replicas,
            desired=spec.desired,
            draining=draining,
        )

    draining = tuple(sorted(pod.name for pod in surplus))
    return Sizing(size(), size(draining) if tell else None, surplus)


def etcd_comes_first(observed: Observed) -> bool:
    """Whether the pod of the job's etcd cannot be created, for example because of a quota that workers would use up."""
    return observed.etcd_blocked and observed.etcd is not EtcdState.READY


def yield_to_etcd(snapshot: Snapshot, staying: Sequence[Pod]) -> tuple[Pod, ...]:
    """The pods above the minimum that make room for the etcd pod, highest index first.

    Only before the job has ever trained: no pod is of use without the store then.
    """
    if snapshot.before.started is not None or not etcd_comes_first(snapshot.observed):
        return ()
    by_use = sorted(staying, key=lambda pod: (pod.ready, -pod.index))
    return tuple(by_use[: max(len(staying) - snapshot.spec.min_replicas, 0)])


def _surplus(live: Sequence[Pod], desired: int, announced: Sequence[str]) -> tuple[Pod, ...]:
    """The pods to delete.

    First those that are announced as draining, as no round includes them; then the younger one of two with the same
    index, which two operators at once may have created; then pods that are not ready, then the highest indices.
    """
    surplus = [pod for pod in live if pod.name in announced]
    by_index: dict[int, Pod] = {}
    others = (pod for pod in live if pod.name not in announced)
    for pod in sorted(others, key=lambda pod: (not pod.ready, pod.created, pod.uid)):
        if pod.index in by_index:
            surplus.append(pod)
        else:
            by_index[pod.index] = pod
    staying = sorted(by_index.values(), key=lambda pod: (pod.ready, -pod.index))
    return (*surplus, *staying[: max(len(staying) - max(desired, 0), 0)])


@dataclass(frozen=True, slots=True)
class EmptySlot:
    """An index without a live pod.

    Attributes:
        index: the index.
        failures: how many of its pods failed in a row.
        failed: when the last of them did; None if none has.
        due: when it may be filled; seconds since the Unix epoch.
        replaces: the last pod of the index, if it still exists.
    """

    index: int
    failures: int = 0
    failed: float | None = None
    due: float = 0.0
    replaces: Pod | None = None

    @property
    def history(self) -> str:
        """What became of its pods, to follow its name: "failed 3 times in a row"."""
        often = f"{messages.count(self.failures, 'time')} in a row"
        if self.replaces is None or not _left(self.replaces):
            return f"failed {often}"
        return f"was deleted {often} before it ran" if self.replaces.terminating else f"was asked to leave {often}"


def find_empty_slots(
    staying: Sequence[Pod], desired: int, last: Mapping[int, Pod], now: float, *, grown: int = 0
) -> tuple[EmptySlot, ...]:
    """As many of the lowest empty indices as pods are missing.

    Args:
        staying: the live pods, of any index.
        desired: how many pods there should be.
        last: by index, its last pod.
        now: seconds since the Unix epoch.
        grown: by how many pods the job grows now; deleted pods of these indices were not wanted.
    """
    taken = {pod.index for pod in staying}
    missing = max(desired - len(staying), 0)
    empty = itertools.islice((index for index in itertools.count() if index not in taken), missing)
    return tuple(
        _empty_slot(index, last.get(index), now, wanted=position < missing - grown)
        for position, index in enumerate(empty)
    )


def fill(
    snapshot: Snapshot,
    slots: Iterable[EmptySlot],
    size: SizeRecord,
    *,
    resume: ResumeRecord | None,
    excluded: tuple[str, ...],
) -> tuple[NewPod, ...]:
    """The pods for these slots.

    Args:
        snapshot: the input of the plan.
        slots: the slots that are due.
        size: what the pods are started with.
        resume: what their agents know of the run.
        excluded: nodes that they keep away from.
    """
    job, stored = snapshot.job, snapshot.observed.size
    taken = {pod.name for pod in snapshot.observed.pods}.union(stored.draining if stored is not None else ())
    # After a suspension names differ, as the last round may still name the former pods.
    active = snapshot.now if job.status.active is None else job.status.active
    first = rfc3339(active) if was_suspended(job.status) else ""
    return tuple(
        NewPod(
            name=_free_name(job, slot, first, taken),
            index=slot.index,
            size=size,
            failures=slot.failures,
            failed=slot.failed,
            resume=resume,
            excluded=excluded,
        )
        for slot in slots
    )


def resume_record(status: JobStatus, breakdown: TimeBreakdown | None, *, remembered: bool) -> ResumeRecord | None:
    """What new agents have to know of the run so far, as their store may be a new one.

    Args:
        status: of the job.
        breakdown: where its time went.
        remembered: whether live pods know the run, and can write it to a store that lost it.
    """
    if remembered and not was_suspended(status):
        return None
    known = ResumeRecord(
        round=status.round,
        restarts=status.restarts,
        uncharged_restarts=status.uncharged_restarts,
        time_breakdown=breakdown,
    )
    return known if known != ResumeRecord() else None


def was_suspended(status: JobStatus) -> bool:
    """Whether the job has ever been suspended."""
    return status.condition(ConditionType.SUSPENDED) is not None


def pods_to_delete(ended: Sequence[Pod], slots: Sequence[EmptySlot]) -> tuple[Pod, ...]:
    """Ended pods that need not be kept any longer.

    The last pod of an empty index is kept, as its successor's name and back-off derive from it. A replaced pod with a
    running sidecar is not kept for its log.
    """
    needed = [slot.replaces for slot in slots if slot.replaces is not None]
    replaced = without(ended, needed)
    finished = [pod for pod in replaced if not pod.sidecars_running]
    finished.sort(key=lambda pod: (pod.ended or 0.0, pod.created, pod.name), reverse=True)
    kept = max(ENDED_PODS_KEPT - (len(ended) - len(replaced)), 0)
    return (*(pod for pod in replaced if pod.sidecars_running), *finished[kept:])


def back_off(failures: int) -> float:
    """Seconds to wait after this many failures in a row: 0, 1, 2, 4 … 60."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 16), LONGEST_BACK_OFF)


def _empty_slot(index: int, last: Pod | None, now: float, *, wanted: bool) -> EmptySlot:
    if last is None:
        return EmptySlot(index)
    began, ended = (_by_our_clock(time, last, now) for time in (last.started, last.ended))
    healthy_since = began if last.failed is None else min(began, last.failed + back_off(last.failures))
    was_healthy = (now if last.ended is None else ended) - healthy_since >= HEALTHY_TIME
    before = 0 if was_healthy else max(last.failures, 0)
    has_run = last.started is not None or last.exit_code is not None
    gave_way = has_run and (last.terminating or last.termination_cause is not None)
    if _left(last) and (gave_way or not wanted):
        return EmptySlot(index, before, last.failed if before else None, replaces=last)
    failures = before + 1
    failed = began if last.ended is None else ended
    if failed > now:  # this clock is wrong
        return EmptySlot(index, failures, now, now, last)
    return EmptySlot(index, failures, failed, failed + back_off(failures), last)


def _by_our_clock(time: float | None, pod: Pod, now: float) -> float:
    """A time by the node's clock if it is plausible; else the pod's creation, by the API server's clock."""
    return time if time is not None and pod.created <= time <= now else pod.created


def _left(pod: Pod) -> bool:
    """Whether the pod left or was deleted before it ended by itself."""
    if pod_end(pod) is not PodEnd.LEFT:
        return False
    asked_to = (None, ExitCode.SUCCEEDED, ExitCode.INTERRUPTED, ExitCode.LEFT)
    return not pod.phase.ended or pod.exit_code in asked_to


def _free_name(job: Job, slot: EmptySlot, first: str, taken: Collection[str]) -> str:
    name = pod_name(job.name, job.uid, slot.index, slot.replaces.uid if slot.replaces is not None else first)
    while name in taken:
        name = pod_name(job.name, job.uid, slot.index, name)
    return name
