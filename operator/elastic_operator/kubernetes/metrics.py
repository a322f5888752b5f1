"""The operator's own metrics."""

from __future__ import annotations

import enum
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.json_values import Json, get_dict, get_dicts, get_int, get_str
from elastic_operator.api.spec import MANAGER, current_spec
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import Job, Plan, PodEnd, TerminationCause
from elastic_operator.kubernetes.client import PODS, Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Cause(enum.StrEnum):
    """Why workers, or a pod, were restarted."""

    WORKER_FAILED = "worker_failed"
    """Workers were restarted after a failure that counts against ``maxRestarts``."""
    UNCHARGED = "uncharged"
    """Workers were restarted after a change of the members, or after a failure that the failure policy ignores."""
    POD_DIED = "pod_died"
    POD_OUT_OF_MEMORY = "pod_out_of_memory"
    POD_DISRUPTED = "pod_disrupted"
    """A pod was preempted, drained or evicted."""
    NODE_LOST = "node_lost"
    NOT_ADMITTED = "not_admitted"
    """A pod was not admitted by its node."""
    POD_LEFT = "pod_left"
    """A pod was deleted by a user, or its agent was asked to leave."""


_BY_TERMINATION: Final[Mapping[TerminationCause | None, Cause]] = {
    TerminationCause.OUT_OF_MEMORY: Cause.POD_OUT_OF_MEMORY,
    TerminationCause.DISRUPTED: Cause.POD_DISRUPTED,
    TerminationCause.NODE_LOST: Cause.NODE_LOST,
    TerminationCause.NOT_ADMITTED: Cause.NOT_ADMITTED,
}


_JOB_FAMILIES: Final = {
    "desired_pods": ("Desired pods of a job.",),
    "ready_pods": ("Pods of a job that are ready.",),
    "min_pods": ("Pods that a job needs to train.",),
    "condition": ("Whether a condition of a job holds. Conditions that a job never had are absent.", "condition"),
    "restarts": ("Restarts by cause: worker_failed and uncharged of workers, pod_failed of pods.", "cause"),
    "max_restarts": ("Maximum number of restarts of a job with the cause worker_failed.",),
    "backoff_limit": ("Maximum number of restarts of a job with the cause pod_failed.",),
    "etcd_certificate_expiry_timestamp_seconds": (
        "When the first of the certificates in a job's spec.etcd.tlsSecret expires, in seconds since the epoch.",
    ),
}
"""The metrics of a job: the help text by name, and an additional label if there is one."""


class JobCollector(Collector):
    """Exports the number of jobs by condition. Only the leader exports metrics of jobs, so that sums are correct."""

    def __init__(
        self,
        bodies: Callable[[], Iterable[Json]],
        is_leader: Callable[[], bool],
        expiries: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._bodies = bodies
        self._is_leader = is_leader
        self._expiries = expiries

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        jobs, counts = tuple(self._bodies()), dict.fromkeys(map(str, ConditionType), 0)
        for condition in (each for body in jobs for each in get_dicts(body, "status", "conditions")):
            if condition.get("type") in counts and condition.get("status") == "True":
                counts[str(condition["type"])] += 1
        total = GaugeMetricFamily(
            "elastic_operator_jobs", "Number of jobs with each condition; a job may have several.", labels=["condition"]
        )
        for kind, count in counts.items():
            total.add_metric([kind], count)
        yield total
        families = {
            name: (CounterMetricFamily if name == "restarts" else GaugeMetricFamily)(
                f"elastic_operator_job_{name}", about, labels=["job_namespace", "elasticjob", *label]
            )
            for name, (about, *label) in _JOB_FAMILIES.items()
        }
        for name, labels, value in (each for body in jobs if self._is_leader() for each in _series(body)):
            if value is not None:
                families[name].add_metric(labels, value)
        for key, expiry in self._expiries().items():
            families["etcd_certificate_expiry_timestamp_seconds"].add_metric(key.split("/"), expiry)
        yield from families.values()


def _series(body: Json) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    spec, status = get_dict(body, "spec"), get_dict(body, "status")
    if get_str(spec, "managedBy") not in ("", MANAGER):
        return
    spec = current_spec(spec)
    job = get_str(body, "metadata", "namespace"), get_str(body, "metadata", "name")
    yield "desired_pods", job, get_int(status, "desired")
    yield "ready_pods", job, get_int(status, "readyReplicas") or 0
    yield "min_pods", job, get_int(spec, "minReplicas")
    for condition in get_dicts(status, "conditions"):
        # A store that the operator may not read does not count as unreachable.
        if (kind := condition.get("type")) in list(ConditionType) and condition.get("reason") != Reason.NOT_ALLOWED:
            yield "condition", (*job, str(kind)), int(condition.get("status") == "True")
    yield "restarts", (*job, Cause.WORKER_FAILED), get_int(status, "restarts") or 0
    yield "restarts", (*job, Cause.UNCHARGED), get_int(status, "unchargedRestarts") or 0
    yield "restarts", (*job, "pod_failed"), get_int(status, "podFailures") or 0
    max_restarts, backoff_limit = get_int(spec, "maxRestarts"), get_int(spec, "backoffLimit")
    yield "max_restarts", job, max_restarts
    yield "backoff_limit", job, max_restarts if backoff_limit is None else backoff_limit


_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_START_BUCKETS: Final = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)


