"""Where the job's time went, up to when it comes to rest, is resumed, or finishes.

While it runs its leader counts that, and nothing of it is written here. What has passed since the leader's last word,
or since there was one, is added here: so that the sum is what has passed since the job was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.model import JobState
from elastic_operator.names import ConditionType
from torchelastic.contract import COUNT_LIMIT, NodeEnd, RunState, TimeSplit

if TYPE_CHECKING:
    from elastic_operator.model import Job, JobStatus, Observed

_BELIEVED: Final = 3600.0
"""Seconds by which the leader's clock may be ahead of ours; what says more is not believed."""
_STOPPING: Final = 60.0
"""Seconds up to which what follows the leader's last word is the end of its workers: it writes every few seconds, and
agents that are to leave are given about as long. Where more has passed, there was no agent for most of it."""


def at_rest(job: Job, observed: Observed, now: float) -> TimeSplit | None:
    """The time split of a job that comes to rest, which none of its nodes outlives; None where nobody knows it."""
    before = job.status
    never_ran = before.active is None and before.state is not JobState.SUSPENDED
    split = _up_to(job, observed, now, RunState.SUSPENDED if never_ran else RunState.WAITING)
    stayed = 0 if split is None else split.joined - sum(split.gone.values())
    if split is None or stayed <= 0:
        return split
    left = min(split.gone.get(NodeEnd.LEFT, 0) + stayed, COUNT_LIMIT)
    return msgspec.structs.replace(split, gone={**split.gone, NodeEnd.LEFT: left})


def at_a_turn(job: Job, observed: Observed, now: float) -> TimeSplit | None:
    """The time split of a job that is resumed or finishes; None where nobody knows it."""
    return _up_to(job, observed, now, RunState.SUSPENDED if rests(job.status) else RunState.WAITING)


def rests(status: JobStatus) -> bool:
    """Whether the job has come to rest, and was not resumed since."""
    return status.state is JobState.SUSPENDED and any(
        condition.type == ConditionType.SUSPENDED and condition.status for condition in status.conditions
    )


def _up_to(job: Job, observed: Observed, now: float, without_a_leader: RunState) -> TimeSplit | None:
    """What is known, with all that has passed since.

    Args:
        job: with the status that it had.
        observed: what was observed of it.
        now: seconds since the Unix epoch.
        without_a_leader: what it has done since then, if there was no leader.
    """
    known, told = job.status.split, observed.split
    if told is not None and _is_news(job, told, now):
        since = RunState.STOPPING if now - told.until <= _STOPPING else RunState.WAITING
        return _filled(told, since, job.created, now)
    unheard = observed.store_closed and not rests(job.status)
    if unheard or (_has_trained(job.status) if known is None else _has_trained_since(job.status, known)):
        return None  # it has trained, and nobody has told us for how long
    return _filled(known, without_a_leader, job.created, now)


def _is_news(job: Job, told: TimeSplit, now: float) -> bool:
    """Whether this is the word of the job's last leader; what it says may be anything."""
    known = job.status.split
    can_be = told.until <= now + _BELIEVED and sum(told.seconds.values()) <= now - job.created + _BELIEVED
    return can_be and (known is None or told.until > known.until)


def _has_trained(status: JobStatus) -> bool:
    return status.started is not None or status.epoch > 0


def _has_trained_since(status: JobStatus, known: TimeSplit) -> bool:
    """Whether it has trained since its time was written, when it was resumed, or at the latest when it came to rest."""
    if rests(status):
        return False
    return status.world_size > 0 or any(
        condition.type == ConditionType.RUNNING and (condition.status or condition.since > known.until)
        for condition in status.conditions
    )


def _filled(known: TimeSplit | None, state: RunState, created: float, now: float) -> TimeSplit:
    """A time split up to now: what is missing was spent in this state. All in milliseconds, as it is written."""
    split = TimeSplit() if known is None else known
    seconds = {each: round(spent, 3) for each, spent in split.seconds.items()}
    missing = round(now - created - sum(seconds.values()), 3)
    if missing > 0:
        seconds[state] = round(seconds.get(state, 0.0) + missing, 3)
    return TimeSplit(
        until=round(created + sum(seconds.values()), 3),
        seconds=seconds,
        lost=None if split.lost is None else round(split.lost, 3),
        joined=split.joined,
        gone=dict(split.gone),
    )
