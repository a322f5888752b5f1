"""Handlers for people who read a console.

:class:`~torchelastic.metrics.prometheus.PrometheusMetricHandler` has a module of its own, since it needs a library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchelastic.metrics.api import MetricHandler, NullMetricHandler

if TYPE_CHECKING:
    from torchelastic.metrics.api import MetricData

__all__ = ["ConsoleMetricHandler", "ConsoleMetricsHandler", "NullMetricHandler"]


class ConsoleMetricHandler(MetricHandler):
    """Prints each value: ``[timestamp][group]: name=value``."""

    def emit(self, metric_data: MetricData) -> None:
        """Print one line to the standard output."""
        timestamp, group, name, value = metric_data
        # In one piece, so that lines of several threads do not mix.
        sys.stdout.write(f"[{timestamp}][{group}]: {name}={value}\n")


ConsoleMetricsHandler = ConsoleMetricHandler
"""The same under the other name that torchelastic's documentation has for it."""
