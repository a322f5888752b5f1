"""What the pods of the job are made from: the spec as it was when the job was started or resumed.

It binds as soon as there is a pod, or training has begun. Until then a spec that turned out to be wrong may be mended,
and afterwards while the job is suspended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.model import JobState
from elastic_operator.pinned import changed, effective, pin
from elastic_operator.pods import problem_of

if TYPE_CHECKING:
    from elastic_operator.model import Job
    from elastic_operator.plan.roster import Roster
    from elastic_operator.spec import ElasticJobSpec, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for a job.

    Attributes:
        spec: the spec that holds.
        pinned: what the status is to say of it; None where nothing binds.
        changes: the fields in which the user's spec is another.
        mistake: why no pod can be made of it, in words; None where one can.
        flaw: the same of the user's spec, where that is another or says what has no effect.
    """

    spec: ElasticJobSpec
    pinned: Json | None
    changes: tuple[str, ...] = ()
    mistake: str | None = None
    flaw: str | None = None


def settle_terms(job: Job, roster: Roster, *, resting: bool, in_doubt: bool) -> Terms:
    """What holds for a job that has not ended.

    Args:
        job: as the user has it now.
        roster: its pods.
        resting: whether it is suspended, or has not come to rest since it was.
        in_doubt: whether its store, which is part of the terms, has still to be read.
    """
    if resting:
        # What is there goes as it came, and its store is the one that it knew.
        pinned = job.status.pinned if roster.unfinished or in_doubt else None
        return Terms(spec=effective(job.spec, pinned), pinned=pinned, mistake=problem_of(job.spec))
    pinned = job.status.pinned
    if pinned is None or not _binds(job, roster):
        mistake = problem_of(job.spec)
        return Terms(spec=job.spec, pinned=None if mistake else pin(job.spec), mistake=mistake)
    spec = effective(job.spec, pinned)
    changes = changed(job.spec, pinned)
    mistake = problem_of(spec)
    flaw = problem_of(job.spec) if changes or mistake is None else None
    return Terms(spec=spec, pinned=pinned, changes=changes, mistake=mistake, flaw=flaw)


def _binds(job: Job, roster: Roster) -> bool:
    """Whether what is pinned still holds.

    Once the job was suspended it does only where a pod was never asked to go.
    """
    if is_resumed(job):
        return bool(roster.live)
    return bool(roster.live or roster.past) or job.status.size_generation > 0


def has_to_rest(job: Job, roster: Roster, *, in_doubt: bool) -> bool:
    """Whether a job that was resumed has to come to rest before it goes on.

    Where its store has still to say how the run stands, or is not the one that the spec names by now, that store is
    given up first.
    """
    if roster.live or not is_resumed(job):
        return False
    return in_doubt or effective(job.spec, job.status.pinned).etcd != job.spec.etcd


def is_resumed(job: Job) -> bool:
    """Whether the user has just taken back that it is suspended."""
    return job.status.state is JobState.SUSPENDED and not job.spec.suspend
