"""The metrics of each job, taken from the job's object for each scrape.

The lines are written here: the client library takes thirty times as long, and thousands of jobs have tens of thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.json_access import integer, mapping, mappings, text
from elastic_operator.api.legacy import modern
from elastic_operator.api.spec import MANAGER
from elastic_operator.kubernetes.restart_metrics import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from elastic_operator.api.spec import Json

_CONDITIONS: Final = tuple(map(str, ConditionType))
_PREFIX: Final = "elastic_operator_job_"
_FAMILIES: Final = {
    "desired_pods": "Pods that a job is to have.",
    "ready_pods": "Pods of a job that are ready.",
    "min_pods": "Pods that a job needs to train.",
    "condition": "Whether a condition of a job holds, for those that it ever had.",
    "restarts": "Restarts by cause: worker_failed (charged) and free (not) of workers, pod_failed of pods.",
    "max_restarts": "Restarts because of worker_failed that a job may have.",
    "backoff_limit": "Restarts because of pod_failed that a job may have.",
}
_COUNTERS: Final = frozenset({"restarts"})


def jobs_text(bodies: Iterable[Json], *, open_metrics: bool) -> str:
    """The lines for all jobs, in the OpenMetrics or the older text format."""
    lines: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    for body in bodies:
        for name, labels, value in _series(body):
            if value is not None:
                total = "_total" if name in _COUNTERS else ""
                lines[name].append(f"{_PREFIX}{name}{total}{{{labels}}} {value}\n")
    return "".join(_family(name, series, open_metrics=open_metrics) for name, series in lines.items())


class jobs_by_condition(Collector):  # noqa: N801 - used like a function
    """Counts the jobs for which each condition holds."""

    def __init__(self, bodies: Callable[[], Iterable[Json]]) -> None:
        self._bodies = bodies

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count now."""
        counts = dict.fromkeys(_CONDITIONS, 0)
        for body in self._bodies():
            for condition in mappings(body, "status", "conditions"):
                if condition.get("type") in counts and condition.get("status") == "True":
                    counts[str(condition["type"])] += 1
        (family,) = self.describe()
        for condition_type, count in counts.items():
            family.add_metric([condition_type], count)
        yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The family without values."""
        yield GaugeMetricFamily(
            "elastic_operator_jobs", "Jobs for which a condition holds; several may hold for one.", labels=["condition"]
        )


def _series(body: Json) -> Iterator[tuple[str, str, int | None]]:
    spec, status = mapping(body, "spec"), mapping(body, "status")
    if text(spec, "managedBy") not in ("", MANAGER):
        return
    spec = modern(spec)
    job = f'job_namespace="{text(body, "metadata", "namespace")}",elasticjob="{text(body, "metadata", "name")}"'
    yield "desired_pods", job, integer(status, "desired")
    yield "ready_pods", job, integer(status, "readyReplicas") or 0
    yield "min_pods", job, integer(spec, "minReplicas")
    for condition in mappings(status, "conditions"):
        # A store that the operator may not read is not one that is unreachable.
        if (kind := condition.get("type")) in _CONDITIONS and condition.get("reason") != Reason.NOT_ALLOWED:
            yield "condition", f'{job},condition="{kind}"', int(condition.get("status") == "True")
    yield "restarts", f'{job},cause="{Cause.WORKER_FAILED}"', integer(status, "restarts") or 0
    yield "restarts", f'{job},cause="{Cause.FREE}"', integer(status, "unchargedRestarts") or 0
    yield "restarts", f'{job},cause="pod_failed"', integer(status, "podFailures") or 0
    max_restarts = integer(spec, "maxRestarts")
    backoff_limit = integer(spec, "backoffLimit")
    yield "max_restarts", job, max_restarts
    yield "backoff_limit", job, max_restarts if backoff_limit is None else backoff_limit


def _family(name: str, lines: Iterable[str], *, open_metrics: bool) -> str:
    kind = "counter" if name in _COUNTERS else "gauge"
    full = f"{_PREFIX}{name}{'_total' if kind == 'counter' and not open_metrics else ''}"
    return f"# HELP {full} {_FAMILIES[name]}\n# TYPE {full} {kind}\n{''.join(lines)}"
