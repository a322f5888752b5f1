"""What the operator tells of itself under /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

if TYPE_CHECKING:
    from collections.abc import Callable

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics:
    """The operator's own series.

    Attributes:
        registry: has them all, and those of the process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reconciles = Counter(
            "elastic_operator_reconciles",
            "Times that a job was looked at, by how that went: done, failed (tried again), defect (of the operator).",
            ["result"],
            registry=self.registry,
        )
        for result in ("done", "failed", "defect"):
            self._reconciles.labels(result)
        self._seconds = Histogram(
            "elastic_operator_reconcile_duration_seconds",
            "How long it took to look at a job and to do what was to be done.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._requests = Counter(
            "elastic_operator_api_requests",
            "Requests to the API server by verb and code, 0 where it did not answer; those of the watches apart.",
            ["verb", "code"],
            registry=self.registry,
        )
        self._gauges: list[Gauge] = []

    def reconciled(self, seconds: float, result: str) -> None:
        """A job was looked at.

        Args:
            seconds: how long it took.
            result: done, failed or defect.
        """
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def asked(self, verb: str, code: int) -> None:
        """The API server was asked, and answered with this code."""
        self._requests.labels(verb.lower(), str(code)).inc()

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A number that is asked for whenever somebody looks."""
        gauge = Gauge(name, help_text, registry=self.registry)
        gauge.set_function(value)
        self._gauges.append(gauge)
