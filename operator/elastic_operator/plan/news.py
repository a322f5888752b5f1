"""The events of a job: what a person would want to know, found by comparing what is with what the status says.

They are told when the status that remembers them has been written: so each is told once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.model import JobEvent, JobState
from elastic_operator.names import ConditionType, EventReason, Reason
from elastic_operator.plan import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_operator.model import Condition, Job, JobStatus, Observed
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
        *_deaths(toll, vacancies, held=held, now=now),
        *_obstacles(job.status, observed, status),
        *_epoch(job, observed, status),
        *_size(job, status),
    )


def farewell(status: JobStatus) -> JobEvent:
    """That a job has ended."""
    if status.state is JobState.SUCCEEDED:
        return JobEvent(
            EventReason.SUCCEEDED, f"succeeded in epoch {status.epoch} after {words.count(status.restarts, 'restart')}"
        )
    return JobEvent(EventReason.FAILED, f"failed: {status.last_failure}", warning=True)


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
    for pod in toll.forgiven:
        reason, fate = (
            (EventReason.POD_DELETED, "was deleted")
            if pod.terminating
            else (EventReason.POD_LEFT, "was asked to leave")
        )
        yield JobEvent(reason, f"{pod.name} {fate}{successors.get(pod.uid, '')}")


def _obstacles(before: JobStatus, observed: Observed, status: JobStatus) -> Iterator[JobEvent]:
    """That no pods can be made: for as long as the spec is as it is, or for now."""
    invalid = _that_hold(status).get(ConditionType.INVALID)
    known = _that_hold(before).get(ConditionType.INVALID)
    if invalid is not None and (known is None or known.message != invalid.message):
        sentence = f"the spec cannot be honoured, and no pod is made of it: {invalid.message}"
        yield JobEvent(EventReason.REFUSED, sentence, warning=True)
    if observed.hindrance is not None and _is_hindered(status) and not _is_hindered(before):
        sentence = f"pods cannot be made for now: {words.clause(observed.hindrance)}"
        yield JobEvent(EventReason.HINDERED, sentence, warning=True)


def _is_hindered(status: JobStatus) -> bool:
    return any(condition.reason == Reason.HINDERED for condition in _that_hold(status).values())


def _that_hold(status: JobStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions if condition.status}


def _epoch(job: Job, observed: Observed, status: JobStatus) -> Iterator[JobEvent]:
    epoch = observed.epoch
    if epoch is None or epoch.number <= job.status.epoch:
        return
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
            warning=epoch.restarts > job.status.restarts,
        )


def _size(job: Job, status: JobStatus) -> Iterator[JobEvent]:
    if job.status.desired not in (0, status.desired):
        yield JobEvent(EventReason.SCALED, f"scaled from {job.status.desired} to {words.count(status.desired, 'pod')}")
