"""The operator's metrics of jobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.controller.plan import plan
from elastic_operator.kubernetes.metrics import Cause, JobCollector, OperatorMetrics
from tests.support.builders import (
    NOW,
    a_job,
    a_round,
    a_world,
    died,
    evicted,
    left,
    lost,
    out_of_memory,
    pending,
    preempted,
    rejected_by_node,
    running,
    terminating,
    that_had_pods,
    that_is_suspended,
    that_trained,
    with_status,
)

if TYPE_CHECKING:
    from elastic_operator.api.json_values import Json
    from elastic_operator.controller.model import Job, Observed, Plan, Pod


def counted(job: Job, observed: Observed) -> dict[Cause, int]:
    """Return the counters after two reconciles of a job, the second with the status that the first one wrote."""
    metrics = OperatorMetrics()
    for _ in range(2):
        todo = plan(job, observed, NOW)
        metrics.status_written(job, todo)
        if todo.status is not None:
            job = with_status(job, **{name: getattr(todo.status, name) for name in todo.status.__slots__})
    restarts = "elastic_operator_restarts_total"
    counts = {cause: metrics.registry.get_sample_value(restarts, {"cause": cause}) or 0 for cause in Cause}
    return {cause: int(count) for cause, count in counts.items() if count}


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        (died(1, 1), Cause.POD_DIED),
        (out_of_memory(1), Cause.POD_OUT_OF_MEMORY),
        (evicted(1), Cause.POD_DISRUPTED),
        (preempted(1), Cause.POD_DISRUPTED),
        (lost(1), Cause.NODE_LOST),
        (rejected_by_node(1), Cause.NOT_ADMITTED),
        (left(1), Cause.POD_LEFT),
        (terminating(1), Cause.POD_LEFT),
    ],
    ids=lambda value: value.value if isinstance(value, Cause) else "",
)
def test_each_replaced_pod_is_counted_once_by_cause(pod: Pod, cause: Cause) -> None:
    assert counted(that_trained(a_job()), a_world(running(0), pod)) == {cause: 1}


def test_pods_that_the_operator_deletes_are_not_counted() -> None:
    assert counted(that_trained(a_job(replicas=1)), a_world(running(0), running(1))) == {}
    assert counted(that_trained(a_job(suspend=True)), a_world(running(0), running(1))) == {}


def test_restarts_of_workers_are_counted_as_charged_or_uncharged() -> None:
    pods = running(0), running(1)
    world = a_world(*pods, round=a_round(*pods, number=7, restarts=3, free=2))
    assert counted(that_trained(a_job(), restarts=1), world) == {Cause.WORKER_FAILED: 2, Cause.UNCHARGED: 2}


def test_the_time_until_a_job_trains_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = running(0), running(1)
    world = a_world(*pods, round=a_round(*pods))
    job = that_had_pods(a_job())
    metrics = OperatorMetrics()

    def measured(job: Job, todo: Plan, now: float) -> float | None:
        monkeypatch.setattr("elastic_operator.kubernetes.metrics.time", SimpleNamespace(time=lambda: now))
        before = metrics.registry.get_sample_value("elastic_operator_apply_to_running_seconds_sum") or 0.0
        metrics.status_written(job, todo)
        return (metrics.registry.get_sample_value("elastic_operator_apply_to_running_seconds_sum") or 0.0) - before

    assert measured(job, plan(job, a_world(pending(0), pending(1)), NOW + 12), NOW + 12) == 0
    todo = plan(job, world, NOW + 12)
    assert todo.status is not None
    assert measured(job, todo, NOW + 12) == 12
    assert measured(with_status(job, started=todo.status.started), todo, NOW + 13) == 0
    resumed = that_is_suspended(a_job(), started=None, round=0, active=NOW + 100)
    assert measured(resumed, plan(resumed, world, NOW + 103), NOW + 103) == 3, "the time counts from the resumption"


def test_every_series_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text()
    metrics = OperatorMetrics()
    metrics.registry.register(JobCollector(list, lambda: True))
    shown = open_metrics_families(metrics.page("application/openmetrics-text")[0].decode())
    own = {family.name for family in shown if not family.name.startswith("process_")}
    assert {name for name in own if f"`{name}" not in page} == set()
    for cause in Cause:
        assert f"`{cause.value}`" in page


def job_body(name: str = "digits", *, status: Json | None = None, **spec: object) -> Json:
    conditions = [{"type": "Running", "status": "True"}, {"type": "Waiting", "status": "False"}]
    counted = {
        "desired": 4,
        "readyReplicas": 3,
        "restarts": 2,
        "unchargedRestarts": 5,
        "podFailures": 1,
        "conditions": conditions,
    }
    return {
        "metadata": {"namespace": "team", "name": name},
        "spec": {"minReplicas": 2, "maxReplicas": 4, "maxRestarts": 7, **spec},
        "status": counted if status is None else status,
    }


def job_series(*bodies: Json, accept: str = "") -> dict[tuple[str, ...], float]:
    """Return the series of jobs, by name and label values."""
    metrics = OperatorMetrics()
    metrics.registry.register(JobCollector(lambda: bodies, lambda: True))
    page, content_type = metrics.page(accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    read = open_metrics_families if accept else text_string_to_metric_families
    return {
        (
            sample.name.removeprefix("elastic_operator_job_"),
            *(
                sample.labels[name]
                for name in ("job_namespace", "elasticjob", "condition", "cause")
                if name in sample.labels
            ),
        ): sample.value
        for family in read(page.decode())
        for sample in family.samples
        if sample.name.startswith("elastic_operator_job_")
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_each_job_has_series_of_pods_conditions_and_budgets(accept: str) -> None:
    job = ("team", "digits")
    assert job_series(job_body(), accept=accept) == {
        ("desired_pods", *job): 4,
        ("ready_pods", *job): 3,
        ("min_pods", *job): 2,
        ("condition", *job, "Running"): 1,
        ("condition", *job, "Waiting"): 0,
        ("restarts_total", *job, "worker_failed"): 2,
        ("restarts_total", *job, "uncharged"): 5,
        ("restarts_total", *job, "pod_failed"): 1,
        ("max_restarts", *job): 7,
        ("backoff_limit", *job): 7,
    }
    archived = job_body("two", replicaSpecs={"Worker": {"restartPolicy": "Never"}})
    shown = job_series(job_body("one", status={}, backoffLimit=1), archived, accept=accept)
    assert [shown["backoff_limit", "team", name] for name in ("one", "two")] == [1, 0]
    assert ("desired_pods", "team", "one") not in shown
    assert shown["ready_pods", "team", "one"] == 0


def test_a_forbidden_store_is_not_shown_as_unreachable() -> None:
    unreachable = {"type": "StoreUnreachable", "status": "True", "reason": "Unreachable"}
    away, closed = (
        job_series(job_body(status={"conditions": [unreachable | {"reason": reason}]}))
        for reason in ("Unreachable", "NotAllowed")
    )
    assert away["condition", "team", "digits", "StoreUnreachable"] == 1
    assert ("condition", "team", "digits", "StoreUnreachable") not in closed


def test_jobs_of_another_controller_and_jobs_on_a_standby_have_no_series() -> None:
    assert job_series(job_body(managedBy="kueue.x-k8s.io/multikueue")) == {}
    metrics = OperatorMetrics()
    metrics.registry.register(JobCollector(lambda: [job_body()], lambda: False))
    page = metrics.page("")[0].decode()
    assert 'elasticjob="digits"' not in page
    assert 'elastic_operator_jobs{condition="Running"} 1.0' in page


def test_the_expiry_of_the_certificates_for_etcd_is_exported() -> None:
    metrics = OperatorMetrics()
    metrics.registry.register(JobCollector(list, lambda: True, lambda: {"team/digits": 1.8e9}))
    labels = {"job_namespace": "team", "elasticjob": "digits"}
    series = "elastic_operator_job_etcd_certificate_expiry_timestamp_seconds"
    assert metrics.registry.get_sample_value(series, labels) == 1.8e9
