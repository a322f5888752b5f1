"""What the agent measures of itself, as values of the group ``torchelastic``, under torchelastic's documented names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torchelastic.metrics import series
from torchelastic.metrics.api import REGISTRY, MetricData, measured
from torchelastic.metrics.series import PLATFORM_GROUP, printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.prometheus import PrometheusMetricHandler
    from torchelastic.metrics.series import Series
    from torchelastic.protocol import RoundReason
    from torchelastic.rendezvous.node import RendezvousNode

WorkerStateName = Literal["unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed"]
"""The states that the workers of a node can be in, as torchelastic names them."""


class AgentMetrics:
    """Measures what happens in an agent.

    Values go to whatever the program configured for the group, and to :attr:`handler` after that was asked for.

    Args:
        registry: where values go.
        job: namespace and name of the job, labels of all that :meth:`registry` shows; None for no such labels.
    """

    def __init__(self, registry: MetricRegistry = REGISTRY, *, job: tuple[str, str] | None = None) -> None:
        self._registry = registry
        self._job = job
        self._run: RendezvousNode | None = None
        self._handler: PrometheusMetricHandler | None = None

    @property
    def handler(self) -> PrometheusMetricHandler:
        """What the agent's /metrics shows; attached to the registry when it is asked for the first time."""
        if self._handler is None:
            from torchelastic.metrics.prometheus import PrometheusMetricHandler

            self._handler = PrometheusMetricHandler(declared=self._registry)
            self._registry.attach(self._handler)
        return self._handler

    def registry(self, *beside: Collector) -> CollectorRegistry:
        """The series of an agent's /metrics: those of :attr:`handler`, of the run, and of other collectors.

        Args:
            beside: the others; if they have a family of the same name, its series are in one. One that raises is
                left out, and that is logged.
        """
        from prometheus_client import CollectorRegistry

        from torchelastic.metrics.collectors import MetricsPage, RunCollector

        labels = {}
        if self._job is not None:
            labels = dict(zip(("job_namespace", "elasticjob"), map(printable, self._job), strict=True))
        registry = CollectorRegistry()
        registry.register(MetricsPage((self.handler, RunCollector(lambda: self._run), *beside), labels))
        return registry

    def follow(self, run: RendezvousNode) -> None:
        """Show the totals of this run while this agent leads it."""
        self._run = run

    def round(self, number: int, world_size: int) -> None:
        """A new round began; a world size of 0 says that too few nodes are there to train."""
        self._registry.add(PLATFORM_GROUP, "round", number)
        self._registry.add(PLATFORM_GROUP, "world_size", world_size)

    def worker_state(self, role: str, state: WorkerStateName) -> None:
        """The workers of this node went into a state."""
        self._put(f"workers.{role}.{state}", 1, series.WORKER_STATE, role=role, state=state)

    def remaining_restarts(self, role: str, remaining: int) -> None:
        """The number of failures of workers that the run may still have."""
        self._put(f"workers.{role}.remaining_restarts", remaining, series.REMAINING_RESTARTS, role=role)

    def recovered(self, seconds: float, reason: RoundReason) -> None:
        """The workers of this node were started again.

        Args:
            seconds: since the failure or change was seen.
            reason: what had happened.
        """
        self._put(f"recovery.{reason}.duration.ms", seconds * 1000, series.RECOVERY, cause=str(reason))

    def run_ended(self, role: str, *, succeeded: bool, restarts: int, max_restarts: int | None = None) -> None:
        """The run has ended.

        Args:
            role: of the workers.
            succeeded: how.
            restarts: failures of workers charged to the run.
            max_restarts: how many it may have had; if given, the flakiness is measured, too.
        """
        self._put(f"workers.{role}.run_total", 1, series.RUNS, role=role)
        for name, outcome, happened in (("success", "success", succeeded), ("failed", "failure", not succeeded)):
            for ending, retries, value in (
                ("with_retries", "yes", happened and restarts > 0),
                ("no_retries", "no", happened and restarts == 0),
            ):
                labels = {"role": role, "outcome": outcome, "retries": retries}
                self._put(f"workers.{role}.run_{name}_{ending}", int(value), series.RUN_OUTCOMES, **labels)
        if max_restarts is not None:
            spent = min(restarts / (max_restarts + 1), 1.0) if succeeded else 1.0
            self._put(f"workers.{role}.flakiness", 100 * spent, series.FLAKINESS, role=role)

    def measured(self, operation: str) -> AbstractContextManager[None]:
        """Measure the success and the duration of a block.

        Args:
            operation: one of :data:`~torchelastic.metrics.series.OPERATIONS`.
        """
        return measured(operation, PLATFORM_GROUP, self._registry)

    def took(self, operation: str, seconds: float, *, succeeded: bool) -> None:
        """An operation has ended that is no block of its own.

        Args:
            operation: one of :data:`~torchelastic.metrics.series.OPERATIONS`.
            seconds: how long it took.
            succeeded: how it ended.
        """
        self._registry.add(PLATFORM_GROUP, f"{operation}.{'success' if succeeded else 'failure'}", 1)
        self._registry.add(PLATFORM_GROUP, f"{operation}.duration.ms", seconds * 1000)

    def store_answered(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """A request to the store has ended."""
        if self._handler is not None:  # the only one that gets these: they are too many for a program's handler
            outcome = "success" if succeeded else "failure"
            name = f"store.{request}.{outcome}"
            self._declare(name, series.STORE_REQUEST, request=request, outcome=outcome)
            self._handler.emit(MetricData(0.0, PLATFORM_GROUP, name, seconds))

    def _put(self, name: str, value: float, family: Series, **labels: str) -> None:
        """Measure a value under torchelastic's name, which becomes this series."""
        self._declare(name, family, **labels)
        self._registry.add(PLATFORM_GROUP, name, value)

    def _declare(self, name: str, family: Series, **labels: str) -> None:
        self._registry.declare(PLATFORM_GROUP, {name: family.labelled(**labels)})
