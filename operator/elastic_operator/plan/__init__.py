"""What is to be done about a job, as a pure function of the job, what was observed of it, and the time.

No I/O, no clock, no logging, and no input for which it raises. It is level-triggered: it asks what is, not what has
happened, and remembers nothing but the status. Carried out, a plan leaves nothing to be done; carried out in part, the
next one does the rest.

==============  ===============================================================================
module          question
==============  ===============================================================================
``roster``      which pods live, which go, which have ended, and what does the end of one mean?
``terms``       what are the pods made from, and can any be made of it?
``policy``      what does the user want to follow from the end of a pod?
``toll``        what do those that ended cost?
``doubt``       what is not known before the store has been read?
``ending``      has the job ended?
``clearing``    what is cleared away then?
``size``        how many pods should there be, what are the agents told, and which pods go?
``places``      which places are empty, and when are they filled?
``times``       where did the job's time go?
``keeping``     what is kept of the run when its store goes?
``standing``    what does the status say?
``conditions``  what holds of the job, and why?
``failures``    what failed last?
``news``        what would a person want to know?
``words``       how are things said?
==============  ===============================================================================
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.model import EtcdState, Plan, Removal
from elastic_operator.names import ConditionType, Reason
from elastic_operator.plan import words
from elastic_operator.plan.clearing import clear_away
from elastic_operator.plan.doubt import PATIENCE, is_in_doubt, keeps_from_rest
from elastic_operator.plan.ending import deadline_of, find_ending
from elastic_operator.plan.keeping import report_at_rest, report_at_the_end
from elastic_operator.plan.news import farewell, news, news_of_resting
from elastic_operator.plan.places import find_vacancies, forget
from elastic_operator.plan.roster import Roster
from elastic_operator.plan.size import giving_way, settle_size, store_comes_first
from elastic_operator.plan.standing import (
    Invalid,
    Scene,
    finished_status,
    resting_status,
    running_status,
    unless_the_same,
)
from elastic_operator.plan.terms import has_to_rest, settle_terms
from elastic_operator.plan.times import at_a_turn
from elastic_operator.plan.toll import take_toll
from elastic_operator.spec import MANAGER
from elastic_operator.status_json import rfc3339
from torchelastic.contract import ResumeRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_operator.model import Job, JobStatus, Observed, Pod
    from elastic_operator.plan.places import Vacancy
    from elastic_operator.plan.terms import Terms
    from elastic_operator.plan.toll import Toll
    from torchelastic.contract import TimeSplit

__all__ = ["plan"]

_AT_ONCE: Final = 0.1
"""Seconds after which a job goes on that was resumed before it had come to rest, once it has."""


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """What is to be done about the job now.

    Args:
        job: the job, with the status that was last written.
        observed: the world as far as the job is concerned.
        now: seconds since the Unix epoch.
    """
    if job.spec.managed_by != MANAGER:
        return Plan(hands_off=True)
    roster = Roster.of(observed)
    if job.deleting:
        return _take_down(roster)
    if job.status.state.finished:
        return _clear(job, job.status, observed, roster, now)

    in_doubt = is_in_doubt(job, observed, roster)
    resting = job.spec.suspend or has_to_rest(job, roster, in_doubt=in_doubt)
    until = keeps_from_rest(job, observed, roster, now) if resting else None
    if resting:
        in_doubt = until is not None
    terms = settle_terms(job, roster, resting=resting, in_doubt=in_doubt)
    job = replace(job, spec=terms.spec)
    toll = take_toll(job, observed, roster, now)
    ending = find_ending(job, observed, roster, toll, now)
    if ending is not None:
        status = finished_status(job, observed, toll, ending, now)
        return replace(_clear(job, status, observed, roster, now), events=(farewell(status),))
    if resting:
        return _rest(job, observed, roster, toll, terms, until, now)
    if terms.mistake is not None:
        return _leave_as_it_is(job, observed, roster, toll, terms, now)
    return _go_on(job, observed, roster, toll, terms, now, in_doubt=in_doubt)


def _rest(
    job: Job, observed: Observed, roster: Roster, toll: Toll, terms: Terms, until: float | None, now: float
) -> Plan:
    """Free all that a suspended job has, or one that was resumed before it had come to rest.

    Its store stays as long as agents may want to say goodbye there, and until it has said, or that time has come,
    whether the run has ended.
    """
    unread = not roster.unfinished and (until is not None or bool(toll.unjudged))
    stays = job.spec.suspend or unread or bool(roster.unfinished)
    status = resting_status(job, observed, toll, terms, roster, now, unread=unread)
    at_rest = not roster.unfinished and not unread
    return Plan(
        report=report_at_rest(job, status, observed) if at_rest else None,
        status=unless_the_same(job.status, status, staying=()),
        events=news_of_resting(job, status, toll),
        etcd=observed.etcd is not EtcdState.ABSENT and not at_rest,
        remove=_removals(_without(roster.live + roster.ended, toll.unjudged), "the job is suspended"),
        wake_at=_next_time(until, toll.judged_at, None if stays else now + _AT_ONCE, now=now),
    )


def _leave_as_it_is(job: Job, observed: Observed, roster: Roster, toll: Toll, terms: Terms, now: float) -> Plan:
    """Do nothing for a job whose spec can't be meant, until it is mended; what runs goes on."""
    invalid = Invalid(Reason.BAD_SPEC, terms.mistake or "")
    scene = Scene(
        staying=roster.live, gone=_without(roster.past, toll.unjudged), split=job.status.split, invalid=invalid
    )
    status = running_status(job, observed, toll, terms, scene, now)
    return Plan(
        status=unless_the_same(job.status, status, roster.live),
        events=news(job, observed, status, toll),
        etcd=_is_of_use(observed, roster),
        together=_together(job) if roster.live else None,
        guarded=_guarded(job) if roster.live else None,
        wake_at=_next_time(*_deadlines(status, job), toll.judged_at, now=now),
    )


