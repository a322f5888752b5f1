"""Where a job stands: its status, with conditions that say why.

The numbers are those that hold once the plan is carried out, so that carrying it out changes nothing in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.model import Condition, JobState
from elastic_operator.names import ConditionType, Reason, hostname
from elastic_operator.plan import words
from elastic_operator.status_json import rfc3339
from torchelastic.contract import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.model import Job, JobStatus, NewPod, Observed, Pod
    from elastic_operator.plan.ending import Ending
    from elastic_operator.plan.places import Vacancy
    from elastic_operator.plan.toll import Toll

Verdicts = dict[ConditionType, tuple[bool, Reason, str]]
"""For each condition whether it holds, why, and why in words."""


MESSAGE_LIMIT: Final = 8192
"""Characters; no condition says more, whatever it quotes. The object's schema draws the line above this."""

CAUSES_SHOWN: Final = 3
"""So many different reasons why pods are not ready are told."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """Why the spec cannot be honoured.

    Attributes:
        reason: in a word.
        message: in a sentence.
    """

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the job will have once the plan is carried out.

    Attributes:
        staying: live pods that stay.
        gone: pods that have ended, are going, or go now.
        created: pods that are made now.
        backing_off: places that stay empty for a while after a failure.
        held: whether no pod is made because the store can't say whether the run has ended.
        refused: whether no pod is made because the cluster would not take it.
        invalid: what is wrong with the spec; None where nothing is.
        size_generation: of the size that the agents are told.
        writes_replicas: whether the plan changes the spec, and so raises its generation.
    """

    staying: tuple[Pod, ...]
    gone: tuple[Pod, ...]
    created: tuple[NewPod, ...] = ()
    backing_off: tuple[Vacancy, ...] = ()
    held: bool = False
    refused: bool = False
    invalid: Invalid | None = None
    size_generation: int = 0
    writes_replicas: bool = False


def running_status(job: Job, observed: Observed, toll: Toll, scene: Scene, now: float) -> JobStatus:
    """The status of a job that goes on."""
    before = job.status
    epoch = observed.epoch
    ready = sum(pod.ready for pod in scene.staying)
    started = before.started
    if started is None and epoch is not None and epoch.members:
        started = now
    world_size = epoch.world_size if epoch is not None else before.world_size
    trains = started is not None and ready >= job.spec.min_replicas and world_size > 0
    status = replace(
        before,
        state=JobState.RUNNING if trains else JobState.PENDING if started is None else JobState.WAITING,
        observed_generation=job.generation + (1 if scene.writes_replicas else 0),
        replicas=len(scene.staying) + (len(scene.created) if observed.hindrance is None else 0),
        ready=ready,
        desired=job.spec.desired,
        epoch=max(before.epoch, epoch.number if epoch is not None else 0),
        world_size=world_size if ready else 0,
        restarts=max(before.restarts, epoch.restarts if epoch is not None else 0),
        pod_failures=toll.pod_failures,
        accounted=frozenset(pod.uid for pod in scene.gone),
        size_generation=max(before.size_generation, scene.size_generation),
        started=started,
        last_failure=_last_failure(job, observed, toll),
    )
    return replace(status, conditions=_stamped(before, _conditions(job, observed, status, scene), now))


def finished_status(job: Job, toll: Toll, ending: Ending, now: float) -> JobStatus:
    """The status of a job that has just ended; how many pods are left is filled in by whoever clears them away."""
    before = job.status
    succeeded = ending.state is JobState.SUCCEEDED
    over = (False, ending.reason, "")
    verdicts: Verdicts = {
        ConditionType.RUNNING: over,
        ConditionType.WAITING: over,
        ConditionType.DEGRADED: over,
        ConditionType.SUCCEEDED if succeeded else ConditionType.FAILED: (True, ending.reason, ending.message),
        ConditionType.FINISHED: (True, ending.reason, ending.message),
    }
    return replace(
        before,
        state=ending.state,
        desired=before.desired or job.spec.desired,
        epoch=max(before.epoch, ending.epoch),
        restarts=max(before.restarts, ending.restarts),
        pod_failures=toll.pod_failures if ending.reason is Reason.POD_FAILURES else before.pod_failures,
        accounted=frozenset(),
        completed=now,
        last_failure=before.last_failure if succeeded else shorten(ending.message, MESSAGE_LIMIT),
        conditions=_stamped(before, verdicts, now),
    )


def unless_the_same(before: JobStatus, after: JobStatus, staying: Iterable[Pod]) -> JobStatus | None:
    """The status to write; None where it says nothing new.

    To forget pods that are gone can wait for the next write. To forget one that was to go and stays can't: should it
    die, that would pass for accounted.
    """
    remembered = after.accounted <= before.accounted and not any(pod.uid in before.accounted for pod in staying)
    if remembered and replace(after, accounted=before.accounted) == before:
        return None
    return after


