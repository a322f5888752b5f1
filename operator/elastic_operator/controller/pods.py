"""Plans the pods of a job: the size that the agents get, the pods to delete, and the pods to create.

The annotations of a pod contain the size with which it was started. A later size is written to the store, with the
names of the draining pods, before a pod is changed, so that the agents form one round without the draining pods. The
known sizes are observed in the store and on the pods; the highest generation counts.

The size does not include the spares, so the agents choose which pods train and which stand by. No index belongs to the
spares: if one has taken the place of a lost pod, the pod that is created next stands by.

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

from elastic_operator.api.json_values import rfc3339
from elastic_operator.controller import model
from elastic_operator.controller.failures import pod_end
from torchelastic.protocol.pod import LEFT_CODES, ExitCode
from torchelastic.protocol.records import NUMBER_STEP, ResumeRecord, SizeRecord, TimeBreakdown, name_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from elastic_operator.api.status import JobStatus

LONGEST_BACK_OFF: Final = 60.0
"""Maximum number of seconds by which repeated failures delay the creation of a pod's successor."""

HEALTHY_TIME: Final = 60.0
"""Seconds without a failure, excluding back-off, after which the next failure of an index counts as the first."""

ENDED_PODS_KEPT: Final = 3
"""Maximum number of replaced pods per job that are kept for their logs."""

_SUFFIX_LENGTH: Final = 5
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""No vowels, and no characters that look alike."""


def plan_pods(
    snapshot: model.Snapshot, failures: model.FailureCount, breakdown: TimeBreakdown | None
) -> model.PlannedPods:
    """Plan the size of the job: announce it to the agents, delete surplus pods, fill empty indices.

    If the spec is invalid, the pods do not change. ``breakdown`` ends with the job's last resumption.
    """
    job, observed, now = snapshot.job, snapshot.observed, snapshot.now
    gone = frozenset([each.pod.uid for each in failures.classified])
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

    ``replaces`` is the UID of the pod that it replaces; empty for the first pod of its index.
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
    highest = max([job.generation, job.status.size_generation, *(size.generation for size in known)]) + NUMBER_STEP
    if stored is not None and stored.generation > highest:
        stored = None  # not from an operator; the agents ignore it, too
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
    surplus = _surplus(snapshot, announced, {pod.uid for pod in unready})
    unaware = any(pod.size is None or pod.size.generation < generation for pod in snapshot.live)
    if not unaware or not snapshot.observed.store_read or (stored is not None and stored.generation >= generation):
        return size, None, surplus
    draining = tuple(sorted(pod.name for pod in surplus))
    return size, msgspec.structs.replace(size, draining=draining), surplus


def _surplus(snapshot: model.Snapshot, announced: Sequence[str], unready: Collection[str]) -> tuple[model.Pod, ...]:
    """Return the pods to delete.

    Pods that are announced as draining come first, because no round includes them; then all but one pod of each index,
    because two operators may have created them; then pods that are not ready; then pods that do not train; then the
    highest indices.
    """
    round = snapshot.observed.round
    members = {name_of(node) for node in round.nodes} if round is not None else set()
    surplus = [pod for pod in snapshot.live if pod.name in announced]
    by_index: dict[int, model.Pod] = {}
    for pod in sorted(snapshot.live, key=lambda pod: (pod.uid in unready, pod.created, pod.uid)):
        if pod.name in announced:
            continue
        if pod.index in by_index:
            surplus.append(pod)
        else:
            by_index[pod.index] = pod
    staying = sorted(by_index.values(), key=lambda pod: (pod.uid not in unready, pod.name in members, -pod.index))
    return (*surplus, *staying[: max(len(staying) - max(snapshot.wanted, 0), 0)])


def _missing_pods(
    snapshot: model.Snapshot, staying: Sequence[model.Pod], deleted: Iterable[model.Pod], new: model.NewPod
) -> tuple[model.NewPod, ...]:
    """Return the missing pods, for the lowest empty indices, each with a name that no other pod has.

    ``deleted`` are live pods that are about to be deleted; ``new`` has the values that the missing pods have in common.
    """
    job, stored = snapshot.job, snapshot.observed.size
    by_index: dict[int, list[model.Pod]] = {}
    for pod in (*snapshot.gone, *(replace(pod, terminating=True) for pod in deleted)):
        by_index.setdefault(pod.index, []).append(pod)
    filled = {pod.index for pod in staying}
    number = max(snapshot.wanted - len(staying), 0)
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
    began, ended = (_plausible_time(time, last, now) for time in (last.started, last.ended))
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


def _plausible_time(time: float | None, pod: model.Pod, now: float) -> float:
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
