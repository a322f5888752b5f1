"""The worker's side of its metrics: values also go to the agent, in addition to the configured handlers.

The import of this package in a worker opens the memory that an environment variable names. Only one process writes to
it at a time: the worker. Values of its forked and :mod:`multiprocessing` children do not reach the agent.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from torchelastic.agent_socket import METRICS_FILE, is_worker
from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series import Form
from torchelastic.metrics.shared_memory import MemoryWriter, Source
from torchelastic.metrics.validation import MAX_NAMES, SeriesHandler

if TYPE_CHECKING:
    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.series import Series
    from torchelastic.metrics.validation import Sink


class WorkerMetricHandler(SeriesHandler):
    """Writes values to the memory that the agent reads.

    Args:
        memory: the worker's memory.
        registry: has the declared names.
    """

    def __init__(self, memory: MemoryWriter, registry: MetricRegistry = REGISTRY) -> None:
        super().__init__(memory.words, registry.form, MAX_NAMES)
        self._memory = memory

    def _open(self, series: Series, group: str, name: str, *, of_platform: bool) -> Sink | None:  # noqa: ARG002
        place = self._memory.place(Source(group, name, Form(series.kind, series.buckets)))
        return None if place is None else self._sink_at(place, series)


def attach(registry: MetricRegistry = REGISTRY) -> None:
    """Send the values of this process also to its agent; without an agent, do nothing."""
    path = os.environ.get(METRICS_FILE)
    if not path or not is_worker() or any(isinstance(handler, WorkerMetricHandler) for handler in registry.attached):
        return
    try:
        memory = MemoryWriter(path)
    except (OSError, ValueError):  # another process of this worker writes to it, or the file is gone
        return
    handler = WorkerMetricHandler(memory, registry)
    registry.attach(handler)
    os.register_at_fork(after_in_child=functools.partial(registry.after_fork, handler))
