"""Format durations, sizes, states and program output for a terminal."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_operator.controller.messages import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TextIO

    from elastic_operator.views.job_view import PodView

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TERMINATED: Final = 128 + signal.SIGTERM


def duration(seconds: float) -> str:
    """Format a duration like kubectl: 12s, 1m12s, 2h05m, 3d4h."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def since(moment: float | None, now: float) -> str:
    """Format the time since a moment; a dash if it is unknown."""
    return duration(now - moment) if moment else "-"


def short_duration(seconds: float) -> str:
    """Format a duration that may be below a second: 0s, 0.42ms, 12.3ms, 1.52s, 48s, 2m05s."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.3g}s"
    return f"{seconds * 1000:.3g}ms" if 0 < seconds < 0.9995 else f"{seconds:.0f}s"


def clock(seconds: float) -> str:
    """Format the time since the start: 0:42, 12:03, 1:02:03."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(amount: float) -> str:
    """Format a number of bytes: 612 MiB, 1.4 GiB."""
    amount = max(0.0, amount)
    for unit in _BYTE_UNITS[:-1]:
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} {_BYTE_UNITS[-1]}"


def percent(ratio: float) -> str:
    """Format a ratio in percent: 87.1 %, 100 %, below 0.1 %."""
    value = ratio * 100
    if 0 < value < 0.05:
        return "below 0.1 %"
    return f"{value:.1f} %" if 0 < value < 99.95 else f"{value:.0f} %"


def printed(line: str) -> str:
    """Return the visible part of a line: the text after the last carriage return, without escape sequences."""
    visible = _ESCAPES.sub("", line).rstrip("\r\n").rpartition("\r")[2]
    return _CONTROLS.sub("", visible.expandtabs(4)).rstrip()


def shortened(text: str, limit: int) -> str:
    """Cut a text to at most ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def activity(pod: PodView) -> tuple[str, bool | None]:
    """Return what a pod is doing, in one or two words, and whether that is healthy: None for in between."""
    if pod.over:
        code = pod.exit_code
        if code == 0 or pod.phase == "Succeeded":
            return "done", True
        if code is None or code == _TERMINATED:
            return "ended" if code is None else "left", None
        return signal_name(code) or f"failed ({code})", False
    if pod.terminating:
        return "leaving", None
    if pod.phase == "Pending" or not pod.ready:
        return "starting", None
    if pod.ranks is None:
        return "running", True
    return ("training", True) if pod.ranks else ("joining", None)


def rank_list(ranks: Sequence[int] | None) -> str:
    """Format sorted ranks as ranges: 0-3, 7; a dash if there are none or they are unknown."""
    runs = itertools.groupby(enumerate(ranks or ()), key=lambda entry: entry[1] - entry[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans) or "-"


def home_relative(path: str) -> str:
    """Replace the user's home directory at the start of a path by ``~``."""
    full = Path(path)
    return f"~/{full.relative_to(Path.home())}" if path and full.is_relative_to(Path.home()) else path


def shell_path(path: str) -> str:
    """Quote a path for a shell."""
    return home_relative(path) if shlex.quote(path) == path else shlex.quote(path)


def columns(rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Lay out rows as lines, each column as wide as its widest cell."""
    kept = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    return [
        (indent + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in kept
    ]


def is_terminal(output: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether the output is a terminal that can show a live view; NO_COLOR and TERM=dumb ask for plain lines."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb" and output.isatty()
