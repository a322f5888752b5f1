"""What the operator tells of itself under /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic_operator.kube.job_metrics import JobSeries
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.tally import Cause, restarts, seconds_to_running
from elastic_operator.names import ConditionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from elastic_operator.kube.resources import Resource
    from elastic_operator.model import Job, Plan, Pod
    from elastic_operator.spec import Json

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_END = b"# EOF\n"
"""With this the newer of the two formats ends."""
_STARTS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
"""Seconds from apply to running: images are pulled meanwhile, and places in the cluster waited for."""


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
        self._waits = Histogram(
            "elastic_operator_queue_latency_seconds",
            "How long a job that was to be looked at waited for its turn.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._requests = Counter(
            "elastic_operator_api_requests",
            "Requests to the API server by verb and code, 0 where it did not answer; those of the watches apart.",
            ["verb", "code"],
            registry=self.registry,
        )
        self._pods = Counter("elastic_operator_pods_created", "Worker pods that were made.", registry=self.registry)
        self._restarts = Counter(
            "elastic_operator_restarts",
            "Times that workers or pods were started anew, by cause: worker_failed and free (the workers of a job, as "
            "its agents count them), the others a pod each.",
            ["cause"],
            registry=self.registry,
        )
        for cause in Cause:
            self._restarts.labels(cause.value)
        self._starts = Histogram(
            "elastic_operator_apply_to_running_seconds",
            "How long it took from a job's making, or from the resumption of one made suspended, until it trained.",
            buckets=_STARTS,
            registry=self.registry,
        )
        self._gauges: list[Gauge] = []
        self._series: JobSeries | None = None

    def page(self, accept: str) -> tuple[bytes, str]:
        """What is shown to whoever looks, and of which type that is.

        Args:
            accept: the types that are understood, as in the header of that name.
        """
        encode, content_type = choose_encoder(accept)
        page = encode(self.registry)
        if self._series is None:
            return page, content_type
        jobs = self._series.text(open_metrics=page.endswith(_END)).encode()
        return (page.removesuffix(_END) + jobs + _END if page.endswith(_END) else page + jobs), content_type

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

    def waited(self, seconds: float) -> None:
        """A job that was to be looked at had to wait so long for its turn."""
        self._waits.observe(seconds)

    def made(self, resource: Resource) -> None:
        """An object of this kind was made."""
        if resource == PODS:
            self._pods.inc()

    def written(self, job: Job, plan: Plan, pods: Iterable[Pod], now: float) -> None:
        """A job's status was written.

        Args:
            job: with the status that it had before.
            plan: what was planned then.
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

    def jobs(self, bodies: Callable[[], Iterable[Json]], acts: Callable[[], bool] = lambda: True) -> None:
        """Show how many jobs have which condition, and how each of them stands.

        Args:
            bodies: gives all jobs.
            acts: whether this copy of the operator acts: of each job that one tells alone, so that sums are right.
        """
        self.registry.register(_JobsByCondition(bodies))
        self._series = JobSeries(lambda: bodies() if acts() else ())

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A number that is asked for whenever somebody looks."""
        gauge = Gauge(name, help_text, registry=self.registry)
        gauge.set_function(value)
        self._gauges.append(gauge)


class _JobsByCondition(Collector):
    """How many jobs have which condition, counted when somebody looks."""

    def __init__(self, bodies: Callable[[], Iterable[Json]]) -> None:
        self._bodies = bodies

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The jobs that there are now."""
        family = GaugeMetricFamily(
            "elastic_operator_jobs", "Jobs of which this condition holds; of one job several may.", labels=["condition"]
        )
        for condition, count in _counted(self._bodies()).items():
            family.add_metric([condition], count)
        yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """What would be shown, without looking."""
        yield GaugeMetricFamily("elastic_operator_jobs", "", labels=["condition"])


def _counted(bodies: Iterable[Json]) -> Mapping[str, int]:
    counts = dict.fromkeys(map(str, ConditionType), 0)
    for body in bodies:
        for condition in (body.get("status") or {}).get("conditions") or ():
            kind = condition.get("type")
            if kind in counts and condition.get("status") == "True":
                counts[kind] += 1
    return counts
