"""What values and names must be to be taken into series, whatever holds those.

What would spoil a series is not taken, and there is a limit to how many names there are. What was not taken is logged
once for each reason, and counted.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.api import PLATFORM_GROUP, MetricHandler
from torchelastic.metrics.series import Kind, platform_series, source_of, to_number, user_series

if TYPE_CHECKING:
    from torchelastic.metrics.api import MetricData
    from torchelastic.metrics.series import Form, Series

_log: Final = logging.getLogger(__name__)

Sink = Callable[[float], None]
"""Takes a value into its series."""

NOT_A_NUMBER: Final = "not_a_number"
TOO_MANY_NAMES: Final = "too_many_names"
NOT_FINITE: Final = "not_finite"
NEGATIVE: Final = "negative"
REASONS: Final = (NOT_A_NUMBER, TOO_MANY_NAMES, NOT_FINITE, NEGATIVE)
"""Why a value is not taken."""


class ValidatingHandler(MetricHandler):
    """A handler that takes values into series.

    Args:
        form: says what the values of a user's name, by group and name, are to become.
        max_series: how many different names are taken; the platform's own have a limit of the same size beside it.
    """

    def __init__(self, form: Callable[[str, str], Form], max_series: int) -> None:
        self._form = form
        self._max_series = max_series
        # Reentrant, since what is logged below may itself be measured, and a signal handler may measure at any time.
        self._lock = threading.RLock()
        self._sinks: dict[tuple[str, ...], Sink] = {}
        self._platform_sources: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._opening = False
        self._told: set[str] = set()

    def emit(self, metric_data: MetricData) -> None:
        """Take one value into its series."""
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
        key = (group, name) if type(name) is str else source_of(group, name)
        sink = self._sinks.get(key)
        if sink is not None:
            sink(value)
            return
        with self._lock:
            sink = self._sinks.get(key) or self._new_sink(key)
            if sink is not None:
                sink(value)
                self._begun()

    @abc.abstractmethod
    def _open(self, series: Series, source: tuple[str, ...], *, of_platform: bool) -> Sink | None:
        """Begin a series; None where there is no room for it. What the sink gets is finite, but for gauges."""

    def _begun(self) -> None:
        """The first value of a series was taken."""

    @abc.abstractmethod
    def _count_dropped(self, reason: str) -> None:
        """Count a value that was not taken."""

    def _new_sink(self, key: tuple[str, ...]) -> Sink | None:
        """Make the series of a source that is new; None where there may be no more. The lock is held."""
        group, name = key[:2]
        if self._opening:  # a signal handler has come between, and its name has to wait for its next value
            return None
        series = platform_series(name) if group == PLATFORM_GROUP and len(key) == 2 else None
        if series is not None and self._platform_sources.get((series.name, series.labels), key) != key:
            series = None  # what only looks like it
        of_platform = series is not None
        of_platforms = len(self._platform_sources)
        count = of_platforms if of_platform else len(self._sinks) - of_platforms
        sink: Sink | None = None
        if count < self._max_series:
            series = series or user_series(group, name, self._form(group, name))
            self._opening = True
            try:
                sink = self._open(series, key, of_platform=of_platform)
            finally:
                self._opening = False
        if sink is None:
            self._drop(
                TOO_MANY_NAMES,
                f"There are {count} different names already, and {name!r:.100} of the group {group!r:.100} is one "
                "more; put what changes all the time (a step, a file) into the value and not into the name",
            )
            return None
        if series is not None and series.kind is not Kind.GAUGE:
            sink = self._only_sound(series, sink)
        if series is not None and of_platform:
            self._platform_sources[series.name, series.labels] = key
        self._sinks[key] = sink
        return sink

    def _only_sound(self, series: Series, sink: Sink) -> Sink:
        """Keep from a counter or histogram what would spoil it for good."""
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
