"""What the agent says of itself, as values of the group ``torchelastic``.

The names are torchelastic's documented ones, so that a handler of the user's for that group sees what it always saw.
:mod:`torchelastic.metrics.series` has the table of the series that they become.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from torchelastic.metrics.api import PLATFORM_GROUP, REGISTRY, measured
from torchelastic.metrics.run_collector import RunCollector
from torchelastic.metrics.series import printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.prometheus import PrometheusMetricHandler
    from torchelastic.metrics.run_collector import Run
    from torchelastic.metrics.store_requests import StoreRequests
    from torchelastic.protocol import RoundReason

WorkerStateName = Literal["unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed"]
"""The states that the workers of a node can be in, as torchelastic names them."""


class AgentMetrics:
    """Tells the registry what happens in an agent.

    Values go to whatever the program configured for the group. Once :attr:`handler` has been asked for they, and those
    of every other group, also go there; before, a value without a handler costs next to nothing.

    Args:
        registry: where values go.
        job: namespace and name of the job, labels of all that :meth:`registry` shows; None for no such labels.
    """

    def __init__(self, registry: MetricRegistry = REGISTRY, *, job: tuple[str, str] | None = None) -> None:
        self._registry = registry
        self._job = job
        self._handler: PrometheusMetricHandler | None = None
        self._store_requests: StoreRequests | None = None
        self._run_collector = RunCollector()

    @property
    def handler(self) -> PrometheusMetricHandler:
        """What stands behind the agent's /metrics; attached to the registry when it is asked for the first time."""
        if self._handler is None:
            from torchelastic.metrics.prometheus import PrometheusMetricHandler

            self._handler = PrometheusMetricHandler()
            self._registry.attach(self._handler)
        return self._handler

    def registry(self, *beside: Collector) -> CollectorRegistry:
        """What an agent's /metrics shows: what stands behind :attr:`handler`, and what others collect.

        Args:
            beside: the others; where they have a family of the same name, its series stand in one. One that raises is
                left out, and that is logged.
        """
        from prometheus_client import CollectorRegistry

        from torchelastic.metrics.exposition import MetricsPage
        from torchelastic.metrics.store_requests import StoreRequests

        if self._store_requests is None:
            self._store_requests = StoreRequests()
        labels = {}
        if self._job is not None:
            labels = dict(zip(("job_namespace", "elasticjob"), map(printable, self._job), strict=True))
        registry = CollectorRegistry()
        registry.register(MetricsPage((self.handler, self._run_collector, self._store_requests, *beside), labels))
        return registry

    def close(self) -> None:
        """Detach the handler from the registry."""
        if self._handler is not None:
            self._registry.detach(self._handler)
            self._handler = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def follow(self, run: Run) -> None:
        """Show this run as a whole wherever this agent leads it."""
        self._run_collector.follow(run)

    def round(self, number: int, world_size: int) -> None:
        """A new round began; a world size of 0 says that too few nodes are there to train."""
        self._put("round", number)
        self._put("world_size", world_size)

    def worker_state(self, role: str, state: WorkerStateName) -> None:
        """The workers of this node went into a state."""
        self._put(f"workers.{role}.{state}", 1)

    def remaining_restarts(self, role: str, remaining: int) -> None:
        """So many failures of workers the run may still have."""
        self._put(f"workers.{role}.remaining_restarts", remaining)

    def recovered(self, seconds: float, reason: RoundReason) -> None:
        """The workers of this node were started again.

        Args:
            seconds: since the failure or change was seen.
            reason: what had happened; a label of the series, the sentence is for the log.
        """
        self._put(f"recovery.{reason}.duration.ms", seconds * 1000)

    def run_ended(self, role: str, *, succeeded: bool, restarts: int, max_restarts: int | None = None) -> None:
        """The run has ended.

        Args:
            role: of the workers.
            succeeded: how.
            restarts: failures of workers charged to the run.
            max_restarts: how many it may have had; where given, the flakiness is told too.
        """
        self._put(f"workers.{role}.run_total", 1)
        for outcome, happened in (("success", succeeded), ("failed", not succeeded)):
            self._put(f"workers.{role}.run_{outcome}_with_retries", int(happened and restarts > 0))
            self._put(f"workers.{role}.run_{outcome}_no_retries", int(happened and restarts == 0))
        if max_restarts is not None:
            spent = min(restarts / (max_restarts + 1), 1.0) if succeeded else 1.0
            self._put(f"workers.{role}.flakiness", 100 * spent)

    def measured(self, operation: str) -> AbstractContextManager[None]:
        """Measure the success and the duration of a block.

        Args:
            operation: one of :data:`~torchelastic.metrics.series.OPERATIONS`, as
                ``LocalElasticAgent._start_workers``.
        """
        return measured(operation, PLATFORM_GROUP, self._registry)

    def took(self, operation: str, seconds: float, *, succeeded: bool) -> None:
        """An operation has ended that is no block of its own.

        Args:
            operation: see :meth:`measured`.
            seconds: how long it took.
            succeeded: how it ended.
        """
        self._put(f"{operation}.{'success' if succeeded else 'failure'}", 1)
        self._put(f"{operation}.duration.ms", seconds * 1000)

    def store_answered(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """A request to the store has ended; see :class:`~torchelastic.store.wrappers.RequestEnded`."""
        if self._store_requests is not None:
            self._store_requests.answered(request, seconds, succeeded=succeeded)

    def _put(self, name: str, value: float) -> None:
        self._registry.add(PLATFORM_GROUP, name, value)
