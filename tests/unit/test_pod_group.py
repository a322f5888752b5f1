"""The PodGroup and the disruption budget of a job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.spec import GangScheduler, SchedulingSpec
from elastic_operator.resources.owned_objects import disruption_budget, not_installed, pod_group
from tests.support.builders import UID, a_job

LABELS = {
    "app.kubernetes.io/name": "elasticjob",
    "app.kubernetes.io/instance": "digits",
    "app.kubernetes.io/component": "worker",
    "app.kubernetes.io/managed-by": "elastic-operator",
    "elastic.pytorch.org/job": "digits",
    "elastic.pytorch.org/role": "worker",
}
OWNERS = [
    {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "name": "digits",
        "uid": UID,
        "controller": True,
    }
]
EIGHT_GPUS = {"containers": [{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "1.5Gi"}}}]}


def a_gang(gang: GangScheduler, template: Any = None, **policy: Any) -> dict[str, Any]:
    job = a_job(scheduling=SchedulingSpec(gang=gang, **policy), template={"spec": template or {}})
    return pod_group(job, gang, 3)


@pytest.mark.parametrize(
    ("gang", "version", "more"),
    [
        (GangScheduler.SCHEDULER_PLUGINS, "scheduling.x-k8s.io/v1alpha1", {}),
        (
            GangScheduler.VOLCANO,
            "scheduling.volcano.sh/v1beta1",
            {"queue": "team", "priorityClassName": "high"},
        ),
    ],
)
def test_the_complete_pod_group(gang: GangScheduler, version: str, more: dict[str, str]) -> None:
    assert a_gang(gang, EIGHT_GPUS, queue="team", priority_class="high") == {
        "apiVersion": version,
        "kind": "PodGroup",
        "metadata": {"name": "digits", "namespace": "default", "labels": LABELS, "ownerReferences": OWNERS},
        "spec": {"minMember": 3, "minResources": {"memory": "4831838208", "nvidia.com/gpu": "24"}, **more},
    }


def test_without_requests_there_are_no_min_resources() -> None:
    assert a_gang(GangScheduler.VOLCANO)["spec"] == {"minMember": 3}


def test_a_missing_kind_is_reported_with_what_to_install() -> None:
    assert not_installed(GangScheduler.VOLCANO) == (
        "this cluster knows no PodGroup of scheduling.volcano.sh, which spec.schedulingPolicy.gang asks for: install "
        "Volcano (volcano.sh), or remove gang from the job"
    )


def test_the_complete_disruption_budget() -> None:
    assert disruption_budget(a_job(), 2) == {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "digits-workers", "namespace": "default", "labels": LABELS, "ownerReferences": OWNERS},
        "spec": {
            "minAvailable": 2,
            "selector": {
                "matchLabels": {"elastic.pytorch.org/job": "digits", "elastic.pytorch.org/role": "worker"},
            },
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def container_with_requests(name: str = "worker", *, limits: Any = None, **requests: Any) -> dict[str, Any]:
    """A container with these resource requests."""
    return {
        "name": name,
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
    }


@pytest.mark.parametrize(
    ("containers", "requests"),
    [
        ([container_with_requests(cpu="1"), container_with_requests("log", cpu="250m")], {"cpu": "3750m"}),
        ([container_with_requests(limits={"cpu": 4, "memory": "1Gi"}, cpu=2)], {"cpu": "6", "memory": "3221225472"}),
        ([container_with_requests(cpu=1, memory="much", gpu=None, disk=0)], {"cpu": "3"}),
    ],
)
def test_a_gang_needs_what_the_containers_of_its_pods_request(
    containers: list[dict[str, Any]], requests: dict[str, str]
) -> None:
    assert a_gang(GangScheduler.VOLCANO, {"containers": containers})["spec"]["minResources"] == requests


@pytest.mark.parametrize(("cpu", "written"), [("500m", "1500m"), ("1", "3"), ("0.0001", "1m"), ("1e3", "3000")])
def test_amounts_are_whole_numbers_or_thousandths(cpu: str, written: str) -> None:
    template = {"containers": [container_with_requests(cpu=cpu)]}
    assert a_gang(GangScheduler.VOLCANO, template)["spec"]["minResources"] == {"cpu": written}


QUANTITIES = st.none() | st.integers() | st.floats() | st.text(max_size=4) | st.just("1e999999999")


@given(st.dictionaries(st.text(max_size=3), QUANTITIES, max_size=3))
def test_invalid_quantities_are_ignored(requests: dict[str, Any]) -> None:
    whole = a_gang(GangScheduler.VOLCANO, {"containers": [{"resources": {"requests": requests}}]})
    assert whole["spec"]["minMember"] == 3
