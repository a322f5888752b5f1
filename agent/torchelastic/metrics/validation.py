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
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.api import MetricHandler
from torchelastic.metrics.series import Form, Kind, Series, to_number, user_series

if TYPE_CHECKING:
    from array import array

    from torchelastic.metrics.api import MetricData

_log: Final = logging.getLogger(__name__)

Sink = Callable[[float], None]
"""Adds a value to its series."""

NOT_A_NUMBER: Final = "not_a_number"
TOO_MANY_NAMES: Final = "too_many_names"
NOT_FINITE: Final = "not_finite"
NEGATIVE: Final = "negative"
REASONS: Final = (NOT_A_NUMBER, TOO_MANY_NAMES, NOT_FINITE, NEGATIVE)
"""Reasons to drop a value."""

DROPPED_AT: Final = 1
"""Index of the first of the words that count dropped values, by reason."""

MAX_NAMES: Final = 1000
"""Maximum number of names of a worker or a handler."""


class SeriesHandler(MetricHandler):
    """A handler that checks values and adds them to the words of their series.

    The words of a series are its value, or for a histogram one word per bucket (each value is counted in one bucket),
    one for values above the last bound, and one for the sum.

    Args:
        words: the words of all series.
        form: returns the form of a name of a group, or the series of a platform name.
        max_series: maximum number of names.
    """

    def __init__(
        self, words: memoryview[float] | array[float], form: Callable[[str, str], Form | Series], max_series: int
    ) -> None:
        self._words = words
        self._form = form
        self._max_series = max_series
        # Reentrant, because a signal handler or a log handler may measure too.
        self._lock = threading.RLock()
        self._sinks: dict[tuple[str, str], Sink] = {}
        self._opening = False
        self._waiting: list[MetricData] = []
        self._told: set[str] = set()

    def emit(self, metric_data: MetricData) -> None:
        """Add one value to its series."""
        _, group, name, value = metric_data
        kind: type[object] = type(value)
        if kind is not float:
            try:
                value = float(value) if kind is int else to_number(value)
            except OverflowError:
                self._drop(NOT_A_NUMBER, f"The value of {name!r:.100} is too large for a float")
                return
            except (TypeError, ValueError, RuntimeError):  # the last one is torch's
                self._drop(NOT_A_NUMBER, f"The value of {name!r:.100} is of the type {kind.__qualname__} and no number")
                return
        if type(name) is not str:
            name = str(name)
        sink = self._sinks.get((group, name))
        if sink is not None:
            sink(value)
            return
        with self._lock:
            if self._opening:  # a signal handler inside another call, which adds this value too
                self._waiting.append(metric_data)
                return
            if (sink := self._sinks.get((group, name)) or self._new_sink(group, name)) is not None:
                sink(value)
            while self._waiting:
                self.emit(self._waiting.pop(0))

    @abc.abstractmethod
    def _open(self, series: Series, group: str, name: str, *, of_platform: bool) -> Sink | None:
        """Open a series; None if there is no space for it. The lock is held."""

    def _new_sink(self, group: str, name: str) -> Sink | None:
        """Return the sink of a new name; None if no more names are allowed. The lock is held."""
        sink: Sink | None = None
        count = len(self._sinks)
        if count < self._max_series:
            form = self._form(group, name)
            series = form if isinstance(form, Series) else user_series(group, name, form)
            self._opening = True
            try:
                sink = self._open(series, group, name, of_platform=series is form)
            finally:
                self._opening = False
        if sink is None:
            self._drop(
                TOO_MANY_NAMES,
                f"There are {count} different names already, and {name!r:.100} of the group {group!r:.100} is one "
                "more; put what changes all the time (a step, a file) into the value and not into the name",
            )
            return None
        self._sinks[group, name] = sink
        return sink

    def _sink_at(self, place: int, series: Series) -> Sink:
        """Return the sink for a series whose words begin at an index."""
        words, lock, divisor, bounds = self._words, self._lock, series.divisor, series.buckets
        total = place + len(bounds) + 1
        least = -sys.float_info.max if bounds and bounds[0] < 0 else 0.0
        most = sys.float_info.max

        def hold(number: float) -> None:
            words[place] = number / divisor

        def add(number: float) -> None:
            if least <= number <= most:
                with lock:
                    words[place] += number / divisor
            else:
                self._refuse(series.name, number)

        def observe(number: float) -> None:
            if least <= number <= most:
                number /= divisor
                bucket = place + bisect_left(bounds, number)
                with lock:
                    words[bucket] += 1
                    words[total] += number
            else:
                self._refuse(series.name, number)

        return {Kind.GAUGE: hold, Kind.COUNTER: add, Kind.HISTOGRAM: observe}[series.kind]

    def _refuse(self, series: str, number: float) -> None:
        if math.isfinite(number):
            self._drop(NEGATIVE, f"{series} got the value {number}, and takes none below 0")
        else:
            self._drop(NOT_FINITE, f"{series} got the value {number}")

    def _drop(self, reason: str, what: str) -> None:
        with self._lock:
            self._words[DROPPED_AT + REASONS.index(reason)] += 1
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s. It is dropped; further ones like it are counted but not reported.", what)
