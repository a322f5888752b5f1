"""The agent's own metrics: values of the group ``torchelastic`` under torchelastic's documented names."""

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
"""The states of a node's workers, as torchelastic names them."""


class AgentMetrics:
    """Records the metrics of an agent.

    Values go to the configured handlers of the group, and to :attr:`handler` after its first use.

    Args:
        registry: receives the values.
        job: namespace and name of the job, added as labels to all series of :meth:`registry`; None for no labels.
    """

    def __init__(self, registry: MetricRegistry = REGISTRY, *, job: tuple[str, str] | None = None) -> None:
        self._registry = registry
        self._job = job
        self._run: RendezvousNode | None = None
        self._handler: PrometheusMetricHandler | None = None

    @property
    def handler(self) -> PrometheusMetricHandler:
        """The handler behind the agent's /metrics; attached to the registry at its first use."""
        if self._handler is None:
            from torchelastic.metrics.prometheus import PrometheusMetricHandler

            self._handler = PrometheusMetricHandler(declared=self._registry)
            self._registry.attach(self._handler)
        return self._handler

    def registry(self, *beside: Collector) -> CollectorRegistry:
        """Return the series of the agent's /metrics: those of :attr:`handler`, of the run, and of other collectors.

        Args:
            beside: the other collectors; families of the same name are merged. A collector that raises is left out
                and logged.
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
        """Record a new round; a world size of 0 means that too few nodes are present to train."""
        self._registry.add(PLATFORM_GROUP, "round", number)
        self._registry.add(PLATFORM_GROUP, "world_size", world_size)

    def worker_state(self, role: str, state: WorkerStateName) -> None:
        """Record the state of this node's workers."""
        self._put(f"workers.{role}.{state}", 1, series.WORKER_STATE, role=role, state=state)

    def remaining_restarts(self, role: str, remaining: int) -> None:
        """Record how many failures of workers the run may still have."""
        self._put(f"workers.{role}.remaining_restarts", remaining, series.REMAINING_RESTARTS, role=role)

    def recovered(self, seconds: float, reason: RoundReason) -> None:
        """Record a restart of this node's workers.

        Args:
            seconds: the time since the failure or change was noticed.
            reason: the reason of the restart.
        """
        self._put(f"recovery.{reason}.duration.ms", seconds * 1000, series.RECOVERY, cause=str(reason))

    def run_ended(self, role: str, *, succeeded: bool, restarts: int, max_restarts: int | None = None) -> None:
        """Record the end of the run.

        Args:
            role: the role of the workers.
            succeeded: whether the run succeeded.
            restarts: failures of workers that were charged to the run.
            max_restarts: the restart budget; if given, the flakiness is recorded too.
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
        """Record an operation that is not measured as a block.

        Args:
            operation: one of :data:`~torchelastic.metrics.series.OPERATIONS`.
            seconds: its duration.
            succeeded: whether it succeeded.
        """
        self._registry.add(PLATFORM_GROUP, f"{operation}.{'success' if succeeded else 'failure'}", 1)
        self._registry.add(PLATFORM_GROUP, f"{operation}.duration.ms", seconds * 1000)

    def store_answered(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """Record a request to the store."""
        if self._handler is not None:  # other handlers do not receive these values, because there are too many
            outcome = "success" if succeeded else "failure"
            name = f"store.{request}.{outcome}"
            self._declare(name, series.STORE_REQUEST, request=request, outcome=outcome)
            self._handler.emit(MetricData(0.0, PLATFORM_GROUP, name, seconds))

    def _put(self, name: str, value: float, family: Series, **labels: str) -> None:
        """Record a value under torchelastic's name, for this series."""
        self._declare(name, family, **labels)
        self._registry.add(PLATFORM_GROUP, name, value)

    def _declare(self, name: str, family: Series, **labels: str) -> None:
        self._registry.declare(PLATFORM_GROUP, {name: family.labelled(**labels)})
