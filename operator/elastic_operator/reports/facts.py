"""Derive what a report shows from the kept history: how long rounds lasted, which failures occurred, what they cost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.controller.messages import SIGNAL_BASE, node_name, signal_name
from elastic_operator.views.job_metrics import goodput
from torchelastic.protocol import RoundReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.api.report import Report
    from torchelastic.protocol import FailureRecord, PastRound


@dataclass(frozen=True, slots=True)
class Span:
    """A round and its end, None if the next round was not kept; ``lost`` as in :class:`Failure`."""

    round: PastRound
    end: float | None
    lost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure of a worker, a pod or the job.

    Attributes:
        time: when the next round began, in seconds since the Unix epoch.
        round: 0 if unknown.
        pod: empty if the message has it.
        rank: of the failed worker; None if no worker failed.
        what: how the worker or pod ended.
        lost: seconds of training that no checkpoint held; None if unknown.
        free: whether it is not charged to the job.
        final: whether the job failed because of it.
    """

    time: float
    round: int
    message: str
    pod: str = ""
    rank: int | None = None
    what: str = ""
    lost: float | None = None
    free: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a report shows; ``begin`` and ``end`` of the job are in seconds since the Unix epoch."""

    report: Report
    begin: float
    end: float
    spans: tuple[Span, ...]
    failures: tuple[Failure, ...]

    @property
    def goodput(self) -> float | None:
        """The ratio of kept training to all time; None if unknown."""
        split = self.report.time_breakdown
        return goodput({str(state): spent for state, spent in split.seconds.items()}, split.lost) if split else None

    @property
    def most_workers(self) -> int:
        """Workers of the largest round."""
        return max((span.round.workers for span in self.spans), default=0)


def facts(report: Report) -> Facts:
    """Derive the facts from a report."""
    rounds = report.history.rounds
    times = [
        report.completed,
        report.time_breakdown.until if report.time_breakdown else None,
        *(round.began for round in rounds),
    ]
    end = report.completed or max((time for time in times if time), default=report.created)
    begin = report.created or min((round.began for round in rounds), default=end)
    return Facts(
        report=report,
        begin=begin,
        end=max(begin, end),
        spans=tuple(_spans(rounds, report.rested, max(begin, end))),
        failures=tuple(_failures(report, end)),
    )


def _spans(rounds: tuple[PastRound, ...], suspensions: tuple[float, ...], end: float) -> Iterator[Span]:
    def end_of(round: PastRound, latest: float) -> float:
        moments = (time for time in (round.ended, *suspensions) if round.began < time < latest)
        return min(moments, default=max(round.began, latest))

    for round, after in itertools.pairwise(rounds):
        kept = after.number == round.number + 1
        yield Span(round, end_of(round, after.began) if kept else None, after.lost if kept else None)
    if rounds:
        yield Span(rounds[-1], end_of(rounds[-1], end))


def _failures(report: Report, end: float) -> Iterator[Failure]:
    for round in report.history.rounds:
        if round.failure is not None:
            yield _of_worker(round.failure, round.began, round.lost)
        elif round.reason is RoundReason.NODE_LOST:
            before = max(round.number - 1, 0)
            yield Failure(time=round.began, round=before, message=round.cause, what="pod lost", lost=round.lost)
    outcome = report.outcome
    if outcome is not None and outcome.failure is not None:
        yield _of_worker(outcome.failure, end, None, final=True)
    elif report.state.value == "Failed":
        message = report.message or (outcome.message if outcome else "")
        yield Failure(time=end, round=outcome.round if outcome else 0, message=message, final=True)


def _of_worker(failure: FailureRecord, time: float, lost: float | None, *, final: bool = False) -> Failure:
    return Failure(
        time=time,
        round=failure.round,
        message=failure.message,
        pod=node_name(failure),
        rank=failure.rank,
        what=_exit_status(failure.exit_code),
        lost=lost,
        free=failure.uncharged,
        final=final,
    )


def _exit_status(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return signal_name(SIGNAL_BASE - exit_code) or f"signal {-exit_code}"
