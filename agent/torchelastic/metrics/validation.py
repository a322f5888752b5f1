"""Validates names and values. Invalid values are dropped, counted, and logged once per reason."""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.api import MetricHandler
from torchelastic.metrics.series import Form, Kind, Series, to_number, user_series

if TYPE_CHECKING:
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


class ValidatingHandler(MetricHandler):
    """A handler that validates values and adds them to series.

    Args:
        form: returns the form of a name of a group, or the series of a platform name.
        max_series: maximum number of names.
    """

    def __init__(self, form: Callable[[str, str], Form | Series], max_series: int) -> None:
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
            sink = self._sink(group, name)
            if sink is not None:
                sink(value)
            while self._waiting:
                self.emit(self._waiting.pop(0))

    @abc.abstractmethod
    def _open(self, series: Series, source: tuple[str, str], *, of_platform: bool) -> Sink | None:
        """Open a series; None if there is no space for it. The sink gets finite values only, except for gauges."""

    @abc.abstractmethod
    def _count_dropped(self, reason: str) -> None:
        """Count a dropped value."""

    def _sink(self, group: str, name: str) -> Sink | None:
        """Return the sink of a name, opened if it is new; None if no more names are allowed. The lock is held."""
        source = group, name
        if (known := self._sinks.get(source)) is not None:
            return known
        sink: Sink | None = None
        count = len(self._sinks)
        if count < self._max_series:
            form = self._form(group, name)
            series = form if isinstance(form, Series) else user_series(group, name, form)
            self._opening = True
            try:
                sink = self._open(series, source, of_platform=series is form)
            finally:
                self._opening = False
        if sink is None:
            self._drop(
                TOO_MANY_NAMES,
                f"There are {count} different names already, and {name!r:.100} of the group {group!r:.100} is one "
                "more; put what changes all the time (a step, a file) into the value and not into the name",
            )
            return None
        if series.kind is not Kind.GAUGE:
            sink = self._only_sound(series, sink)
        self._sinks[source] = sink
        return sink

    def _only_sound(self, series: Series, sink: Sink) -> Sink:
        """Return a sink that drops values that a counter or histogram cannot sum."""
        name = series.name
        below_zero = bool(series.buckets) and series.buckets[0] < 0

        def take(number: float) -> None:
            if not math.isfinite(number):
                self._drop(NOT_FINITE, f"{name} got the value {number}")
            elif number < 0 and not below_zero:
                self._drop(NEGATIVE, f"{name} got the value {number}, and takes none below 0")
            else:
                sink(number)

        return take

    def _drop(self, reason: str, what: str) -> None:
        self._count_dropped(reason)
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s. It is dropped; further ones like it are counted but not reported.", what)
