"""A handler that checks values and adds them to the words of their series.

Invalid values are dropped, counted, and logged once per reason.
"""

from __future__ import annotations

import abc
import logging
import math
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, SupportsFloat, SupportsIndex

from torchelastic.metrics.api import MetricHandler
from torchelastic.metrics.series import Kind

if TYPE_CHECKING:
    from torchelastic.metrics.api import MetricData
    from torchelastic.metrics.series import Series

    Words = memoryview[float] | list[float]

_log: Final = logging.getLogger(__name__)

Sink = Callable[[float], None]
"""Adds a value to its series."""

NOT_A_NUMBER: Final = "not_a_number"
TOO_MANY_NAMES: Final = "too_many_names"
NOT_FINITE: Final = "not_finite"
NEGATIVE: Final = "negative"
REASONS: Final = (NOT_A_NUMBER, TOO_MANY_NAMES, NOT_FINITE, NEGATIVE)
"""Reasons to drop a value."""

MAX_NAMES: Final = 1000
"""Maximum number of names of a worker or a handler."""


class SeriesHandler(MetricHandler):
    """A handler that checks values and adds them to the words of their series.

    The words of a series are its value, or for a histogram one word per bucket (each value is counted in one bucket),
    one for values above the last bound, and one for the sum.

    Args:
        dropped: the words that count dropped values, by reason.
    """

    def __init__(self, dropped: Words) -> None:
        self._dropped = dropped
        # Reentrant, because a signal handler or a log handler may measure too.
        self._lock = threading.RLock()
        self._sinks: dict[tuple[str, str], Sink] = {}
        self._opening = False
        self._told: set[str] = set()

    def emit(self, metric_data: MetricData) -> None:
        """Add one value to its series."""
        _, group, name, value = metric_data
        kind: type[object] = type(value)
        if kind is not float:
            try:
                value = float(value) if kind is int else _to_number(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
                self._drop(
                    NOT_A_NUMBER, f"The value of {name!r:.100} ({kind.__qualname__}) is not a number, or too large"
                )
                return
        if type(name) is not str:
            name = str(name)
        sink = self._sinks.get((group, name)) or self._new_sink(group, name)
        if sink is not None:
            sink(value)

    @abc.abstractmethod
    def _open(self, group: str, name: str) -> Sink | None:
        """Return the sink of a new name; None if there is no space for it. The lock is held."""

    def _new_sink(self, group: str, name: str) -> Sink | None:
        """Return the sink of a name; None if no more names are allowed."""
        with self._lock:
            if self._opening:  # a signal handler inside another call: its value is lost, the memory stays valid
                return None
            count = len(self._sinks)
            self._opening = True
            try:
                if (group, name) in self._sinks:  # another thread was faster
                    return self._sinks[group, name]
                if count < MAX_NAMES and (sink := self._open(group, name)) is not None:
                    self._sinks[group, name] = sink
                    return sink
            finally:
                self._opening = False
            self._drop(
                TOO_MANY_NAMES,
                f"There are {count} different names already, and {name!r:.100} of the group {group!r:.100} is one "
                "more; put what changes all the time (a step, a file) into the value and not into the name",
            )
            return None

    def _sink_of(self, series: Series, words: Words) -> Sink:
        """Return the sink that adds values to the words of a series."""
        lock, divisor, bounds = self._lock, series.divisor, series.form.buckets
        least = -sys.float_info.max if bounds and bounds[0] < 0 else 0.0
        most = sys.float_info.max

        def hold(number: float) -> None:
            words[0] = number / divisor

        def add(number: float) -> None:
            if least <= number <= most:
                with lock:
                    words[0] += number / divisor
            else:
                self._refuse(series.name, number)

        def observe(number: float) -> None:
            if least <= number <= most:
                number /= divisor
                bucket = bisect_left(bounds, number)
                with lock:
                    words[bucket] += 1
                    words[-1] += number
            else:
                self._refuse(series.name, number)

        return {Kind.GAUGE: hold, Kind.COUNTER: add, Kind.HISTOGRAM: observe}[series.form.kind]

    def _refuse(self, series: str, number: float) -> None:
        if math.isfinite(number):
            self._drop(NEGATIVE, f"{series} got the value {number}, and takes none below 0")
        else:
            self._drop(NOT_FINITE, f"{series} got the value {number}")

    def _drop(self, reason: str, what: str) -> None:
        with self._lock:
            self._dropped[REASONS.index(reason)] += 1
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s. It is dropped; further ones like it are counted but not reported.", what)


def _to_number(value: object) -> float:
    """Return a number, array or tensor with one element as a float; text is refused."""
    if callable(item := getattr(value, "item", None)):
        value = item()  # torch and numpy may warn about a plain conversion
    if not isinstance(value, SupportsFloat | SupportsIndex):  # float() would parse text
        raise TypeError
    return float(value)
