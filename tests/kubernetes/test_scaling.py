"""Scaling by a user on a real kubelet, and by the real HorizontalPodAutoscaler controller."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, Resource
from tests.support.cluster_user import job
from tests.support.definitions import defined
from tests.support.operator_namespace import Json, OperatorNamespace, index_of, uids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.cluster_user import User
    from tests.support.testbed.cluster import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

SAVES = """
import signal, sys, time

def save(*_):
    print("saving", flush=True)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(100_000)
"""
"""A program that saves slowly when it is stopped."""


@pytest.mark.node
async def test_the_highest_pods_leave_and_save_together_while_the_others_stay(user: User) -> None:
    await user.apply(job("saves", command=["python3", "-c", SAVES], replicas=3))
    await user.wait("elasticjob/saves", "jsonpath={.status.readyDesired}=3/3")
    before = await user.pods("saves")
    staying, *going = sorted(before, key=lambda name: index_of(before[name]))
    logs = [await user.wait_for_output(pod, "ready") for pod in going]
    await user.wait("elasticjob/saves", "jsonpath={.status.worldSize}=3")
    round = (await user.get("elasticjob/saves"))["status"]["round"]

    await user.kubectl("scale", "elasticjob/saves", "--replicas=1")
    for pod in going:
        await user.wait(f"pod/{pod}", "delete")
    for log in await asyncio.gather(*logs):
        assert any(line.endswith("saved") for line in log.splitlines())
    await user.wait("elasticjob/saves", "jsonpath={.status.worldSize}=1")
    after = await user.pods("saves")
    assert uids(after) == uids({staying: before[staying]})

    status = (await user.get("elasticjob/saves"))["status"]
    assert (status["restarts"], status["podFailures"]) == (0, 0)
    assert status["round"] == round + 1, "the pods leave in one round change"
    events = await user.events("saves")
    assert "scaled from 3 to 1 pod" in events


# An autoscaler, which needs only the control plane

POD_METRICS = Resource("metrics.k8s.io", "v1beta1", "pods", "PodMetrics")
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def metrics(cluster_with_crd: Cluster) -> AsyncIterator[None]:
    """A cluster with a fake metrics API, whose values the test writes."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    async with defined(cluster_with_crd, POD_METRICS, anything):
        yield


def now(seconds_ago: float = 0.0) -> str:
    return datetime.fromtimestamp(datetime.now(UTC).timestamp() - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def report_cpu_usage(ns: OperatorNamespace, name: str, pod: Json, cpu: str) -> None:
    """Report that a pod has run for a while, and uses this much CPU now."""
    await ns.report_running(name)
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": now(900)}
    status: dict[str, Any] = {"startTime": now(1000), "conditions": [ready]}
    await ns.api.patch(PODS, ns.name, name, {"status": status}, "status")
    await ns.api.create(
        POD_METRICS,
        ns.name,
        {
            "apiVersion": POD_METRICS.api_version,
            "kind": POD_METRICS.kind,
            "metadata": {"name": name, "labels": pod["metadata"]["labels"]},
            "timestamp": now(),
            "window": "30s",
            "containers": [{"name": "worker", "usage": {"cpu": cpu, "memory": "1Mi"}}],
        },
    )


@pytest.mark.control_plane
@pytest.mark.usefixtures("metrics")
async def test_a_horizontal_pod_autoscaler_finds_and_scales_a_job(ns: OperatorNamespace, tmp_path: Path) -> None:
    async with ns.operator(tmp_path):
        await ns.apply(replicas=1)
        ((name, pod),) = (await ns.wait_for_pods(1)).items()
        await report_cpu_usage(ns, name, pod, "2")
        usage = {"type": "AverageValue", "averageValue": "500m"}
        await ns.api.create(
            AUTOSCALERS,
            ns.name,
            {
                "apiVersion": AUTOSCALERS.api_version,
                "kind": AUTOSCALERS.kind,
                "metadata": {"name": "digits"},
                "spec": {
                    "scaleTargetRef": {
                        "apiVersion": ELASTIC_JOBS.api_version,
                        "kind": ELASTIC_JOBS.kind,
                        "name": "digits",
                    },
                    "minReplicas": 1,
                    "maxReplicas": 3,
                    "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": usage}}],
                },
            },
        )
        grown = await ns.wait_for_pods(3)
        assert name in grown, "the existing pod is not replaced"
        scaler = await ns.wait_for(
            AUTOSCALERS, lambda found: found["digits"].get("status", {}).get("desiredReplicas") == 3
        )
        scaler_conditions = {each["type"]: each["status"] for each in scaler["digits"]["status"]["conditions"]}
        assert (scaler_conditions["AbleToScale"], scaler_conditions["ScalingActive"]) == ("True", "True")
