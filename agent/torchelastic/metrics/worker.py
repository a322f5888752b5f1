"""A worker's side of its metrics: beside whatever the program configures, its values also reach its agent.

Nothing has to be called for that: a process that an agent has started finds the memory by a variable when this package
is imported. One process at a time writes there. That is the worker; what it forks, or has :mod:`multiprocessing` start,
measures for itself alone.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series import Form, Kind
from torchelastic.metrics.shared_memory import MemoryWriter
from torchelastic.metrics.validation import ValidatingHandler
from torchelastic.training.agent_socket import METRICS_FILE, is_worker

if TYPE_CHECKING:
    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.series import Series
    from torchelastic.metrics.validation import Sink

MAX_NAMES: Final = 1000
"""Different names of a worker that its agent shows; the platform's own have a limit of the same size beside it."""


class WorkerMetricHandler(ValidatingHandler):
    """Leaves values where the agent finds them.

    Args:
        memory: where that is.
        registry: knows what was declared.
    """

    def __init__(self, memory: MemoryWriter, registry: MetricRegistry = REGISTRY) -> None:
        super().__init__(registry.form, MAX_NAMES)
        self._memory = memory

    def _open(self, series: Series, source: tuple[str, ...], *, of_platform: bool) -> Sink | None:  # noqa: ARG002
        place = self._memory.place(source, Form(series.kind, series.buckets))
        if place is None:
            return None
        match series.kind:
            case Kind.GAUGE:
                return self._gauge(place, series.divisor)
            case Kind.COUNTER:
                return self._counter(place, series.divisor)
            case Kind.HISTOGRAM:
                return self._histogram(place, series)

    def _gauge(self, place: int, divisor: float) -> Sink:
        values = self._memory.values

        def hold(number: float) -> None:
            values[place] = number / divisor

        return hold

    def _counter(self, place: int, divisor: float) -> Sink:
        values, lock = self._memory.values, self._lock

        def add(number: float) -> None:
            with lock:
                values[place] += number / divisor

        return add

    def _histogram(self, place: int, series: Series) -> Sink:
        values, lock, divisor, bounds = self._memory.values, self._lock, series.divisor, series.buckets
        total = place + len(bounds) + 1

        def observe(number: float) -> None:
            number /= divisor
            bucket = place + bisect_left(bounds, number)
            with lock:
                values[bucket] += 1
                values[total] += number

        return observe

    def _begun(self) -> None:
        self._memory.publish()

    def _count_dropped(self, reason: str) -> None:
        with self._lock:
            self._memory.count_dropped(reason)


def attach(registry: MetricRegistry = REGISTRY) -> None:
    """Where an agent has started this process, have what it measures reach that; elsewhere nothing happens."""
    path = os.environ.get(METRICS_FILE)
    if not path or not is_worker() or any(isinstance(handler, WorkerMetricHandler) for handler in registry.attached):
        return
    try:
        memory = MemoryWriter(path)
    except (OSError, ValueError):  # another process of this worker writes there, or the agent is gone
        return
    handler = WorkerMetricHandler(memory, registry)
    registry.attach(handler)
    os.register_at_fork(after_in_child=functools.partial(registry.after_fork, handler))
