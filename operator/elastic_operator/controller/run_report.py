"""Where a job's time went, and the report that is kept of its run when its store is deleted.

While the job runs, the leader of its agents keeps the time breakdown. When the job is suspended, resumed or finished,
the time since the leader's last record is added here, so that the sum is the time since the job's creation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import ConditionType
from elastic_operator.api.report import Report
from elastic_operator.api.status import JobState
from torchelastic.protocol import COUNT_LIMIT, HistoryRecord, NodeEnd, RunState, TimeBreakdown

if TYPE_CHECKING:
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, Observed

_MAX_CLOCK_SKEW: Final = 3600.0
"""Seconds by which the leader's clock may be ahead; a record that is further ahead is ignored."""

_STOPPING_TIME: Final = 60.0
"""Seconds after the leader's last record that count as stopping its workers; after a longer time, there was no agent
for most of it."""


def breakdown_at_suspension(job: Job, observed: Observed, now: float) -> TimeBreakdown | None:
    """The time breakdown of a job whose last pod has gone after a suspension; None if unknown."""
    before = job.status
    never_ran = before.active is None and before.state is not JobState.SUSPENDED
    breakdown = _up_to(job, observed, now, RunState.SUSPENDED if never_ran else RunState.WAITING)
    stayed = 0 if breakdown is None else breakdown.joined - sum(breakdown.gone.values())
    if breakdown is None or stayed <= 0:
        return breakdown
    left = min(breakdown.gone.get(NodeEnd.LEFT, 0) + stayed, COUNT_LIMIT)
    return msgspec.structs.replace(breakdown, gone={**breakdown.gone, NodeEnd.LEFT: left})


def breakdown_at_change(job: Job, observed: Observed, now: float) -> TimeBreakdown | None:
    """The time breakdown of a job that is resumed or finishes; None if unknown."""
    return _up_to(job, observed, now, RunState.SUSPENDED if job.status.suspended else RunState.WAITING)


def has_news(observed: Observed) -> bool:
    """Whether the store has something to tell of the run."""
    return observed.history is not None or observed.time_breakdown is not None


def report_of(job: Job, status: JobStatus, observed: Observed) -> Report:
    """The report of a job with this status; the same one for the same end, also once the status was read again."""
    history = observed.history or HistoryRecord()
    breakdown, completed = status.time_breakdown, status.completed
    if completed is not None:
        completed = breakdown.until if breakdown is not None else float(math.floor(completed))
    failure = status.last_failure if status.state is JobState.FAILED else None
    return Report(
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        created=job.created,
        state=status.state,
        completed=completed,
        message=failure.message if failure is not None else "",
        time_breakdown=breakdown,
        history=HistoryRecord(created=job.created, rounds=history.rounds, omitted=history.omitted),
        outcome=observed.outcome,
        rested=(round(breakdown.until, 3),) if status.state is JobState.SUSPENDED and breakdown is not None else (),
    )


def _up_to(job: Job, observed: Observed, now: float, without_leader: RunState) -> TimeBreakdown | None:
    """What is known, and the time since then.

    Args:
        job: with the status that was written last.
        observed: what was observed of it.
        now: seconds since the Unix epoch.
        without_leader: what the job did since then, if it had no leader.
    """
    known, told, before = job.status.time_breakdown, observed.time_breakdown, job.status
    if told is not None and _is_new(job, told, now):
        since = RunState.STOPPING if now - told.until <= _STOPPING_TIME else RunState.WAITING
        return _filled(told, since, job.created, now)
    has_trained = before.started is not None or before.round > 0
    if known is not None:
        running = before.condition(ConditionType.RUNNING)
        ran_since = running is not None and (running.status or running.since > known.until)
        has_trained = not before.suspended and (before.world_size > 0 or ran_since)
    if has_trained or (observed.store_forbidden and not before.suspended):
        return None  # it has trained, for an unknown time
    return _filled(known, without_leader, job.created, now)


def _is_new(job: Job, told: TimeBreakdown, now: float) -> bool:
    """Whether this is a plausible record of the job's last leader."""
    known = job.status.time_breakdown
    plausible = told.until <= now + _MAX_CLOCK_SKEW
    plausible = plausible and sum(told.seconds.values()) <= now - job.created + _MAX_CLOCK_SKEW
    return plausible and (known is None or told.until > known.until)


def _filled(known: TimeBreakdown | None, state: RunState, created: float, now: float) -> TimeBreakdown:
    """A time breakdown up to now, in milliseconds: the missing time was spent in this state."""
    breakdown = TimeBreakdown() if known is None else known
    seconds = {each: round(spent, 3) for each, spent in breakdown.seconds.items()}
    missing = round(now - created - sum(seconds.values()), 3)
    if missing > 0:
        seconds[state] = round(seconds.get(state, 0.0) + missing, 3)
    return TimeBreakdown(
        until=round(created + sum(seconds.values()), 3),
        seconds=seconds,
        lost=None if breakdown.lost is None else round(breakdown.lost, 3),
        joined=breakdown.joined,
        gone=dict(breakdown.gone),
    )
