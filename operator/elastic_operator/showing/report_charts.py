"""The pictures of a report, as SVG: the epochs on a time axis, and where the time went.

Across, everything is in percent of the width that there is, so that text keeps its size on any screen and paper.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from elastic_operator.showing import quantities, words
from elastic_operator.showing.markup import Markup, element, joined
from torchelastic.contract import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.showing.report_facts import Facts, Span, Trouble

STATES: Final[Mapping[str, str]] = {
    RunState.TRAINING: "the workers train",
    RunState.RESTORING: "the workers run, and the program has not begun its first step",
    RunState.STARTING: "the workers' processes are started",
    RunState.RENDEZVOUS: "enough pods are there, and agree on who trains together",
    RunState.WAITING: "fewer pods are there than are to train",
    RunState.STOPPING: "workers are ended, for another epoch or because the job is over",
    RunState.SUSPENDED: "nothing of the job runs, by the user's wish",
}
"""What a job can be doing, in the order in which it is told, and what that means."""

_TOP, _BASE, _HEIGHT = 26, 166, 190
"""Where the marks of failures end, where epochs stand, and how high the timeline is; in pixels."""
_PAGE: Final = 880
"""The width, in pixels, for which it is decided what has room."""
_STEPS: Final = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000),
)
_TICKS: Final = 8


def timeline(facts: Facts) -> Markup:
    """The epochs as bars as high as they have workers, and the failures between them."""
    return element(
        "div",
        _scale(facts.largest),
        element(
            "svg",
            _hatches(),
            joined(_lines(facts.largest)),
            joined(_axis(facts)),
            joined(_epochs(facts)),
            joined(_failures(facts)),
            class_="plot",
            height=_HEIGHT,
            role="img",
            aria_label="Timeline of the epochs and failures; the tables below say the same.",
        ),
        class_="timeline",
    )


def time_split(facts: Facts) -> Markup:
    """Where the time went, as one bar."""
    split = facts.report.split
    if split is None or not (whole := sum(split.seconds.values())):
        return Markup()
    parts, at = [], 0.0
    for state in STATES:
        spent = split.seconds.get(RunState(state), 0.0)
        if not spent:
            continue
        part = spent / whole * 100
        parts.append(_part(state, at, part, f"{state}: {quantities.span(spent)}, {quantities.share(spent / whole)}"))
        if state == RunState.TRAINING and split.lost:
            lost = min(split.lost / whole * 100, part)
            parts.append(
                element(
                    "rect",
                    element("title", f"lost: {quantities.span(split.lost)} of training that no checkpoint held"),
                    class_="lost",
                    x=f"{at + part - lost:.4f}%",
                    width=f"{lost:.4f}%",
                    height=36,
                    fill="url(#lost)",
                )
            )
        at += part
    return element(
        "svg",
        joined(parts),
        class_="split",
        height=36,
        role="img",
        aria_label="Where the time went; the table below says the same.",
    )


def _part(state: str, at: float, part: float, about: str) -> Markup:
    label = element("text", f"{state} {part:.0f} %", x=10, y=23) if part / 100 * _PAGE > 110 else None
    return joined(
        [
            element(
                "rect",
                element("title", about),
                class_=f"state {state}",
                x=f"{at:.4f}%",
                width=f"{part:.4f}%",
                height=36,
            ),
            element("svg", label, class_="label", x=f"{at:.4f}%", width=f"{part:.4f}%", height=36) if label else "",
        ]
    )


def _hatches() -> Markup:
    """Patterns: of training that was lost, and of epochs that were not kept."""
    return element(
        "defs",
        *(
            element(
                "pattern",
                element("line", x1=0, y1=0, x2=0, y2=6, class_=f"hatch-{name}"),
                id=name,
                width=6,
                height=6,
                patternUnits="userSpaceOnUse",
                patternTransform="rotate(45)",
            )
            for name in ("lost", "unknown")
        ),
    )


def _levels(largest: int) -> list[int]:
    """The numbers of workers at which there is a line."""
    step = max(1, math.ceil(largest / 4))
    return list(range(step, largest + 1, step)) or [1]


def _y(workers: float, largest: int) -> float:
    return _BASE - (_BASE - _TOP) * workers / max(largest, 1)


def _scale(largest: int) -> Markup:
    numbers = [0, *_levels(largest)]
    return element(
        "svg",
        *(element("text", str(number), x=28, y=_y(number, largest) + 4, text_anchor="end") for number in numbers),
        element("text", "workers", x=0, y=_TOP - 14, class_="name"),
        class_="scale",
        width=36,
        height=_HEIGHT,
    )


def _lines(largest: int) -> Iterator[Markup]:
    for number in _levels(largest):
        at = _y(number, largest)
        yield element("line", x1=0, x2="100%", y1=at, y2=at, class_="grid")
    yield element("line", x1=0, x2="100%", y1=_BASE, y2=_BASE, class_="base")


def _axis(facts: Facts) -> Iterator[Markup]:
    """The time since the job was made."""
    whole = facts.end - facts.begin
    step = next((step for step in _STEPS if whole / step <= _TICKS), math.ceil(whole / _TICKS))
    for number in range(int(whole / step) + 1 if step else 1):
        at = _x(facts.begin + number * step, facts)
        if number and at > 97:
            break
        text = f"{number * step:g}s" if whole < 120 else words.clock(number * step)
        anchor = "middle" if number else "start"
        yield element("line", x1=f"{at:.4f}%", x2=f"{at:.4f}%", y1=_BASE, y2=_BASE + 5, class_="base")
        yield element("text", text, x=f"{at:.4f}%", y=_BASE + 19, text_anchor=anchor, class_="tick")


def _x(time: float, facts: Facts) -> float:
    """Where a moment stands, in percent."""
    whole = facts.end - facts.begin
    return min(max((time - facts.begin) / whole * 100, 0.0), 100.0) if whole > 0 else 0.0


def _epochs(facts: Facts) -> Iterator[Markup]:
    for position, span in enumerate(facts.spans):
        begin = _x(span.epoch.began, facts)
        if span.end is None:
            after = facts.spans[position + 1].epoch
            yield _unknown(begin, _x(after.began, facts) - begin, span.epoch.number, after.number)
        elif span.epoch.workers:
            yield _bar(facts, span, begin, _x(span.end, facts) - begin, position)


def _bar(facts: Facts, span: Span, begin: float, part: float, position: int) -> Markup:
    epoch = span.epoch
    top = _y(epoch.workers, facts.largest)
    length = (span.end or epoch.began) - epoch.began
    about = (
        f"epoch {epoch.number}: {words.count(epoch.workers, 'worker')} on {words.count(epoch.nodes, 'pod')}, "
        f"{quantities.span(length)}\n{epoch.cause}"
    )
    pixels = part / 100 * _PAGE
    label = f"epoch {epoch.number}" if pixels > 64 else str(epoch.number) if pixels > 8 * len(str(epoch.number)) else ""
    lost = min(span.lost or 0.0, length)
    wide = part * lost / length if length else 0.0
    return joined(
        [
            element(
                "rect",
                element("title", about),
                class_=f"epoch {'even' if position % 2 else 'odd'}",
                x=f"{begin:.4f}%",
                width=f"{part:.4f}%",
                y=top,
                height=_BASE - top,
            ),
            element(
                "rect",
                element("title", f"{quantities.span(lost)} of training were lost with epoch {epoch.number}"),
                class_="lost",
                x=f"{begin + part - wide:.4f}%",
                width=f"{wide:.4f}%",
                y=top,
                height=_BASE - top,
                fill="url(#lost)",
            )
            if wide
            else "",
            element(
                "svg",
                element("text", label, x="50%", y=18, text_anchor="middle"),
                class_="label",
                x=f"{begin:.4f}%",
                width=f"{part:.4f}%",
                y=_BASE - 26,
                height=26,
            )
            if label
            else "",
        ]
    )


def _unknown(begin: float, part: float, before: int, after: int) -> Markup:
    about = f"epochs {before + 1} to {after - 1} are not kept, nor when epoch {before} ended"
    return element(
        "rect",
        element("title", about),
        class_="unknown",
        x=f"{begin:.4f}%",
        width=f"{part:.4f}%",
        y=_TOP,
        height=_BASE - _TOP,
        fill="url(#unknown)",
    )


def _failures(facts: Facts) -> Iterator[Markup]:
    for number, trouble in enumerate(facts.troubles, 1):
        at = _x(trouble.time, facts)
        yield element(
            "a",
            element("title", _in_short(trouble)),
            element("line", x1=f"{at:.4f}%", x2=f"{at:.4f}%", y1=_TOP - 8, y2=_BASE),
            element(
                "svg",
                element("path", d="M-6,-9 L6,-9 L0,1 Z"),
                x=f"{at:.4f}%",
                y=_TOP - 8,
                overflow="visible",
                width=1,
                height=1,
            ),
            class_="failure final" if trouble.final else "failure",
            href=f"#failure-{number}",
        )


def _in_short(trouble: Trouble) -> str:
    where = "" if trouble.rank is None else f"rank {trouble.rank} on {trouble.pod}: {trouble.what}"
    return "\n".join(filter(None, (where, words.shortened(trouble.message, 300))))
