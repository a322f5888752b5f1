"""Render a report as one HTML page without scripts, which loads nothing.

The template has the text and the charts; this module computes where the charts' shapes are. Horizontal positions are in
percent, so that text keeps its size at any width.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import jinja2
from markupsafe import Markup

from elastic_operator.reports.facts import facts
from elastic_operator.views import formatting
from torchelastic.protocol import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.api.report import Report
    from elastic_operator.reports.facts import Facts, Span

STATES: Final[Mapping[str, str]] = {
    RunState.TRAINING: "the workers train",
    RunState.RESTORING: "the workers run; the program has not begun its first step",
    RunState.STARTING: "the workers' processes start",
    RunState.RENDEZVOUS: "enough pods exist and agree on who trains together",
    RunState.WAITING: "fewer pods exist than are needed",
    RunState.STOPPING: "workers are stopped, for another round or because the job has ended",
    RunState.SUSPENDED: "the job is suspended; nothing of it runs",
}

_SUMMARY: Final = 240
"""Characters of a message that are visible before it is expanded."""
_TOP, _BASE, _HEIGHT = 26, 166, 190
"""Top of the bars, bottom of the bars and height of the timeline, in pixels."""
_PAGE_WIDTH: Final = 880
"""The width in pixels for which labels are chosen."""
_TICK_STEPS: Final = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000),
)
_MAX_TICKS: Final = 8
_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def page(report: Report, ended: str = "") -> str:
    """Render a report; ``ended`` is how the run of an unfinished job ended, in one word, empty if it has not."""
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
        world=_world(found),
        pods=_pods(report),
        charged=f"{sum(not each.free and each.rank is not None for each in found.failures)} charged to the job"
        if found.failures
        else "",
        chart=_Chart(found),
    )


def _world(found: Facts) -> str:
    sizes = sorted({span.round.workers for span in found.spans if span.round.workers})
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0]) if sizes else "-"


def _pods(report: Report) -> str:
    if report.time_breakdown is None:
        return ""
    gone = [f"{count} {end.replace('_', ' ')}" for end, count in report.time_breakdown.gone.items() if count]
    return ", ".join([f"{formatting.count(report.time_breakdown.joined, 'pod')} came", *gone])


@dataclass(frozen=True, slots=True)
class _Bar:
    """A round in the timeline, or a gap if the round after it is not kept."""

    span: Span
    x: float
    width: float
    parity: str = ""
    y: float = _TOP
    label: str = ""
    lost: float = 0.0
    lost_width: float = 0.0
    next_round: int = 0

    @property
    def height(self) -> float:
        return _BASE - self.y


@dataclass(frozen=True, slots=True)
class _Chart:
    """Positions in the timeline and in the time breakdown."""

    found: Facts
    top = _TOP
    base = _BASE
    height = _HEIGHT

    def x(self, time: float) -> float:
        total = self.found.end - self.found.begin
        return min(max((time - self.found.begin) / total * 100, 0.0), 100.0) if total > 0 else 0.0

    def y(self, workers: float) -> float:
        return _BASE - (_BASE - _TOP) * workers / max(self.found.most_workers, 1)

    @property
    def levels(self) -> list[int]:
        """The numbers of workers with a grid line."""
        most = self.found.most_workers
        step = max(1, math.ceil(most / 4))
        return list(range(step, most + 1, step)) or [1]

    def ticks(self) -> Iterator[tuple[float, str]]:
        """The positions and labels of the time axis."""
        total = self.found.end - self.found.begin
        step = next((step for step in _TICK_STEPS if total / step <= _MAX_TICKS), math.ceil(total / _MAX_TICKS))
        for number in range(int(total / step) + 1 if step else 1):
            at = self.x(self.found.begin + number * step)
            if number and at > 97:
                break
            yield at, f"{number * step:g}s" if total < 120 else formatting.clock(number * step)

    def bars(self) -> Iterator[_Bar]:
        for position, span in enumerate(self.found.spans):
            round, begin = span.round, self.x(span.round.began)
            if span.end is None:
                after = self.found.spans[position + 1].round
                yield _Bar(span, begin, self.x(after.began) - begin, next_round=after.number)
            elif round.workers:
                width, length = self.x(span.end) - begin, span.end - round.began
                lost = min(span.lost or 0.0, length)
                yield _Bar(
                    span,
                    begin,
                    width,
                    parity="even" if position % 2 else "odd",
                    y=self.y(round.workers),
                    label=_label(round.number, width / 100 * _PAGE_WIDTH),
                    lost=lost,
                    lost_width=width * lost / length if length else 0.0,
                )

    def shares(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield each state with its seconds, its position and its width in the time breakdown."""
        split = self.found.report.time_breakdown
        total, at = sum(split.seconds.values()) if split else 0.0, 0.0
        for state in STATES:
            spent = split.seconds.get(RunState(state), 0.0) if split else 0.0
            if spent and total:
                yield state, spent, at, spent / total * 100
                at += spent / total * 100

    @staticmethod
    def has_room(width: float) -> bool:
        """Whether the name of a state fits in this width."""
        return width / 100 * _PAGE_WIDTH > 110


def _label(number: int, pixels: float) -> str:
    return f"round {number}" if pixels > 64 else str(number) if pixels > 8 * len(str(number)) else ""


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
        "count": formatting.count,
        "duration": formatting.duration,
        "moment": lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "percent": formatting.percent,
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
        "short_duration": formatting.short_duration,
        "shortened": formatting.shortened,
        "summary": _summary,
    }
    return environment.get_template("report.html.j2")


def _printable(value: object) -> object:
    """Round floats, and replace what no page can contain: control characters and surrogates."""
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def _summary(text: str) -> str | None:
    """Return the most telling line of a long message; None if the message is short."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 and len(text) <= _SUMMARY:
        return None
    return formatting.shortened((lines or [""])[-1].strip(), _SUMMARY)
