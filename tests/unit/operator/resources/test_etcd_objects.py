"""The etcd of a job: a Deployment with one replica, and its Service."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.api.spec import EtcdSpec, SchedulingSpec
from elastic_operator.resources.owned_objects import (
    PodSettings,
    etcd_deployment,
    etcd_endpoint,
    etcd_name,
    etcd_service,
)
from tests.support.builders import UID, a_job

SELECTED = {
    f"elastic.pytorch.org/{key}": value for key, value in (("job", "digits"), ("role", "etcd"), ("job-uid", UID))
}


def deployment(settings: PodSettings | None = None, **spec: Any) -> dict[str, Any]:
    return etcd_deployment(a_job(**spec), settings or PodSettings())


def pod_of(**spec: Any) -> dict[str, Any]:
    pod: dict[str, Any] = deployment(**spec)["spec"]["template"]["spec"]
    return pod


def container_of(**spec: Any) -> dict[str, Any]:
    (container,) = pod_of(**spec)["containers"]
    return dict(container)


def test_one_unprivileged_etcd_keeps_its_data_on_its_node_without_syncing() -> None:
    made = deployment(PodSettings(etcd_image="etcd:9"))
    pod, container = made["spec"]["template"]["spec"], container_of()
    assert (made["spec"]["replicas"], made["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert made["spec"]["selector"]["matchLabels"] == SELECTED
    assert made["spec"]["template"]["metadata"]["labels"].items() >= SELECTED.items()
    assert etcd_service(a_job(), cluster_ip=None)["spec"]["selector"] == SELECTED
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["volumes"][0] == {"name": "data", "emptyDir": {}}
    assert pod["containers"][0]["image"] == "etcd:9"
    assert "--data-dir=/var/lib/etcd/$(POD_IP)" in container["args"]
    assert {"name": "ETCD_UNSAFE_NO_FSYNC", "value": "true"} in container["env"]


def test_names_and_endpoints() -> None:
    assert len(etcd_name("a" * 45)) <= 63, "the name of a Service has at most 63 characters"
    assert [etcd_endpoint(address) for address in ("10.96.3.4", "fd00::7")] == ["10.96.3.4:2379", "[fd00::7]:2379"]
    assert etcd_service(a_job(), cluster_ip="10.96.3.4")["spec"]["clusterIP"] == "10.96.3.4"


def test_etcd_shares_tolerations_pull_secrets_and_priority_with_the_workers() -> None:
    taint = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 3600}
    shared = {"imagePullSecrets": [{"name": "hub"}], "priorityClassName": "high"}
    template = {"tolerations": [taint], **shared, "nodeSelector": {"gpu": "h100"}, "schedulerName": "mine"}
    pod = pod_of(template={"spec": template}, node_loss=40)
    assert {key: pod[key] for key in shared} == shared
    assert not {"nodeSelector", "schedulerName"} & pod.keys()
    users, default = pod["tolerations"]
    assert (users, default["key"], default["tolerationSeconds"]) == (taint, "node.kubernetes.io/not-ready", 40)
    assert pod_of(scheduling=SchedulingSpec(priority_class="high"))["priorityClassName"] == "high"
    assert "priorityClassName" not in pod_of()


def test_etcd_has_a_memory_limit_that_its_garbage_collector_respects() -> None:
    container = container_of()
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    [limit] = [each for each in container["env"] if each["name"] == "GOMEMLIMIT"]
    assert limit["valueFrom"] == {"resourceFieldRef": {"resource": "limits.memory"}}


def test_image_and_resources_of_the_spec_replace_the_defaults() -> None:
    etcd = EtcdSpec(image="mine:1", resources={"limits": {"memory": "32Mi"}})
    container = container_of(etcd=etcd)
    assert (container["image"], container["resources"]) == ("mine:1", {"limits": {"memory": "32Mi"}})


def test_etcd_syncs_data_on_a_volume() -> None:
    storage = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    pod = pod_of(etcd=EtcdSpec(storage=storage))
    (container,) = pod["containers"]
    assert "--data-dir=/var/lib/etcd/data" in container["args"]
    assert "ETCD_UNSAFE_NO_FSYNC" not in [each["name"] for each in container["env"]]
    volume = pod["volumes"][0]
    assert volume["ephemeral"]["volumeClaimTemplate"]["spec"] == storage


@pytest.mark.parametrize("template", [{}, {"spec": None}, {"spec": 7}, {"spec": {"tolerations": None}}])
def test_an_empty_or_invalid_template_is_ignored(template: dict[str, Any]) -> None:
    assert pod_of(template=template) == pod_of()
