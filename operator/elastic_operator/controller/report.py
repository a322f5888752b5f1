"""The time breakdown of a job, and the report that remains when the job's store is deleted.

While the job runs, the leader of its agents keeps the time breakdown. When the job is suspended, resumed or finished,
the time since the leader's last record is added in this module, so that the sum is the time since the job's creation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import ConditionType
from elastic_operator.api.status import JobState, JobStatus, Report
from torchelastic.protocol.records import COUNT_LIMIT, DepartureReason, HistoryRecord, RunState, TimeBreakdown

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job, Observed

_MAX_CLOCK_SKEW: Final = 3600.0
"""Seconds by which the leader's clock may be ahead; a record that is further ahead is ignored."""

_STOPPING_TIME: Final = 60.0
"""Maximum number of seconds after the leader's last record that count as stopping; a longer time counts as waiting,
because no agent existed for most of it."""


def breakdown_at_suspension(job: Job, observed: Observed, now: float) -> TimeBreakdown | None:
    """Return the time breakdown of a job whose last pod has gone after a suspension; None if unknown."""
    before = job.status
    never_ran = before.active is None and before.state is not JobState.SUSPENDED
    breakdown = _up_to(job, observed, now, RunState.SUSPENDED if never_ran else RunState.WAITING)
    stayed = 0 if breakdown is None else breakdown.nodes_joined - sum(breakdown.departures.values())
    if breakdown is None or stayed <= 0:
        return breakdown
    left = min(breakdown.departures.get(DepartureReason.LEFT, 0) + stayed, COUNT_LIMIT)
    return msgspec.structs.replace(breakdown, departures={**breakdown.departures, DepartureReason.LEFT: left})


def breakdown_at_change(job: Job, observed: Observed, now: float) -> TimeBreakdown | None:
    """Return the time breakdown of a job that is resumed or finishes; None if unknown."""
    return _up_to(job, observed, now, RunState.SUSPENDED if job.status.suspended else RunState.WAITING)


def has_run_data(observed: Observed) -> bool:
    """Return whether the store has information about the run."""
    return observed.history is not None or observed.time_breakdown is not None


def report_of(job: Job, status: JobStatus, observed: Observed) -> Report:
    """Return the report of a job with this status; the same end always gives the same report."""
    history = observed.history or HistoryRecord()
    breakdown, completed = status.time_breakdown, status.completed
    if completed is not None:
        completed = breakdown.until if breakdown is not None else float(math.floor(completed))
    is_suspended = status.state is JobState.SUSPENDED
    return Report(
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        created=job.created,
        state=status.state,
        completed_at=completed,
        message=status.what_failed if status.state is JobState.FAILED else "",
        time_breakdown=breakdown,
        history=HistoryRecord(created=job.created, rounds=history.rounds),
        outcome=observed.outcome,
        suspensions=(round(breakdown.until, 3),) if is_suspended and breakdown is not None else (),
    )


def _up_to(job: Job, observed: Observed, now: float, without_leader: RunState) -> TimeBreakdown | None:
    """Return the known time breakdown, extended to the present; None if the added time cannot be assigned to a state.

    Args:
        job: the job with the status that was written last.
        observed: the observed state of the job.
        now: seconds since the Unix epoch.
        without_leader: the state to which the added time is assigned if the job had no leader.
    """
    known, latest, before = job.status.time_breakdown, observed.time_breakdown, job.status
    if latest is not None and _is_new(job, latest, now):
        since = RunState.STOPPING if now - latest.until <= _STOPPING_TIME else RunState.WAITING
        return _filled(latest, since, job.created, now)
    has_trained = before.started is not None or before.round > 0
    if known is not None:
        running = before.condition(ConditionType.RUNNING)
        ran_since = running is not None and (running.status or running.since > known.until)
        has_trained = not before.suspended and (before.world_size > 0 or ran_since)
    if has_trained or (observed.store_forbidden and not before.suspended):
        return None  # the job has trained for an unknown time
    return _filled(known, without_leader, job.created, now)


def _is_new(job: Job, latest: TimeBreakdown, now: float) -> bool:
    """Return whether the leader's record is plausible, and newer than the time breakdown in the status."""
    known = job.status.time_breakdown
    plausible = latest.until <= now + _MAX_CLOCK_SKEW
    plausible = plausible and sum(latest.seconds.values()) <= now - job.created + _MAX_CLOCK_SKEW
    return plausible and (known is None or latest.until > known.until)


def _filled(known: TimeBreakdown | None, state: RunState, created: float, now: float) -> TimeBreakdown:
    """Return a time breakdown up to now, rounded to milliseconds: the missing time is added to ``state``."""
    breakdown = TimeBreakdown() if known is None else known
    seconds = {each: round(spent, 3) for each, spent in breakdown.seconds.items()}
    missing = round(now - created - sum(seconds.values()), 3)
    if missing > 0:
        seconds[state] = round(seconds.get(state, 0.0) + missing, 3)
    return TimeBreakdown(
        until=round(created + sum(seconds.values()), 3),
        seconds=seconds,
        lost=None if breakdown.lost is None else round(breakdown.lost, 3),
        nodes_joined=breakdown.nodes_joined,
        departures=dict(breakdown.departures),
    )
