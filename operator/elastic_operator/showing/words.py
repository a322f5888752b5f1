"""How elasticjob says things to people: durations, what a pod is doing, and text that a program printed."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elastic_operator.showing.shown import ShownPod

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")

_LEFT = 128 + signal.SIGTERM


def duration(seconds: float) -> str:
    """A duration as kubectl says it: 12s, 1m12s, 2h05m, 3d4h."""
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def clock(seconds: float) -> str:
    """Time since the start, as a clock: 0:42, 12:03, 1:02:03."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: int, thing: str) -> str:
    """A number of things: 1 worker, 3 workers."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def printed(line: str) -> str:
    """What a terminal would show of a line that a program printed.

    No escape sequences, and only what is after the last carriage return: a progress bar rewrites its line.
    """
    visible = _ESCAPES.sub("", line).rstrip("\r\n").rpartition("\r")[2]
    return _CONTROLS.sub("", visible.expandtabs(4)).rstrip()


def shortened(text: str, limit: int) -> str:
    """The beginning of a text, of so many characters at most."""
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


class Doing(NamedTuple):
    """What a pod is doing.

    Attributes:
        word: in a word or two.
        good: True where all is well, None while it is on its way somewhere, False where it has failed.
    """

    word: str
    good: bool | None


def doing(pod: ShownPod) -> Doing:
    """What a pod is doing."""
    if pod.over:
        if pod.exit_code == 0 or pod.phase == "Succeeded":
            return Doing("done", good=True)
        return Doing(ending(pod.exit_code), good=None if pod.exit_code in (None, _LEFT) else False)
    if pod.terminating:
        return Doing("leaving", good=None)
    if pod.phase == "Pending" or not pod.ready:
        return Doing("starting", good=None)
    if pod.ranks is None:
        return Doing("running", good=True)
    return Doing("training", good=True) if pod.ranks else Doing("joining", good=None)


def ending(exit_code: int | None) -> str:
    """An agent's exit code in a word or two; 128 + n is a signal."""
    if exit_code is None:
        return "ended"
    if exit_code == _LEFT:
        return "left"
    return signal_name(exit_code) or f"failed ({exit_code})"


def signal_name(exit_code: int | None) -> str:
    """The signal that an exit code of 128 + n speaks of; empty where it speaks of none."""
    try:
        return signal.Signals((exit_code or 0) - 128).name
    except ValueError:
        return ""


def ranks(numbers: tuple[int, ...] | None) -> str:
    """Ranks as a person writes them: 0-3, 7; a dash for none, and where nobody knows them."""
    if not numbers:
        return "-"
    parts: list[str] = []
    first = last = numbers[0]
    for number in (*numbers[1:], None):
        if number is not None and number == last + 1:
            last = number
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        if number is not None:
            first = last = number
    return ", ".join(parts)


def home(place: str) -> str:
    """A path with the user's home folder as ``~``, as every shell takes it."""
    path = Path(place)
    return f"~/{path.relative_to(Path.home())}" if place and path.is_relative_to(Path.home()) else place


def path_to_type(place: str) -> str:
    """A path as it can be typed in a shell."""
    return home(place) if shlex.quote(place) == place else shlex.quote(place)
