"""The NetworkPolicy of a job, evaluated for the pods that the operator creates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.controller.model import NewPod
from elastic_operator.resources.network_policy import network_policy
from elastic_operator.resources.owned_objects import PodSettings, etcd_deployment
from elastic_operator.resources.worker_pod import worker_pod
from tests.support.builders import a_job, size

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job

SETTINGS = PodSettings(operator_namespace="elastic-system", metrics_namespaces=("monitoring",))
JOB = a_job()
OTHER = replace(JOB, name="other", uid="8b5c")


@dataclass
class Peer:
    """A pod that connects, or that is connected to."""

    namespace: str
    labels: dict[str, str] = field(default_factory=dict)


def worker(job: Job, namespace: str = JOB.namespace) -> Peer:
    made = worker_pod(job, NewPod("w", 0, size()), SETTINGS, store="etcd:2379")
    return Peer(namespace, made["metadata"]["labels"])


def etcd(job: Job) -> Peer:
    return Peer(job.namespace, etcd_deployment(job, SETTINGS)["spec"]["template"]["metadata"]["labels"])


OPERATOR = Peer("elastic-system", {"app.kubernetes.io/name": "elastic-operator"})
PROMETHEUS = Peer("monitoring")
STRANGER = Peer(JOB.namespace, {"app": "web"})


def matches(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    return selector is None or selector["matchLabels"].items() <= labels.items()


def admits(policy: dict[str, Any], source: Peer, target: Peer, port: int) -> bool:
    """Return whether a policy, which must select the target, admits a connection, as a network plug-in decides it."""
    home = policy["metadata"]["namespace"]
    assert target.namespace == home
    assert matches(policy["spec"]["podSelector"], target.labels)

    def is_one_of(peer: dict[str, Any]) -> bool:
        spaces = peer.get("namespaceSelector")
        at_home = source.namespace == home if spaces is None else True
        its_labels = {"kubernetes.io/metadata.name": source.namespace}
        return at_home and matches(spaces, its_labels) and matches(peer.get("podSelector"), source.labels)

    return any(
        ("from" not in rule or any(map(is_one_of, rule["from"])))
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for rule in policy["spec"]["ingress"]
    )


@pytest.mark.parametrize(
    ("source", "target", "ports", "closed"),
    [
        (worker(JOB), worker(JOB), (40123, 9464), ()),
        (worker(JOB), etcd(JOB), (2379,), ()),
        (OPERATOR, etcd(JOB), (2379,), (2380,)),
        (PROMETHEUS, worker(JOB), (9464,), (40123, 2379)),
        (PROMETHEUS, etcd(JOB), (2381,), (2379, 2380)),
        (STRANGER, worker(JOB), (), (40123, 9464)),
        (STRANGER, etcd(JOB), (), (2379, 2380, 2381)),
        (worker(OTHER), worker(JOB), (), (40123, 9464)),
        (worker(OTHER), etcd(JOB), (), (2379,)),
        (etcd(OTHER), etcd(JOB), (), (2379,)),
        (worker(JOB, "elsewhere"), worker(JOB), (), (40123,)),
        (worker(JOB, "elsewhere"), etcd(JOB), (), (2379,)),
        (Peer("elsewhere", OPERATOR.labels), etcd(JOB), (), (2379,)),
        (Peer("elastic-system"), etcd(JOB), (), (2379,)),
    ],
)
def test_only_the_jobs_own_pods_the_operator_and_prometheus_reach_a_jobs_pods(
    source: Peer, target: Peer, ports: tuple[int, ...], closed: tuple[int, ...]
) -> None:
    policy = network_policy(JOB, SETTINGS)
    assert policy is not None
    assert [port for port in (*ports, *closed) if admits(policy, source, target, port)] == [*ports]


def test_a_policy_selects_no_pod_of_another_job() -> None:
    policy = network_policy(JOB, SETTINGS)
    assert policy is not None
    for other in (worker(OTHER), etcd(OTHER), STRANGER):
        assert not matches(policy["spec"]["podSelector"], other.labels)


def test_without_named_namespaces_everyone_may_read_the_metrics_at_the_jobs_port() -> None:
    policy = network_policy(a_job(metrics_port=9200), replace(SETTINGS, metrics_namespaces=()))
    assert policy is not None
    assert [port for port in (9200, 9464, 2379) if admits(policy, STRANGER, worker(JOB), port)] == [9200]


def test_an_operator_outside_of_the_cluster_reaches_etcd_from_any_address() -> None:
    policy = network_policy(JOB, replace(SETTINGS, operator_namespace=None))
    assert policy is not None
    assert admits(policy, STRANGER, etcd(JOB), 2379)
    assert not admits(policy, STRANGER, etcd(JOB), 2380)


@pytest.mark.parametrize(
    ("settings", "spec"),
    [
        ({"network_policies": False}, {}),
        ({}, {"metrics_port": 0}),
        ({}, {"template": {"spec": {"hostNetwork": True}}}),
        ({}, {"template": {"spec": {"hostNetwork": True}}, "metrics_port": 9200}),
    ],
)
def test_a_job_whose_traffic_a_policy_would_break_gets_none(settings: dict[str, Any], spec: dict[str, Any]) -> None:
    assert network_policy(a_job(**spec), replace(SETTINGS, **settings)) is None
