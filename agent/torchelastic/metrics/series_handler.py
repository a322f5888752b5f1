"""A handler that checks values and adds them to series in shared memory, which the agent can read.

A value is an aligned double. Layout of the memory, in words of 8 bytes::

    0        number of complete bytes of names
    1 …      dropped values, by reason
    16 …     the words of each series: its value, or for a histogram one word per bucket (each value is counted in one
             bucket), one for values above the last bound, and one for the sum
    16384 …  names, one line of JSON each

Invalid values are dropped, counted, and logged once per reason.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import sys
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, SupportsFloat, SupportsIndex

from torchelastic.metrics.api import MetricHandler
from torchelastic.metrics.series import Kind, MetricKey, MetricType, family_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.metrics.api import MetricData

logger: Final = logging.getLogger(__name__)

NOT_A_NUMBER: Final = "not_a_number"
TOO_MANY_NAMES: Final = "too_many_names"
NOT_FINITE: Final = "not_finite"
NEGATIVE: Final = "negative"
REASONS: Final = (NOT_A_NUMBER, TOO_MANY_NAMES, NOT_FINITE, NEGATIVE)
"""Reasons to drop a value."""

MAX_NAMES: Final = 1000
"""Maximum number of names per worker or handler."""

MEMORY_SIZE: Final = 512 << 10
"""The size of a memory region in bytes."""
_VALUES: Final = 16
_NAMES: Final = 16384


class MetricMemory:
    """The memory region of a handler, mapped into this process. Only one process writes to it.

    Args:
        descriptor: the descriptor of a file of MEMORY_SIZE bytes, which may be closed later; -1 for private memory,
            which is copied when the process forks.

    Attributes:
        dropped: the words that count dropped values, by reason.
    """

    def __init__(self, descriptor: int = -1) -> None:
        flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE
        memory = memoryview(mmap.mmap(descriptor, MEMORY_SIZE, flags=flags))
        self._words = memory.cast("d")
        self._numbers = memory.cast("Q")
        self._names = memory[8 * _NAMES :]
        self._names_end = 0
        self._free = _VALUES
        self._values_by_key: dict[MetricKey, memoryview[float]] = {}
        self.dropped = self._words[1 : 1 + len(REASONS)]

    def values_by_key(self) -> dict[MetricKey, memoryview[float]]:
        """Return the values of each metric, in the order in which the metrics were added. Not thread-safe."""
        for line in bytes(self._names[self._names_end : self._numbers[0]]).splitlines(keepends=True):
            try:
                group, name, kind, buckets, first = json.loads(line)
                key = MetricKey(str(group), str(name), MetricType(Kind(kind), tuple(map(float, buckets))))
                end = first + key.type.size
                if first >= _VALUES and end <= _NAMES:
                    self._values_by_key[key] = self._words[first:end]
                    self._free = max(self._free, end)
            except (ValueError, TypeError, OverflowError, RecursionError):  # the line is incomplete or corrupt
                break
            self._names_end += len(line)
        return self._values_by_key

    def values(self, key: MetricKey) -> memoryview[float] | None:
        """Return the values of a metric. If it is new, allocate them; return None if there is no space."""
        if key not in self.values_by_key():
            line = json.dumps((key.group, key.name, *key.type, self._free)).encode() + b"\n"
            end = self._names_end + len(line)
            if self._free + key.type.size > _NAMES or end > len(self._names):
                return None
            self._names[self._names_end : end] = line
            self._numbers[0] = end
        return self.values_by_key()[key]


class SeriesHandler(MetricHandler):
    """A handler that checks values and adds them to their series; ``type_of`` returns the type of a metric."""

    def __init__(self, memory: MetricMemory, type_of: Callable[[str, str], MetricType]) -> None:
        self._memory = memory
        self._type_of = type_of
        # Reentrant, because a signal handler or a log handler may also record values.
        self._lock = threading.RLock()
        self._sinks: dict[tuple[str, str], Callable[[float], None]] = {}
        # While a metric is being added, this list holds the values that signal handlers record.
        self._waiting: list[MetricData] | None = None
        self._logged_reasons: set[str] = set()

    def emit(self, metric_data: MetricData) -> None:
        """Add one value to its series."""
        _, group, name, value = metric_data
        kind: type[object] = type(value)
        if kind is not float:
            try:
                value = float(value) if kind is int else _to_number(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises RuntimeError
                self._drop(
                    NOT_A_NUMBER, f"The value of {name!r:.100} ({kind.__qualname__}) is not a number or is too large"
                )
                return
        if type(name) is not str:
            name = str(name)
        sink = self._sinks.get((group, name)) or self._new_sink(metric_data, name)
        if sink is not None:
            sink(value)

    def _new_sink(self, data: MetricData, name: str) -> Callable[[float], None] | None:
        """Return the function that adds values to a new metric; None if no more metrics are allowed."""
        group = data.group_name
        with self._lock:
            if self._waiting is not None:  # this signal handler interrupted a call, which adds the value later
                self._waiting.append(data)
                return None
            count = len(self._sinks)
            key = MetricKey(group, name, self._type_of(group, name))
            self._waiting = []
            try:
                if (group, name) in self._sinks:  # another call has already added the metric
                    return self._sinks[group, name]
                if count < MAX_NAMES and (values := self._memory.values(key)) is not None:
                    return self._sinks.setdefault((group, name), self._sink(key, values))
            finally:
                waiting, self._waiting = self._waiting, None
                for each in waiting:
                    self.emit(each)
            self._drop(
                TOO_MANY_NAMES,
                f"{name!r:.100} of group {group!r:.100} exceeds the limit of {count} metric names; do not put changing "
                "parts, such as a step number or a file name, into the name",
            )
            return None

    def _sink(self, key: MetricKey, values: memoryview[float]) -> Callable[[float], None]:
        lock, bounds, series = self._lock, key.type.buckets, family_of(key)
        divisor = series.divisor
        least = -sys.float_info.max if bounds and bounds[0] < 0 else 0.0
        most = sys.float_info.max

        def set_gauge(number: float) -> None:
            values[0] = number / divisor

        def add(number: float) -> None:
            if least <= number <= most:
                with lock:
                    values[0] += number / divisor
            else:
                self._refuse(series.name, number)

        def observe(number: float) -> None:
            if least <= number <= most:
                number /= divisor
                bucket = bisect_left(bounds, number)
                with lock:
                    values[bucket] += 1
                    values[-1] += number
            else:
                self._refuse(series.name, number)

        return {Kind.GAUGE: set_gauge, Kind.COUNTER: add, Kind.HISTOGRAM: observe}[key.type.kind]

    def _refuse(self, series: str, number: float) -> None:
        if math.isfinite(number):
            self._drop(NEGATIVE, f"{series} received the value {number}, but its values cannot be negative")
        else:
            self._drop(NOT_FINITE, f"{series} received the value {number}")

    def _drop(self, reason: str, what: str) -> None:
        with self._lock:
            self._memory.dropped[REASONS.index(reason)] += 1
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            logger.warning("%s. The value is dropped; further values of this kind are counted but not logged.", what)


def _to_number(value: object) -> float:
    """Convert a number, or an array or tensor with one element, to a float; raise TypeError for a string."""
    if callable(item := getattr(value, "item", None)):
        value = item()  # torch and numpy may warn about a direct conversion
    if not isinstance(value, SupportsFloat | SupportsIndex):  # float() would parse a string
        raise TypeError
    return float(value)