def _last_failure(job: Job, observed: Observed, toll: Toll) -> str:
    if toll.charged:
        last = toll.charged[-1]
        return shorten(f"{last.name} {words.death(last)}", MESSAGE_LIMIT)
    if observed.epoch is not None and observed.epoch.restarts > job.status.restarts:
        return shorten(observed.epoch.cause, MESSAGE_LIMIT)
    return job.status.last_failure


def _conditions(job: Job, observed: Observed, status: JobStatus, scene: Scene) -> Verdicts:
    minimum = job.spec.min_replicas
    verdicts: Verdicts = {}
    hindered = bool(scene.created) and observed.hindrance is not None
    if scene.held:
        unknown = (
            "whether the run has ended is not known while the store cannot be read; no pod is started until it can be"
        )
        # Perhaps it is the store itself that cannot be made.
        because = "" if observed.hindrance is None else words.clause(observed.hindrance)
        waiting = (True, Reason.STORE_UNREADABLE, _sentence(unknown, because))
    elif status.ready < minimum:
        there = f"{status.ready} of at least {words.count(minimum, 'pod')} {'is' if status.ready == 1 else 'are'} ready"
        because = Reason.HINDERED if hindered else Reason.BELOW_MINIMUM
        waiting = (True, because, _sentence(there, _missing(job, observed, scene)))
    else:
        waiting = (False, Reason.ENOUGH_PODS, "")
    if status.state is JobState.RUNNING:
        running = (True, Reason.TRAINING, f"epoch {status.epoch} with world size {status.world_size}")
    elif waiting[0]:
        running = (False, Reason.NOT_STARTED if status.started is None else waiting[1], "")
    else:
        cause = observed.epoch.cause if observed.epoch is not None and not observed.epoch.members else ""
        running = (False, Reason.STARTING, cause or "the agents have not formed an epoch yet")
    verdicts[ConditionType.RUNNING] = running
    verdicts[ConditionType.WAITING] = waiting
    if status.started is not None and status.ready < status.desired:
        there = f"{status.ready} of {words.count(status.desired, 'pod')} ready"
        because = Reason.HINDERED if hindered else Reason.BELOW_DESIRED
        verdicts[ConditionType.DEGRADED] = (True, because, _sentence(there, _missing(job, observed, scene)))
    else:
        reason = Reason.ALL_PODS if status.started is not None else Reason.NOT_STARTED
        verdicts[ConditionType.DEGRADED] = (False, reason, "")
    if scene.invalid is not None:
        verdicts[ConditionType.INVALID] = (True, scene.invalid.reason, scene.invalid.message)
    elif any(condition.type == ConditionType.INVALID for condition in job.status.conditions):
        verdicts[ConditionType.INVALID] = (False, Reason.GOOD_SPEC, "")
    return verdicts


def _sentence(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _missing(job: Job, observed: Observed, scene: Scene) -> str:
    """For which pods the job waits, and why."""
    coming = [(pod.index, pod.name, words.clause(pod.waiting)) for pod in scene.staying if not pod.ready]
    parts = []
    if observed.hindrance is None:
        coming += [(pod.index, pod.name, "") for pod in scene.created]
    elif scene.created:
        names = words.listed([pod.name for pod in scene.created])
        parts.append(f"{names} cannot be made for now: {words.clause(observed.hindrance)}")
    parts += _not_ready(coming)
    if scene.backing_off:
        parts.append(
            words.listed(
                [
                    f"{hostname(job.name, place.index)} failed {words.count(place.failures, 'time')} in a row and is "
                    f"started again at {rfc3339(place.due)}"
                    for place in scene.backing_off
                ]
            )
        )
    if scene.refused:
        parts.append("no more pods are made of this spec, which the cluster refuses")
    return _sentence(*parts)


def _not_ready(coming: Iterable[tuple[int, str, str]]) -> list[str]:
    """Pods that are not ready, those with one cause together: by index, with name and cause."""
    causes: dict[str, list[str]] = {}
    for _, name, cause in sorted(coming):
        causes.setdefault(cause if cause in causes or len(causes) < CAUSES_SHOWN else "", []).append(name)
    return [
        f"{words.listed(names)} {'is' if len(names) == 1 else 'are'} not ready yet{f': {cause}' if cause else ''}"
        for cause, names in causes.items()
    ]


def _stamped(before: JobStatus, verdicts: Verdicts, now: float) -> tuple[Condition, ...]:
    """The conditions, each with the time since which it has its value."""
    known = {condition.type: condition for condition in before.conditions}
    stamped = []
    for kind, (holds, reason, why) in verdicts.items():
        earlier = known.get(kind)
        since = earlier.since if earlier is not None and earlier.status == holds else now
        message = shorten(why, MESSAGE_LIMIT)
        stamped.append(Condition(type=kind, status=holds, reason=reason, message=message, since=since))
    return tuple(stamped)
