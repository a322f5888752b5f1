"""Render a report as one HTML page without scripts, which loads nothing.

The template has the text and the charts. Horizontal positions are in percent, so that text keeps its size at any width.
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

from elastic_operator.controller import messages
from elastic_operator.reports.facts import facts
from elastic_operator.views import formatting
from torchelastic.protocol import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.api.report import Report
    from elastic_operator.reports.facts import Facts

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
        chart=_Chart(found),
    )


@dataclass(frozen=True, slots=True)
class _Chart:
    """Positions in the timeline: from the left in percent, from the top in pixels."""

    found: Facts
    top = 26
    base = 166
    height = 190

    def x(self, time: float) -> float:
        total = self.found.end - self.found.begin
        return min(max((time - self.found.begin) / total * 100, 0.0), 100.0) if total > 0 else 0.0

    def y(self, workers: float) -> float:
        return self.base - (self.base - self.top) * workers / max(self.found.most_workers, 1)

    @property
    def levels(self) -> list[int]:
        """The numbers of workers with a grid line."""
        most = self.found.most_workers
        step = max(1, math.ceil(most / 4))
        return list(range(step, most + 1, step)) or [1]

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the positions and labels of the time axis."""
        total = self.found.end - self.found.begin
        step = next((step for step in _TICK_STEPS if total / step <= _MAX_TICKS), math.ceil(total / _MAX_TICKS))
        for number in range(int(total / step) + 1 if step else 1):
            at = self.x(self.found.begin + number * step)
            if number and at > 97:
                break
            yield at, f"{number * step:g}s" if total < 120 else formatting.clock(number * step)

    @staticmethod
    def label(number: int, width: float) -> str:
        """Return the label of a round that fits in a width in percent."""
        pixels = width / 100 * _PAGE_WIDTH
        return f"round {number}" if pixels > 64 else str(number) if pixels > 8 * len(str(number)) else ""

    @staticmethod
    def has_room(width: float) -> bool:
        """Return whether the name of a state fits in a width in percent."""
        return width / 100 * _PAGE_WIDTH > 110


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
