"""Render a report as one HTML page without scripts or external resources.

This module derives the facts: the durations of rounds, the failures, and their costs. The template has the text
and the charts. Horizontal positions are in percent, so that text keeps its size at any width.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import jinja2
from markupsafe import Markup

from elastic_operator.controller import messages
from elastic_operator.views import formatting
from elastic_operator.views.top import goodput
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.records import FailureRecord, PastRound, RoundReason, RunState, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.api.status import Report

STATES: Final[Mapping[str, str]] = {
    RunState.TRAINING: "the workers train",
    RunState.RESTORING: "the workers run; the program has not begun its first step",
    RunState.STARTING: "the workers' processes start",
    RunState.RENDEZVOUS: "enough pods exist; they agree on the members of the next round",
    RunState.WAITING: "fewer pods exist than are needed",
    RunState.STOPPING: "workers stop, for another round or because the job has ended",
    RunState.SUSPENDED: "the job is suspended; it has no pods",
}

_SUMMARY: Final = 240
"""Number of characters of a message that are visible before it is expanded."""
_PAGE_WIDTH: Final = 880
"""The assumed width of the timeline in pixels, which determines the labels that fit."""
_TICKS: Final = 5
_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def page(report: Report, ended: str = "") -> str:
    """Render a report; ``ended`` is one word for how the run of an unfinished job ended, empty if the run is alive."""
    found = facts(report)
    finished = report.state.finished
    state = report.state.value if finished or not ended else ended[:1].upper() + ended[1:]
    message = report.message or (report.outcome.message if report.outcome else "")
    return _template().render(
        report=report,
        found=found,
        split=report.time_breakdown,
        state=state,
        outcome_class=state if finished else "other",
        message_text="" if state == "Succeeded" else message,
        states=STATES,
    )


class Span(NamedTuple):
    """A round.

    Attributes:
        end: None if the next round is not in the history.
        lost: as in :class:`Failure`.
        recovery: seconds from the end of the previous training to the first step of this round; None if unknown.
        restart: the part of ``recovery`` until the workers were started, which is the agents' share.
    """

    round: PastRound
    end: float | None
    lost: float | None = None
    recovery: float | None = None
    restart: float | None = None


class Failure(NamedTuple):
    """A failure of a worker, a pod or the job.

    Attributes:
        time: when the next round began or the job ended, in seconds since the Unix epoch.
        round: the number of the round; 0 if unknown.
        pod: the name of the pod; empty if the message contains it.
        rank: the rank of the failed worker; None if no worker failed.
        what: how the worker or pod ended.
        lost: seconds of training that no checkpoint held; None if unknown.
        uncharged: whether the failure does not count against ``maxRestarts``.
        final: whether the failure ended the job.
    """

    time: float
    round: int
    message: str
    pod: str = ""
    rank: int | None = None
    what: str = ""
    lost: float | None = None
    uncharged: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a page. Positions in its timeline are in percent from the left and in pixels from the top.

    ``begin`` and ``end`` are in seconds since the Unix epoch. ``top`` is :meth:`y` of the most workers, ``base`` of 0.
    """

    report: Report
    begin: float
    end: float
    spans: tuple[Span, ...]
    failures: tuple[Failure, ...]
    top = 26
    base = 166
    height = 190

    @property
    def goodput(self) -> float | None:
        """The ratio of preserved training time to total time; None if unknown."""
        split = self.report.time_breakdown
        return goodput({str(state): spent for state, spent in split.seconds.items()}, split.lost) if split else None

    @property
    def most_workers(self) -> int:
        """The number of workers in the largest round."""
        return max((span.round.workers for span in self.spans), default=0)

    def x(self, time: float) -> float:
        """Return the horizontal position of a time."""
        total = self.end - self.begin
        return min(max((time - self.begin) / total * 100, 0.0), 100.0) if total > 0 else 0.0

    def y(self, workers: float) -> float:
        """Return the vertical position of a number of workers."""
        return self.base - (self.base - self.top) * workers / max(self.most_workers, 1)

    @property
    def levels(self) -> list[int]:
        """The numbers of workers with a grid line."""
        most = self.most_workers
        step = max(1, math.ceil(most / 4))
        return list(range(step, most + 1, step)) or [1]

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the positions and labels of the time axis."""
        for number in range(_TICKS):
            yield 100 / _TICKS * number, formatting.short_duration((self.end - self.begin) / _TICKS * number)

    @staticmethod
    def label(number: int, width: float) -> str:
        """Return the longest label of a round that fits in a width, which is in percent of the timeline."""
        pixels = width / 100 * _PAGE_WIDTH
        return f"round {number}" if pixels > 64 else str(number) if pixels > 8 * len(str(number)) else ""


def facts(report: Report) -> Facts:
    """Derive the facts from a report."""
    rounds = report.history.rounds
    times = [
        report.completed_at,
        report.time_breakdown.until if report.time_breakdown else None,
        *(round.began for round in rounds),
    ]
    end = report.completed_at or max((time for time in times if time), default=report.created)
    begin = report.created or min((round.began for round in rounds), default=end)
    return Facts(
        report=report,
        begin=begin,
        end=max(begin, end),
        spans=tuple(_spans(rounds, report.suspensions, max(begin, end))),
        failures=tuple(_failures(report, end)),
    )


def _spans(rounds: tuple[PastRound, ...], suspensions: tuple[float, ...], end: float) -> Iterator[Span]:
    def end_of(round: PastRound, latest: float) -> float:
        moments = (time for time in (round.ended, *suspensions) if round.began < time < latest)
        return min(moments, default=max(round.began, latest))

    recovery = restart = None
    broken = 0.0  # the end of the last round that trained
    for round, after in itertools.pairwise(rounds):
        kept = after.number == round.number + 1
        yield Span(round, end_of(round, after.began) if kept else None, after.lost if kept else None, recovery, restart)
        if not kept or any(round.began < time < after.began for time in suspensions):
            broken = 0.0
        elif round.ended and (round.first_step_at or not broken):
            broken = round.ended
        recovery, restart = (
            max(time - broken, 0.0) if broken and time else None for time in (after.first_step_at, after.started_at)
        )
    if rounds:
        yield Span(rounds[-1], end_of(rounds[-1], end), None, recovery, restart)


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
    code = failure.exit_code
    signal = "" if code >= 0 else messages.signal_name(messages.SIGNAL_BASE - code) or f"signal {-code}"
    return Failure(
        time=time,
        round=failure.round,
        message=failure.message,
        pod=name_of(failure.node),
        rank=failure.rank,
        what=signal or f"exit code {code}",
        lost=lost,
        uncharged=failure.uncharged,
        final=final,
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("elastic_operator.reports", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )
    environment.filters |= {
        "count": messages.count,
        "duration": formatting.duration,
        "moment": lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "percent": formatting.percent,
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
        "short_duration": formatting.short_duration,
        "shorten": shorten,
        "summary": _summary,
    }
    return environment.get_template("report.html.j2")


def _printable(value: object) -> object:
    """Round floats, and replace characters that a page cannot contain: control characters and surrogates."""
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def _summary(text: str) -> str | None:
    """Return the last line of a long message, shortened; None if the message is short."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 and len(text) <= _SUMMARY:
        return None
    return shorten((lines or [""])[-1].strip(), _SUMMARY)
