"""How amounts are written for people: how long, how much memory, how large a share."""

from __future__ import annotations

import math
from typing import Final

from elastic_operator.showing.words import duration

_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def span(seconds: float) -> str:
    """A time that may be very short: 0s, 0.42ms, 12.3ms, 1.52s, 48s, 2m05s."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.3g}s"
    if seconds == 0:
        return "0s"
    return f"{seconds * 1000:.3g}ms" if seconds * 1000 < 999.5 else "1s"


def size(bytes_: float) -> str:
    """An amount of memory: 612 MiB, 1.4 GiB."""
    amount = max(0.0, bytes_)
    for unit in _BYTES[:-1]:
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} {_BYTES[-1]}"


def share(part: float) -> str:
    """A part of 1 in percent: 87.1 %, 100 %, below 0.1 %."""
    percent = part * 100
    if 0 < percent < 0.05:
        return "below 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 99.95 else f"{percent:.0f} %"


def number(value: float) -> str:
    """A number that a program has measured, with the digits that matter."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"