class OperatorMetrics:
    """The series under /metrics.

    Attributes:
        waits: the histogram of the seconds that jobs waited in the queue.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._reconciles = counter(
            "elastic_operator_reconciles",
            "Reconciles by result: success, error (tried again), panic (a defect of the operator).",
            ["result"],
        )
        for result in ("success", "error", "panic"):
            self._reconciles.labels(result)
        self._seconds = histogram(
            "elastic_operator_reconcile_duration_seconds", "Duration of a reconcile.", buckets=_BUCKETS
        )
        self.waits = histogram(
            "elastic_operator_queue_latency_seconds", "How long a job waited in the queue.", buckets=_BUCKETS
        )
        self._requests = counter(
            "elastic_operator_api_requests",
            "Requests to the API server by verb and code, without those of watches; the code 0 means no response.",
            ["verb", "code"],
        )
        self._pods = counter("elastic_operator_pods_created", "Created worker pods.")
        self._restarts = counter(
            "elastic_operator_restarts",
            "Restarts by cause: worker_failed and uncharged restart the workers of a job, every other cause a pod.",
            ["cause"],
        )
        for cause in Cause:
            self._restarts.labels(cause.value)
        self._starts = histogram(
            "elastic_operator_apply_to_running_seconds",
            "Time until a job trains, from its creation, or from its resumption if it was created suspended.",
            buckets=_START_BUCKETS,
        )

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page under /metrics and its content type, for an ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def reconciled(self, seconds: float, result: str) -> None:
        """Count a reconcile with the result success, error or panic."""
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def requested(self, verb: str, code: int) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb.lower(), str(code)).inc()

    def created(self, resource: Resource) -> None:
        """Count a created object."""
        if resource == PODS:
            self._pods.inc()

    def status_written(self, job: Job, plan: Plan) -> None:
        """Count the restarts that a new status adds, and record the time until the job trained for the first time."""
        before, after = job.status, plan.status
        if after is None:
            return
        self._restarts.labels(Cause.WORKER_FAILED).inc(after.restarts - before.restarts)
        self._restarts.labels(Cause.UNCHARGED).inc(after.uncharged_restarts - before.uncharged_restarts)
        for ended in plan.ended:
            cause = Cause.POD_LEFT if ended.end is PodEnd.LEFT else Cause.POD_DIED
            self._restarts.labels(_BY_TERMINATION.get(ended.pod.termination_cause, cause)).inc()
        if before.started is None and after.started is not None and after.state is not JobState.SUSPENDED:
            was_suspended = any(each.type == ConditionType.SUSPENDED for each in after.conditions)
            since = after.active if was_suspended and after.active is not None else job.created
            self._starts.observe(max(time.time() - since, 0.0))

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed for each scrape."""
        Gauge(name, help_text, registry=self.registry).set_function(value)
