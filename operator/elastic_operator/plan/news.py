"""The events of a job: what a person would want to know, found by comparing what is with what the status says.

They are told when the status that remembers them has been written: so each is told once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.model import JobEvent, JobState
from elastic_operator.names import ConditionType, EventReason, Reason
from elastic_operator.plan import words
from elastic_operator.plan.roster import Verdict, verdict
from torchelastic.contract import EpochReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_operator.model import Condition, Job, JobStatus, Observed, Pod
    from elastic_operator.plan.places import Vacancy
    from elastic_operator.plan.toll import Toll


def news(
    job: Job,
    observed: Observed,
    status: JobStatus,
    toll: Toll,
    vacancies: Sequence[Vacancy] = (),
    *,
    held: bool = False,
    now: float = 0.0,
) -> tuple[JobEvent, ...]:
    """What is new about a job that goes on.

    Args:
        job: with the status as it was.
        observed: what was observed of it.
        status: as it is now.
        toll: the pods that came to their end.
        vacancies: the places that are to be filled again; none where no pod is made.
        held: whether they have to wait for the store.
        now: seconds since the Unix epoch.
    """
    return (
        *_resumption(job.status),
        *_deaths(toll, vacancies, held=held, now=now),
        *_obstacles(job.status, observed, status),
        *_epoch(job, observed, status),
        *_size(job, status),
    )


def news_of_resting(job: Job, status: JobStatus, toll: Toll) -> tuple[JobEvent, ...]:
    """What is new about a job that is suspended; ``status`` is the new one."""
    suspended = job.status.state is not JobState.SUSPENDED
    had_pods = ": its pods are asked to leave" if job.status.replicas else ""
    return (
        *_deaths(toll, (), held=False, now=0.0),
        *((JobEvent(EventReason.SUSPENDED, f"suspended{had_pods}"),) if suspended else ()),
        *_bad_spec(job.status, status),
    )


def farewell(status: JobStatus) -> JobEvent:
    """That a job has ended."""
    if status.state is JobState.SUCCEEDED:
        return JobEvent(
            EventReason.SUCCEEDED, f"succeeded in epoch {status.epoch} after {words.count(status.restarts, 'restart')}"
        )
    why = status.last_failure.message if status.last_failure is not None else ""
    return JobEvent(EventReason.FAILED, f"failed: {why}", warning=True)


def _resumption(before: JobStatus) -> Iterator[JobEvent]:
    if before.state is JobState.SUSPENDED:
        since = f" after epoch {before.epoch}" if before.epoch > 0 else ""
        yield JobEvent(EventReason.RESUMED, f"resumed{since}")


def _deaths(toll: Toll, vacancies: Sequence[Vacancy], *, held: bool, now: float) -> Iterator[JobEvent]:
    successors: dict[str, str] = {}
    for vacancy in vacancies:
        if vacancy.replaces is None:
            continue
        wait = vacancy.due - now
        when = " once the store can be read" if held else f" in {wait:.0f} s" if wait >= 1 else ""
        successors[vacancy.replaces.uid] = f"; a new pod takes its place{when}"
    for pod in toll.charged:
        message = f"{pod.name} {words.death(pod)}{successors.get(pod.uid, '')}"
        yield JobEvent(EventReason.POD_DIED, message, warning=True)
    for pod in toll.ignored:
        message = f"{pod.name} {words.death(pod)}, which the failure policy ignores{successors.get(pod.uid, '')}"
        yield JobEvent(EventReason.POD_DIED, message, warning=True)
    for pod in toll.forgiven:
        reason, fate = _parting(pod)
        message = f"{pod.name} {fate}{successors.get(pod.uid, '')}"
        yield JobEvent(reason, message, warning=reason is EventReason.POD_DIED)
    for node, pod in toll.shunned:
        message = f"later pods keep away from the node {node}, where {pod.name} {words.death(pod)}"
        yield JobEvent(EventReason.NODE_EXCLUDED, message, warning=True)


def _parting(pod: Pod) -> tuple[EventReason, str]:
    if pod.fate is not None:
        return EventReason.POD_DISRUPTED, words.fate(pod)
    if verdict(pod) is Verdict.SPARED:
        return EventReason.POD_DIED, words.death(pod)
    return (EventReason.POD_DELETED, "was deleted") if pod.terminating else (EventReason.POD_LEFT, "was asked to leave")


def _obstacles(before: JobStatus, observed: Observed, status: JobStatus) -> Iterator[JobEvent]:
    """What keeps pods from being made, or from being made as the spec says."""
    yield from _bad_spec(before, status)
    if (changes := _newly_said(before, status, ConditionType.CHANGES_WAITING)) is not None:
        yield JobEvent(EventReason.CHANGES_WAITING, changes)
    if observed.hindrance is not None and _is_hindered(status) and not _is_hindered(before):
        what = "pods" if status.replicas < status.desired else "not all that the job needs"
        can = "cannot" if what == "pods" else "can"
        sentence = f"{what} {can} be made for now: {words.clause(observed.hindrance)}"
        yield JobEvent(EventReason.HINDERED, sentence, warning=True)
    if ConditionType.STORE_UNREACHABLE in (now := _that_hold(status)) and (
        ConditionType.STORE_UNREACHABLE not in _that_hold(before)
    ):
        sentence = f"the operator cannot use the store: {now[ConditionType.STORE_UNREACHABLE].message}"
        yield JobEvent(EventReason.STORE_UNREACHABLE, sentence, warning=True)


def _bad_spec(before: JobStatus, status: JobStatus) -> Iterator[JobEvent]:
    if (mistake := _newly_said(before, status, ConditionType.INVALID)) is not None:
        sentence = f"the spec cannot be honoured, and no pod is made of it: {mistake}"
        yield JobEvent(EventReason.REFUSED, sentence, warning=True)


def _newly_said(before: JobStatus, status: JobStatus, kind: ConditionType) -> str | None:
    """The message of a condition that holds and said something else before, or nothing."""
    holds, held = _that_hold(status).get(kind), _that_hold(before).get(kind)
    return holds.message if holds is not None and (held is None or held.message != holds.message) else None


def _is_hindered(status: JobStatus) -> bool:
    return any(condition.reason == Reason.HINDERED for condition in _that_hold(status).values())


def _that_hold(status: JobStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions if condition.status}


def _epoch(job: Job, observed: Observed, status: JobStatus) -> Iterator[JobEvent]:
    epoch = observed.epoch
    if epoch is None or epoch.number <= job.status.epoch:
        return
    charged = epoch.restarts > job.status.restarts
    failed = charged and epoch.reason is EpochReason.WORKER_FAILED
    if charged and not failed and epoch.failure is not None:
        yield JobEvent(EventReason.WORKER_FAILED, words.describe(epoch.failure), warning=True)
    if not epoch.members:
        yield JobEvent(
            EventReason.PAUSED, f"nobody trains now: {epoch.cause or 'too few nodes are there'}", warning=True
        )
    elif job.status.started is None:
        yield JobEvent(
            EventReason.STARTED,
            f"training started with {words.count(len(epoch.members), 'pod')} and world size {status.world_size}",
        )
    else:
        because = f": {epoch.cause}" if epoch.cause else ""
        yield JobEvent(
            EventReason.EPOCH,
            f"epoch {epoch.number} with world size {epoch.world_size}{because}",
            warning=failed,
        )


def _size(job: Job, status: JobStatus) -> Iterator[JobEvent]:
    if job.status.desired not in (0, status.desired):
        yield JobEvent(EventReason.SCALED, f"scaled from {job.status.desired} to {words.count(status.desired, 'pod')}")
