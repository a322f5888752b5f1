"""The operator's own metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from elastic_operator.kubernetes.job_metrics import jobs_by_condition, jobs_text
from elastic_operator.kubernetes.kinds import PODS
from elastic_operator.kubernetes.restart_metrics import Cause, restarts, seconds_to_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_operator.api.spec import Json
    from elastic_operator.controller.model import Job, Plan, Pod
    from elastic_operator.kubernetes.kinds import Resource

_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_START_BUCKETS: Final = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
_EOF: Final = b"# EOF\n"
"""The end of the OpenMetrics format."""


class OperatorMetrics:
    """The series under /metrics.

    Attributes:
        registry: has them, except for those of each job.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._reconciles = Counter(
            "elastic_operator_reconciles",
            "Reconciles by result: success, error (tried again), panic (a defect of the operator).",
            ["result"],
            registry=registry,
        )
        for result in ("success", "error", "panic"):
            self._reconciles.labels(result)
        self._seconds = Histogram(
            "elastic_operator_reconcile_duration_seconds",
            "Duration of a reconcile.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._waits = Histogram(
            "elastic_operator_queue_latency_seconds",
            "How long a job waited in the queue.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            "elastic_operator_api_requests",
            "Requests to the API server by verb and code, 0 without an answer; those of the watches apart.",
            ["verb", "code"],
            registry=registry,
        )
        self._pods = Counter("elastic_operator_pods_created", "Created worker pods.", registry=registry)
        self._restarts = Counter(
            "elastic_operator_restarts",
            "Restarts by cause: worker_failed and free (the workers of a job), the others a pod each.",
            ["cause"],
            registry=registry,
        )
        for cause in Cause:
            self._restarts.labels(cause.value)
        self._starts = Histogram(
            "elastic_operator_apply_to_running_seconds",
            "Time from a job's creation, or from the resumption of one created suspended, until it trains.",
            buckets=_START_BUCKETS,
            registry=registry,
        )
        self._jobs: Callable[[], Iterable[Json]] = lambda: ()
        self._gauges: list[Gauge] = []

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page under /metrics and its content type.

        Args:
            accept: the header of that name.
        """
        encode, content_type = choose_encoder(accept)
        page = encode(self.registry)
        open_metrics = page.endswith(_EOF)
        jobs = jobs_text(self._jobs(), open_metrics=open_metrics).encode()
        return (page.removesuffix(_EOF) + jobs + _EOF if open_metrics else page + jobs), content_type

    def reconciled(self, seconds: float, result: str) -> None:
        """Count a reconcile with the result success, error or panic."""
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def requested(self, verb: str, code: int) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb.lower(), str(code)).inc()

    def waited(self, seconds: float) -> None:
        """Count the time that a job waited in the queue."""
        self._waits.observe(seconds)

    def created(self, resource: Resource) -> None:
        """Count a created object."""
        if resource == PODS:
            self._pods.inc()

    def status_written(self, job: Job, plan: Plan, pods: Iterable[Pod], now: float) -> None:
        """Count what a written status accounts for.

        Args:
            job: with the status that it had before.
            plan: with the new status.
            pods: all of its pods that exist, or existed just now.
            now: seconds since the Unix epoch.
        """
        if plan.status is None:
            return
        for cause, count in restarts(job, plan, pods).items():
            self._restarts.labels(cause.value).inc(count)
        seconds = seconds_to_running(job, plan.status, now)
        if seconds is not None:
            self._starts.observe(seconds)

    def jobs(self, bodies: Callable[[], Iterable[Json]], is_leader: Callable[[], bool]) -> None:
        """Show the number of jobs by condition and, on the leader alone so that sums are right, each job."""
        self.registry.register(jobs_by_condition(bodies))
        self._jobs = lambda: bodies() if is_leader() else ()

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Show a number that is computed for each scrape."""
        gauge = Gauge(name, help_text, registry=self.registry)
        gauge.set_function(value)
        self._gauges.append(gauge)
