"""What the operator's metrics count when it has written a job's status."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest

from elastic_operator.kube.metrics import OperatorMetrics
from elastic_operator.kube.tally import Cause, restarts, seconds_to_running
from elastic_operator.plan import plan
from tests.support.builders import (
    NOW,
    a_job,
    a_world,
    an_epoch,
    died,
    evicted,
    going,
    left,
    lost,
    out_of_memory,
    pending,
    preempted,
    running,
    that_had_pods,
    that_rests,
    that_trained,
    turned_away,
    with_status,
)

if TYPE_CHECKING:
    from elastic_operator.model import Job, Observed, Pod


def counted(job: Job, observed: Observed) -> dict[Cause, int]:
    """What is counted when the job was looked at once, and once more with the status that came of that."""
    causes: Counter[Cause] = Counter()
    for _ in range(2):
        todo = plan(job, observed, NOW)
        causes.update(restarts(job, todo, observed.pods))
        if todo.status is not None:
            job = with_status(job, **{name: getattr(todo.status, name) for name in todo.status.__slots__})
    return dict(causes)


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        (died(1, 1), Cause.POD_DIED),
        (out_of_memory(1), Cause.POD_OUT_OF_MEMORY),
        (evicted(1), Cause.POD_DISRUPTED),
        (preempted(1), Cause.POD_DISRUPTED),
        (lost(1), Cause.NODE_LOST),
        (turned_away(1), Cause.NOT_ADMITTED),
        (left(1), Cause.POD_LEFT),
        (going(1), Cause.POD_LEFT),
    ],
    ids=lambda value: value.value if isinstance(value, Cause) else "",
)
def test_each_pod_that_is_replaced_counts_once_with_what_became_of_it(pod: Pod, cause: Cause) -> None:
    assert counted(that_trained(a_job()), a_world(running(0), pod)) == {cause: 1}


def test_pods_that_the_operator_removes_are_no_restarts() -> None:
    assert counted(that_trained(a_job(replicas=1)), a_world(running(0), running(1))) == {}
    assert counted(that_trained(a_job(suspend=True)), a_world(running(0), running(1))) == {}


def test_workers_that_were_started_anew_count_by_whether_that_was_charged() -> None:
    pods = running(0), running(1)
    world = a_world(*pods, epoch=an_epoch(*pods, number=7, restarts=3, free=2))
    assert counted(that_trained(a_job(), restarts=1), world) == {Cause.WORKER_FAILED: 2, Cause.FREE: 2}


def test_the_way_to_running_is_measured_once() -> None:
    pods = running(0), running(1)
    world = a_world(*pods, epoch=an_epoch(*pods))
    job = that_had_pods(a_job())
    todo = plan(job, world, NOW + 12)
    assert todo.status is not None
    assert seconds_to_running(job, todo.status, NOW + 12) == 12
    again = with_status(job, started=todo.status.started)
    assert seconds_to_running(again, todo.status, NOW + 13) is None
    waiting = plan(job, a_world(pending(0), pending(1)), NOW + 12).status
    assert waiting is not None
    assert seconds_to_running(job, waiting, NOW + 12) is None


def test_of_a_job_that_was_made_suspended_the_way_begins_when_it_is_resumed() -> None:
    pods = running(0), running(1)
    job = that_rests(a_job(), started=None, epoch=0, active=NOW + 100)
    todo = plan(job, a_world(*pods, epoch=an_epoch(*pods)), NOW + 103)
    assert todo.status is not None
    assert seconds_to_running(job, todo.status, NOW + 103) == 3


def test_all_of_it_is_shown() -> None:
    metrics = OperatorMetrics()
    holds = {"type": "Running", "status": "True"}, {"type": "Degraded", "status": "True"}
    over = {"type": "Running", "status": "False"}, {"type": "Made up", "status": "True"}
    metrics.jobs(lambda: [{"status": {"conditions": holds}}, {"status": {"conditions": over}}, {}])
    job = that_trained(a_job())
    world = a_world(running(0), died(1))
    metrics.written(job, plan(job, world, NOW), world.pods, NOW)
    metrics.waited(0.02)
    shown = generate_latest(metrics.registry).decode()
    for line in (
        'elastic_operator_jobs{condition="Running"} 1.0',
        'elastic_operator_jobs{condition="Degraded"} 1.0',
        'elastic_operator_jobs{condition="Suspended"} 0.0',
        'elastic_operator_restarts_total{cause="pod_died"} 1.0',
        'elastic_operator_restarts_total{cause="node_lost"} 0.0',
        'elastic_operator_queue_latency_seconds_bucket{le="0.025"} 1.0',
        "elastic_operator_apply_to_running_seconds_count 0.0",
        "elastic_operator_pods_created_total 0.0",
    ):
        assert line in shown
    assert "Made up" not in shown


def test_every_series_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    metrics = OperatorMetrics()
    metrics.jobs(list)
    own = {family.name for family in metrics.registry.collect() if not family.name.startswith("process_")}
    assert {name for name in own if f"`{name}" not in page} == set()
    for cause in Cause:
        assert f"`{cause.value}`" in page