def _go_on(
    job: Job, observed: Observed, roster: Roster, toll: Toll, terms: Terms, now: float, *, in_doubt: bool
) -> Plan:
    """Bring the job to its size: tell the agents, remove pods that are too many, fill the empty places."""
    sizing = settle_size(job, observed, roster)
    yielding = giving_way(job, observed, _without(roster.live, sizing.going))
    going = sizing.going + yielding
    staying = _without(roster.live, going)
    last = roster.last_of_each_place(job, going)
    grown = max(job.spec.desired - job.status.desired, 0)
    vacancies = find_vacancies(staying, job.spec.desired, last, now, grown=grown)
    refused = observed.refusal is not None
    held = (in_doubt or toll.may_be_the_end) and not refused
    fillable = () if refused or store_comes_first(observed) else vacancies
    due = tuple(vacancy for vacancy in fillable if vacancy.due <= now and not held)
    later = tuple(vacancy for vacancy in fillable if vacancy.due > now)
    taken = {pod.name for pod in observed.pods}.union(observed.size.going if observed.size is not None else ())
    split = _split(job, observed, now)
    resume = _resume_record(replace(job.status, split=split), remembered=bool(staying))
    created = tuple(
        vacancy.filled(job, sizing.record, taken, resume=resume, life=_life(job.status, now), excluded=toll.excluded)
        for vacancy in due
    )
    forgotten = _without(forget(roster.ended, vacancies), toll.unjudged)

    scene = Scene(
        staying=staying,
        gone=_without(roster.past, toll.unjudged) + going,
        split=split,
        created=created,
        backing_off=later,
        held=held,
        refused=refused,
        invalid=_refusal(job, observed, vacancies),
        size_generation=sizing.record.generation,
        writes_replicas=job.spec.replicas is None,
    )
    status = running_status(job, observed, toll, terms, scene, now)
    return Plan(
        replicas=job.spec.desired if scene.writes_replicas else None,
        status=unless_the_same(job.status, status, staying),
        events=news(job, observed, status, toll, fillable, held=held, now=now),
        etcd=not refused or _is_of_use(observed, roster),
        together=_together(job),
        guarded=_guarded(job),
        size=sizing.tell,
        remove=(
            *_removals(sizing.going, f"{job.spec.desired} are wanted"),
            *_removals(yielding, "the job's etcd needs its room first"),
            *_removals(forgotten, "it has ended and is not needed any more"),
        ),
        create=created,
        wake_at=_next_time(*(vacancy.due for vacancy in later), *_deadlines(status, job), toll.judged_at, now=now),
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


def _resume_record(status: JobStatus, *, remembered: bool) -> ResumeRecord | None:
    """What agents have to know of the run so far: their store may be a new one, as after a suspension.

    Args:
        status: of the job.
        remembered: whether there are pods that know it, and could give it back to a store that lost it.
    """
    known = ResumeRecord(epoch=status.epoch, restarts=status.restarts, free=status.free_restarts, split=status.split)
    return known if (_was_suspended(status) or not remembered) and known != ResumeRecord() else None


def _split(job: Job, observed: Observed, now: float) -> TimeSplit | None:
    """Where the job's time went before this life of it: all its pods are told the same."""
    is_resumed = job.status.active is None and _was_suspended(job.status)
    return at_a_turn(job, observed, now) if is_resumed else job.status.split


def _life(status: JobStatus, now: float) -> str:
    """Which of the lives between two suspensions it is, in the precision in which the status keeps times."""
    return rfc3339(now if status.active is None else status.active) if _was_suspended(status) else ""


def _was_suspended(status: JobStatus) -> bool:
    return any(condition.type == ConditionType.SUSPENDED for condition in status.conditions)


def _together(job: Job) -> int | None:
    return job.spec.min_replicas if job.spec.scheduling.gang is not None else None


def _guarded(job: Job) -> int | None:
    return job.spec.min_replicas if job.spec.disruption_budget else None


def _deadlines(status: JobStatus, job: Job) -> tuple[float, ...]:
    """When the job has taken as long as it may, and when that is judged in any case."""
    deadline = deadline_of(status, job.spec)
    return () if deadline is None else (deadline, deadline + PATIENCE)


def _is_of_use(observed: Observed, roster: Roster) -> bool:
    """Whether a store is kept where no pod can be made: it is not made for nobody."""
    return observed.etcd is not EtcdState.ABSENT or bool(roster.unfinished)


def _clear(job: Job, status: JobStatus, observed: Observed, roster: Roster, now: float) -> Plan:
    """Clear away what a finished job leaves, and make nothing ever again."""
    clearance = clear_away(job.spec, status, roster, now)
    left = _without(roster.live, clearance.remove)
    status = replace(
        status, observed_generation=job.generation, replicas=len(left), ready=sum(pod.ready for pod in left)
    )
    return Plan(
        report=None if clearance.job else report_at_the_end(job, status, observed),
        status=unless_the_same(job.status, status, staying=()),
        etcd=clearance.etcd,
        remove=_removals(clearance.remove, "the job has finished"),
        delete_job=clearance.job,
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


def _next_time(*times: float | None, now: float) -> float | None:
    """The first of the times that are still to come."""
    return min((time for time in times if time is not None and time > now), default=None)
