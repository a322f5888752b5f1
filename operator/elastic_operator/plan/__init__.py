"""What is to be done about a job, as a pure function of the job, what was observed of it, and the time.

No I/O, no clock, no logging, and no input for which it raises. It is level-triggered: it asks what is, not what has
happened, and remembers nothing but the status. Carried out, a plan leaves nothing to be done; carried out in part, the
next one does the rest.

==============  ===============================================================================
module          question
==============  ===============================================================================
``roster``      which pods live, which go, which have ended, and what does the end of one mean?
``toll``        what do those that ended cost?
``ending``      has the job ended, and what is cleared away then?
``size``        how many pods should there be, what are the agents told, and which pods go?
``places``      which places are empty, and when are they filled?
``standing``    what does the status say?
``news``        what would a person want to know?
``words``       how are things said?
==============  ===============================================================================
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_operator.model import EtcdState, Plan, Removal
from elastic_operator.names import ConditionType, Reason
from elastic_operator.plan import words
from elastic_operator.plan.ending import clear_away, find_ending
from elastic_operator.plan.news import farewell, news
from elastic_operator.plan.places import find_vacancies, forget
from elastic_operator.plan.roster import Roster
from elastic_operator.plan.size import settle_size
from elastic_operator.plan.standing import Invalid, Scene, finished_status, running_status, unless_the_same
from elastic_operator.plan.toll import take_toll
from elastic_operator.pods import problem_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_operator.model import Job, JobStatus, Observed, Pod
    from elastic_operator.plan.places import Vacancy

__all__ = ["plan"]


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """What is to be done about the job now.

    Args:
        job: the job, with the status that was last written.
        observed: the world as far as the job is concerned.
        now: seconds since the Unix epoch.
    """
    roster = Roster.of(observed)
    if job.deleting:
        return _take_down(roster)
    if job.status.state.finished:
        return _clear(job, job.status, roster, now)

    toll = take_toll(job, roster)
    ending = find_ending(job, observed, roster, toll)
    if ending is not None:
        status = finished_status(job, toll, ending, now)
        return replace(_clear(job, status, roster, now), events=(farewell(status),))

    mistake = problem_of(job.spec)
    if mistake is not None:
        scene = Scene(staying=roster.live, gone=roster.past, invalid=Invalid(Reason.BAD_SPEC, mistake))
        status = running_status(job, observed, toll, scene, now)
        return Plan(
            status=unless_the_same(job.status, status, roster.live),
            events=news(job, observed, status, toll),
            etcd=_is_of_use(observed, roster),
        )

    sizing = settle_size(job, observed, roster)
    staying = _without(roster.live, sizing.going)
    last = roster.last_of_each_place(job, sizing.going)
    vacancies = find_vacancies(staying, job.spec.desired, last, now)
    refused = observed.refusal is not None
    # The run of a job that had pods and has none may have ended while nobody looked: only the store knows.
    held = job.status.size_generation > 0 and not roster.live and not observed.store_read and not refused
    fillable = () if refused else vacancies
    due = tuple(vacancy for vacancy in fillable if vacancy.due <= now and not held)
    later = tuple(vacancy for vacancy in fillable if vacancy.due > now)
    taken = {pod.name for pod in observed.pods}.union(observed.size.going if observed.size is not None else ())
    created = tuple(vacancy.filled(job, sizing.record, taken) for vacancy in due)
    forgotten = forget(roster.ended, vacancies)

    scene = Scene(
        staying=staying,
        gone=roster.past + sizing.going,
        created=created,
        backing_off=later,
        held=held,
        refused=refused,
        invalid=_refusal(job, observed, vacancies),
        size_generation=sizing.record.generation,
        writes_replicas=job.spec.replicas is None,
    )
    status = running_status(job, observed, toll, scene, now)
    return Plan(
        replicas=job.spec.max_replicas if scene.writes_replicas else None,
        status=unless_the_same(job.status, status, staying),
        events=news(job, observed, status, toll, fillable, held=held, now=now),
        etcd=not refused or _is_of_use(observed, roster),
        size=sizing.tell,
        remove=(
            *_removals(sizing.going, f"{job.spec.desired} are wanted"),
            *_removals(forgotten, "it has ended and is not needed any more"),
        ),
        create=created,
        wake_at=min((vacancy.due for vacancy in later), default=None),
    )


def _refusal(job: Job, observed: Observed, vacancies: Sequence[Vacancy]) -> Invalid | None:
    """That the cluster refuses what the spec asks for.

    That of this very spec is remembered until a pod was taken after all, or is not taken for another reason: an
    operator that has just started asks the cluster once more, and that should not be told as news.
    """
    if observed.refusal is not None:
        return Invalid(Reason.REFUSED, words.clause(observed.refusal))
    if vacancies and observed.hindrance is None and job.status.observed_generation == job.generation:
        for condition in job.status.conditions:
            if (condition.type, condition.status, condition.reason) == (ConditionType.INVALID, True, Reason.REFUSED):
                return Invalid(Reason.REFUSED, condition.message)
    return None


def _is_of_use(observed: Observed, roster: Roster) -> bool:
    """Whether a store is kept where no pod can be made: it is not made for nobody."""
    return observed.etcd is not EtcdState.ABSENT or bool(roster.unfinished)


def _clear(job: Job, status: JobStatus, roster: Roster, now: float) -> Plan:
    """Clear away what a finished job leaves, and make nothing ever again."""
    clearance = clear_away(status, roster, now)
    left = _without(roster.live, clearance.remove)
    status = replace(
        status, observed_generation=job.generation, replicas=len(left), ready=sum(pod.ready for pod in left)
    )
    return Plan(
        status=unless_the_same(job.status, status, staying=()),
        etcd=clearance.etcd,
        remove=_removals(clearance.remove, "the job has finished"),
        wake_at=clearance.wake_at,
    )


def _take_down(roster: Roster) -> Plan:
    """Take down a job that is being deleted. Its store stays as long as agents may want to say goodbye there."""
    return Plan(
        etcd=bool(roster.unfinished), remove=_removals(roster.live + roster.lingering, "the job is being deleted")
    )


def _without(pods: Iterable[Pod], going: Iterable[Pod]) -> tuple[Pod, ...]:
    uids = {pod.uid for pod in going}
    return tuple(pod for pod in pods if pod.uid not in uids)


def _removals(pods: Iterable[Pod], reason: str) -> tuple[Removal, ...]:
    return tuple(Removal(name=pod.name, uid=pod.uid, reason=reason) for pod in pods)
