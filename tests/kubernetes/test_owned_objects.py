"""PodGroups, disruption budgets, network policies and the time to live of jobs on a real API server.

No gang scheduler runs in these tests: the cluster has only the CRDs, with the fields that the operator writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elastic_operator.kubernetes.client import (
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    NETWORK_POLICIES,
    PODS,
    SCHEDULER_PLUGINS_GROUPS,
    VOLCANO_GROUPS,
    ApiError,
)
from tests.support.definitions import pod_groups_defined
from tests.support.operator_namespace import Json, OperatorNamespace, conditions, holds

if TYPE_CHECKING:
    from elastic_operator.kubernetes.client import Resource
    from tests.support.etcd import EtcdServer

pytestmark = [
    pytest.mark.control_plane,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("operator"),
]


def message_of(job: Json, kind: str) -> str:
    return str(conditions(job["status"])[kind]["message"])


@pytest.mark.parametrize(
    ("gang", "resource", "scheduler"),
    [
        ("SchedulerPlugins", SCHEDULER_PLUGINS_GROUPS, "scheduler-plugins-scheduler"),
        ("Volcano", VOLCANO_GROUPS, "volcano"),
    ],
)
async def test_a_gang_scheduled_job_waits_for_the_pod_group_crd_and_its_pod_group_follows_it(
    ns: OperatorNamespace, etcd: EtcdServer, gang: str, resource: Resource, scheduler: str
) -> None:
    store = {"endpoint": etcd.endpoint}
    await ns.apply(minReplicas=2, schedulingPolicy={"gang": gang}, etcd=store, template={})
    job = await ns.wait_for_job(lambda status: "PodGroup" in str(conditions(status).get("Waiting", {}).get("message")))
    assert f"this cluster has no PodGroup of {resource.group}" in message_of(job, "Waiting")
    await ns.wait_for_event("ResourcesBlocked", resource.group, "install")
    assert await ns.wait_for_pods(0) == {}

    async with pod_groups_defined(ns.cluster, resource):
        pods = await ns.wait_for_pods(3)
        (group,) = (await ns.wait_for(resource, lambda found: "digits" in found)).values()
        assert group["spec"]["minMember"] == 2
        for pod in pods.values():
            marks = {**pod["metadata"]["labels"], **pod["metadata"]["annotations"]}
            assert pod["spec"]["schedulerName"] == scheduler
            assert "digits" in (
                marks.get("scheduling.x-k8s.io/pod-group"),
                marks.get("scheduling.k8s.io/group-name"),
            )
        asked = f"the scheduler {scheduler} has not processed it yet; check that this scheduler runs"
        await ns.wait_for_job(lambda status: asked in str(conditions(status)["Waiting"]["message"]))

        await ns.api.patch(resource, ns.name, "digits", {"metadata": {"labels": {"mine": "yes"}}})
        await ns.change(minReplicas=3)
        (group,) = (
            await ns.wait_for(resource, lambda found: found.get("digits", {})["spec"]["minMember"] == 3)
        ).values()
        assert group["metadata"]["labels"]["mine"] == "yes", "fields of other writers are kept"

        await ns.change(suspend=True)
        await ns.wait_for(resource, lambda found: not found)
        await ns.wait_for_job(lambda status: holds(status, "Suspended"))
        await ns.change(suspend=False)
        await ns.wait_for(resource, lambda found: "digits" in found)
        await ns.wait_for_pods(3)


async def test_a_disruption_budget_keeps_the_minimum_while_it_is_requested_and_useful(ns: OperatorNamespace) -> None:
    await ns.apply(minReplicas=2, disruptionBudget=True)
    pods = await ns.wait_for_pods(3)
    await ns.wait_for(DISRUPTION_BUDGETS, lambda found: "digits-workers" in found)

    for pod in pods:
        await ns.report_running(pod)
        ready = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        await ns.api.patch(PODS, ns.name, pod, {"status": {"conditions": ready}}, "status")
    budgets = await ns.wait_for(
        DISRUPTION_BUDGETS,
        lambda found: found["digits-workers"].get("status", {}).get("currentHealthy") == 3,
    )
    assert budgets["digits-workers"]["status"]["disruptionsAllowed"] == 1
    first, second, _ = sorted(pods)
    await evict(ns, first)
    with pytest.raises(ApiError, match="violate the pod's disruption budget"):
        await evict(ns, second)

    await ns.change(minReplicas=1)
    await ns.wait_for(DISRUPTION_BUDGETS, lambda found: found["digits-workers"]["spec"]["minAvailable"] == 1)
    await ns.change(disruptionBudget=False)
    await ns.wait_for(DISRUPTION_BUDGETS, lambda found: not found)


async def test_the_network_policy_of_a_job_selects_its_pods_and_no_others_while_it_is_not_suspended(
    ns: OperatorNamespace,
) -> None:
    for name in ("digits", "letters"):
        await ns.apply(name)
        await ns.wait_for_pods(3, name)
    policies = await ns.wait_for(NETWORK_POLICIES, lambda found: {"digits-ingress", "letters-ingress"} <= found.keys())
    pods = await ns.wait_for(PODS, lambda found: len(found) == 8)  # three workers and an etcd of each job
    for name in ("digits", "letters"):
        selector = policies[f"{name}-ingress"]["spec"]["podSelector"]["matchLabels"]
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        selected = (await ns.kubectl("get", "pods", f"--selector={labels}", "--output=name")).stdout.split()
        assert sorted(selected) == sorted(f"pod/{pod}" for pod in pods if pod.startswith(f"{name}-"))
    await ns.change(suspend=True)
    await ns.wait_for(NETWORK_POLICIES, lambda found: [*found] == ["letters-ingress"])


async def evict(ns: OperatorNamespace, pod: str) -> None:
    """Evict a pod through the API, as a drain does."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": ns.name}}
    await ns.api.create(replace(PODS, plural=f"pods/{pod}/eviction"), ns.name, body)


async def test_a_job_managed_by_another_controller_is_not_changed(ns: OperatorNamespace) -> None:
    await ns.apply("theirs", managedBy="kueue.x-k8s.io/multikueue")
    await ns.apply()
    await ns.wait_for_pods(3)
    theirs = await ns.api.get(ELASTIC_JOBS, ns.name, "theirs")
    assert "status" not in theirs
    assert "replicas" not in theirs["spec"]
    assert await ns.wait_for_pods(0, "theirs") == {}
