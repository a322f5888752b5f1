"""Where a job stands: its status.

The numbers are those that hold once the plan is carried out, so that carrying it out changes nothing in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic_operator.model import JobState
from elastic_operator.names import Reason
from elastic_operator.plan.conditions import conditions_of_resting, conditions_of_running, conditions_of_the_end
from elastic_operator.plan.failures import failure_of, last_failure
from elastic_operator.plan.times import at_a_turn, at_rest, rests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.model import Job, JobStatus, NewPod, Observed, Pod
    from elastic_operator.plan.ending import Ending
    from elastic_operator.plan.places import Vacancy
    from elastic_operator.plan.roster import Roster
    from elastic_operator.plan.terms import Terms
    from elastic_operator.plan.toll import Toll
    from torchelastic.contract import EpochRecord, TimeSplit


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
        backing_off: places that stay empty for a while, since their pods came to nothing.
        held: whether no pod is made because the store can't say whether the run has ended.
        refused: whether no pod is made because the cluster would not take it.
        invalid: what is wrong with the spec; None where nothing is.
        size_generation: of the size that the agents are told.
        writes_replicas: whether the plan changes the spec, and so raises its generation.
        split: where the job's time went, up to its last resumption.
    """

    staying: tuple[Pod, ...]
    gone: tuple[Pod, ...]
    split: TimeSplit | None
    created: tuple[NewPod, ...] = ()
    backing_off: tuple[Vacancy, ...] = ()
    held: bool = False
    refused: bool = False
    invalid: Invalid | None = None
    size_generation: int = 0
    writes_replicas: bool = False


def running_status(job: Job, observed: Observed, toll: Toll, terms: Terms, scene: Scene, now: float) -> JobStatus:
    """The status of a job that goes on."""
    before = job.status
    epoch = observed.epoch
    # What the very first pods are told is said once they are there; what later ones are, when they are to be made.
    told = bool(scene.staying or scene.gone or (before.size_generation and scene.created))
    ready = sum(pod.ready for pod in scene.staying)
    started = before.started
    enough = ready >= job.spec.min_replicas
    # Where the agents' word is kept from us, enough pods that serve are all that we can know of.
    unheard = observed.store_closed and enough
    if started is None and ((epoch is not None and epoch.members) or unheard):
        started = now
    world_size = _world_size(epoch, scene.staying) if epoch is not None else before.world_size
    trains = started is not None and enough and (world_size > 0 or unheard)
    can_have_pods = scene.invalid is None or scene.invalid.reason is Reason.REFUSED
    status = replace(
        _counted(job, observed, toll, scene.gone, now),
        state=JobState.RUNNING if trains else JobState.PENDING if started is None else JobState.WAITING,
        observed_generation=job.generation + (1 if scene.writes_replicas else 0),
        replicas=len(scene.staying) + (len(scene.created) if observed.hindrance is None else 0),
        ready=ready,
        world_size=world_size if ready else 0,
        size_generation=max(before.size_generation, scene.size_generation, 1) if told else before.size_generation,
        started=started,
        active=now if before.active is None and can_have_pods else before.active,
        pinned=terms.pinned,
        split=scene.split,
    )
    return replace(status, conditions=conditions_of_running(job, observed, status, terms, scene, now))


def resting_status(
    job: Job, observed: Observed, toll: Toll, terms: Terms, roster: Roster, now: float, *, unread: bool
) -> JobStatus:
    """The status of a job that is suspended; it comes to rest when nothing runs any more, and nothing is ``unread``."""
    invalid = None if terms.mistake is None else Invalid(Reason.BAD_SPEC, terms.mistake)
    stopping = bool(roster.unfinished)
    unjudged = {pod.uid for pod in toll.unjudged}
    gone = [pod for pod in roster.past + roster.live if pod.uid not in unjudged]
    comes_to_rest = not (stopping or unread or rests(job.status))
    return replace(
        _counted(job, observed, toll, gone, now),
        state=JobState.SUSPENDED,
        observed_generation=job.generation,
        desired=0,
        replicas=0,
        ready=0,
        world_size=0,
        active=None,
        size_generation=max(job.status.size_generation, 1 if gone else 0) if stopping or unread else 0,
        pinned=terms.pinned,
        split=at_rest(job, observed, now) if comes_to_rest else job.status.split,
        conditions=conditions_of_resting(job, observed, invalid, now, stopping=stopping, unread=unread),
    )


def finished_status(job: Job, observed: Observed, toll: Toll, ending: Ending, now: float) -> JobStatus:
    """The status of a job that has just ended; how many pods are left is filled in by whoever clears them away."""
    before = job.status
    counted = _counted(job, observed, replace(toll, charged=()) if ending.told_by_agents else toll, (), now)
    succeeded = ending.state is JobState.SUCCEEDED
    trained = ending.epoch > 0 or (observed.epoch is not None and bool(observed.epoch.members))
    world_size = observed.epoch.world_size if observed.epoch is not None else 0
    return replace(
        counted,
        state=ending.state,
        desired=before.desired or job.spec.desired,
        epoch=max(counted.epoch, ending.epoch),
        world_size=world_size or before.world_size,
        restarts=max(counted.restarts, ending.restarts),
        pod_failures=before.pod_failures if ending.told_by_agents else toll.pod_failures,
        started=now if before.started is None and trained else before.started,
        completed=now,
        split=at_a_turn(job, observed, now),
        last_failure=counted.last_failure if succeeded else failure_of(ending.message, ending.culprit, now),
        conditions=conditions_of_the_end(before, ending, now),
    )


def unless_the_same(before: JobStatus, after: JobStatus, staying: Iterable[Pod]) -> JobStatus | None:
    """The status to write; None where it says nothing new.

    To forget pods that are gone can wait for the next write, and so can that there are some. To forget one that was to
    go and stays can't: should it die, that would pass for accounted.
    """
    remembered = after.accounted <= before.accounted and not any(pod.uid in before.accounted for pod in staying)
    generation = after.size_generation if before.size_generation else 0
    if remembered and replace(after, accounted=before.accounted, size_generation=generation) == before:
        return None
    return after


def _counted(job: Job, observed: Observed, toll: Toll, gone: Iterable[Pod], now: float) -> JobStatus:
    """The status with what has been counted: none of that ever falls."""
    before = job.status
    epoch = observed.epoch
    return replace(
        before,
        desired=job.spec.desired,
        epoch=max(before.epoch, epoch.number if epoch is not None else 0),
        restarts=max(before.restarts, epoch.restarts if epoch is not None else 0),
        free_restarts=max(before.free_restarts, epoch.free if epoch is not None else 0),
        pod_failures=toll.pod_failures,
        accounted=frozenset(pod.uid for pod in gone),
        last_failure=last_failure(job, observed, toll, now),
        excluded=toll.excluded,
    )


def _world_size(epoch: EpochRecord, staying: Iterable[Pod]) -> int:
    """How many workers train in an epoch; none in one of which nobody is left, such as that before a suspension."""
    names = {pod.name for pod in staying}
    return epoch.world_size if any(node.rpartition(".")[0] in names for node in epoch.nodes) else 0
