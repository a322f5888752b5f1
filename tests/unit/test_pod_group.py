"""The PodGroup and the disruption budget of a job."""

from __future__ import annotations

from typing import Any

import pytest

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


def a_gang(gang: GangScheduler, **policy: Any) -> dict[str, Any]:
    return pod_group(a_job(scheduling=SchedulingSpec(gang=gang, **policy)), gang, 3)


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
    assert a_gang(gang, queue="team", priority_class="high") == {
        "apiVersion": version,
        "kind": "PodGroup",
        "metadata": {"name": "digits", "namespace": "default", "labels": LABELS, "ownerReferences": OWNERS},
        "spec": {"minMember": 3, **more},
    }


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
