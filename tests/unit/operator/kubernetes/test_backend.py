"""Applying plans on a failing API server, and the messages for the user."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    EVENTS,
    NETWORK_POLICIES,
    PODS,
    SCHEDULER_PLUGINS_GROUPS,
    SECRETS,
    SERVICES,
    Api,
)
from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.resources.owned_objects import etcd_name
from tests.support.builders import size as a_size
from tests.support.object_server import MADE, NAMESPACE
from tests.support.operated_cluster import NAME, OperatedCluster
from torchelastic.protocol.records import NodeRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from elastic_operator.kubernetes.client import Resource
    from tests.support.object_server import Fault

GANG = {"schedulingPolicy": {"gang": "SchedulerPlugins"}}
WEBHOOK = 'failed calling webhook "x.example.org": connection refused'


@pytest.fixture
async def cluster() -> AsyncIterator[OperatedCluster]:
    async with OperatedCluster() as cluster:
        yield cluster


def failing(
    method: str, resource: Resource, status: int, words: str, *, times: float, after: int = 0
) -> Callable[[str, str], Fault | None]:
    """Return a fault: ``times`` requests for a resource fail, after ``after`` successful ones."""
    requests = itertools.count()

    def fault(requested: str, path: str) -> Fault | None:
        if requested != method or path != resource.path(NAMESPACE) or not after <= next(requests) < after + times:
            return None
        return status, "InternalError", words

    return fault


async def test_many_pods_are_deleted_in_batches(cluster: OperatedCluster) -> None:
    cluster.add_job(minReplicas=1, maxReplicas=300, replicas=300)
    await cluster.wait_for_pods(300)
    cluster.add_job(minReplicas=1, maxReplicas=300, replicas=300, suspend=True)
    await cluster.wait_for(lambda: cluster.server.count_requests("DELETE", PODS) > 0)
    await cluster.api.list(PODS, NAMESPACE)
    assert cluster.server.count_requests("DELETE", PODS) <= 200, "other requests wait for all deletions"
    await cluster.wait_for_pods(0)
    assert cluster.server.max_concurrent["DELETE"] >= 32
    assert 32 <= cluster.server.max_concurrent["POST"] <= 64, "pods are created in growing batches of limited size"


async def test_a_pod_that_may_not_be_deleted_does_not_delay_the_others(cluster: OperatedCluster) -> None:
    cluster.add_job(minReplicas=1, maxReplicas=200, replicas=200)
    await cluster.wait_for_pods(200)
    pods = sorted(cluster.server.of_kind(PODS), key=lambda pod: int(pod["metadata"]["name"].split("-")[1]))
    kept = {pods[number]["metadata"]["name"] for number in (70, 130)}

    def fault(method: str, path: str) -> Fault | None:
        return (403, "Forbidden", "not this one") if method == "DELETE" and path.rpartition("/")[2] in kept else None

    cluster.server.fault = fault
    cluster.add_job(minReplicas=1, maxReplicas=200, replicas=200, suspend=True)
    await cluster.wait_for_pods(2)
    assert {pod["metadata"]["name"] for pod in cluster.server.of_kind(PODS)} == kept
    removed = [path for method, path in cluster.server.requests if method == "DELETE" and PODS.path(NAMESPACE) in path]
    assert len(set(removed[:200])) == 200, "a deletion is retried before every pod was tried once"


@pytest.mark.parametrize(("due", "suspended"), [("2026-01-01T00:00:00Z", True), ("2999-01-01T00:00:00Z", False)])
async def test_overdue_pods_that_never_ran_do_not_delay_a_suspension(
    cluster: OperatedCluster, due: str, *, suspended: bool
) -> None:
    cluster.add_job()
    await cluster.wait_for_pods(2)
    for pod in cluster.server.of_kind(PODS):
        name = pod["metadata"]["name"]
        cluster.change(PODS, name, metadata={**pod["metadata"], "deletionTimestamp": due}, spec={"nodeName": "silent"})
    cluster.add_job(suspend=True)
    await cluster.wait_for(lambda: cluster.status.get("state") == "Suspended")
    await cluster.reconcile()
    await cluster.reconcile()
    assert cluster.holds("Suspended") is suspended
    assert cluster.server.count_requests("DELETE", PODS) == 0, "pods that are already terminating are deleted again"


async def test_no_pod_is_created_before_its_network_policy_which_follows_the_job_without_further_requests(
    cluster: OperatedCluster,
) -> None:
    denial = 'User "x" cannot create resource "networkpolicies"'
    cluster.server.fault = failing("POST", NETWORK_POLICIES, 403, denial, times=inf)
    cluster.add_job()
    await cluster.wait_for(
        lambda: denial in (cluster.message("Waiting") or "") and bool(cluster.events("ResourcesBlocked"))
    )
    assert "grant the operator its permissions" in (cluster.message("Waiting") or "")
    assert not cluster.server.of_kind(PODS)
    cluster.server.fault = lambda _method, _path: None
    await cluster.wait_for_pods(2)
    await cluster.reconcile()
    before = {method: cluster.server.count_requests(method, NETWORK_POLICIES) for method in ("GET", "POST", "PATCH")}
    await cluster.reconcile()
    after = {method: cluster.server.count_requests(method, NETWORK_POLICIES) for method in ("GET", "POST", "PATCH")}
    assert after == before == {**before, "GET": 0, "PATCH": 0}
    cluster.add_job(suspend=True)
    await cluster.wait_for(lambda: cluster.server.of_kind(NETWORK_POLICIES) == [])


@pytest.mark.parametrize("security", ["TLS", "None"])
async def test_only_an_etcd_that_is_asked_to_be_open_has_no_certificates_and_the_job_says_so(
    cluster: OperatedCluster, security: str
) -> None:
    cluster.add_job(etcd={"security": security})
    await cluster.wait_for_pods(2)
    is_open = security == "None"
    await cluster.wait_for(lambda: cluster.holds("Waiting"))
    assert cluster.holds("EtcdOpen") is is_open
    [container] = cluster.server.get(DEPLOYMENTS, etcd_name(NAME))["spec"]["template"]["spec"]["containers"]
    assert ("--client-cert-auth" in container["args"]) is not is_open
    assert ([each["metadata"]["name"] for each in cluster.server.of_kind(SECRETS)] == []) is is_open


async def test_a_deleted_secret_is_written_again_when_a_pod_needs_it(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The operator reads the events of a pod that has not started for five seconds.
    fast = SimpleNamespace(time=time.time, monotonic=lambda: 1000 * time.monotonic())
    monkeypatch.setattr("elastic_operator.kubernetes.backend.time", fast)
    cluster.add_job()
    await cluster.wait_for_pods(2)
    former = cluster.server.get(SECRETS, etcd_name(NAME))
    cluster.server.pop(SECRETS, etcd_name(NAME))
    await cluster.reconcile()
    assert cluster.server.of_kind(SECRETS) == []
    pod = cluster.server.of_kind(PODS)[0]["metadata"]
    cluster.server.put(
        EVENTS,
        "mount",
        type="Warning",
        source={"component": "kubelet"},
        involvedObject={"uid": pod["uid"]},
        message=f'MountVolume.SetUp failed for volume "etcd-tls" : secret "{etcd_name(NAME)}" not found',
    )
    cluster.change(PODS, pod["name"], spec={"nodeName": "n"}, status={"phase": "Pending"})
    while not cluster.server.of_kind(SECRETS):
        await cluster.reconcile()
    again = cluster.server.get(SECRETS, etcd_name(NAME))["data"]
    assert again.keys() == former["data"].keys()
    assert again["tls.crt"] != former["data"]["tls.crt"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (500, f"Internal error occurred: {WEBHOOK}"),
        (403, "exceeded quota: few"),
        (422, 'spec.nodeSelektor: unknown field "nodeSelektor"'),
    ],
    ids=["webhook", "quota", "invalid"],
)
async def test_certificates_are_renewed_while_pods_cannot_be_created(status: int, words: str) -> None:
    seen: set[str] = set()

    def written(count: int) -> bool:
        seen.update(each["data"]["tls.crt"] for each in cluster.server.of_kind(SECRETS))
        return len(seen) >= count

    async with OperatedCluster(EtcdCertificates(bytes(32), dt.timedelta(seconds=2))) as cluster:
        cluster.server.fault = failing("POST", PODS, status, words, times=inf, after=1)
        cluster.add_job()
        await cluster.wait_for(lambda: words in str(cluster.status.get("conditions")))
        await cluster.wait_for(lambda: written(3))
        assert len(cluster.server.of_kind(PODS)) == 1
        assert words in str(cluster.status["conditions"])


async def test_an_unreachable_own_etcd_is_reported_while_it_is_ready(
    cluster: OperatedCluster,
) -> None:
    cluster.add_job()
    await cluster.wait_for_pods(2)
    cluster.run_pods()
    assert not cluster.holds("StoreUnreachable")
    cluster.set_etcd_status(readyReplicas=1)
    await cluster.wait_for(lambda: "NetworkPolicy" in (cluster.message("StoreUnreachable") or ""))
    assert "NetworkPolicy" in (cluster.message("Waiting") or "")
    assert "the node of etcd's pod" in (cluster.message("StoreUnreachable") or "")
    cluster.set_etcd_status(readyReplicas=0)
    await cluster.wait_for(lambda: not cluster.holds("StoreUnreachable"))


async def test_a_webhook_that_cannot_be_called_is_reported_until_it_accepts_pods(cluster: OperatedCluster) -> None:
    cluster.server.fault = failing("POST", PODS, 500, f"Internal error occurred: {WEBHOOK}", times=inf, after=1)
    cluster.add_job()
    await cluster.wait_for(
        lambda: WEBHOOK in (cluster.message("Waiting") or "") and bool(cluster.events("ResourcesBlocked"))
    )
    cluster.server.fault = lambda _method, _path: None
    await cluster.wait_for_pods(2)
    await cluster.wait_for(lambda: WEBHOOK not in (cluster.message("Waiting") or ""))


@pytest.mark.parametrize("end", ["", "."])
async def test_a_rejected_disruption_budget_that_the_status_names_is_not_reported_again(
    cluster: OperatedCluster, end: str
) -> None:
    denial = 'admission webhook "x.example.org" denied the request: no budgets here'
    known = {"type": "DisruptionBudgetFailed", "status": "True", "reason": "BudgetRejected", "lastTransitionTime": MADE}
    why = f"the disruption budget of the job cannot be created for now: {denial}"
    cluster.server.put(ELASTIC_JOBS, NAME, status={"conditions": [{**known, "message": why}]})
    cluster.server.fault = failing("POST", DISRUPTION_BUDGETS, 403, f"{denial}{end}", times=inf)
    cluster.add_job(disruptionBudget=True)
    await cluster.wait_for(lambda: cluster.server.count_requests("POST", DISRUPTION_BUDGETS) == 2)
    assert cluster.events("ResourcesBlocked") == []
    assert cluster.message("DisruptionBudgetFailed") == why


async def test_a_job_waits_until_objects_of_a_former_job_of_the_same_name_are_deleted(cluster: OperatedCluster) -> None:
    owner = {"apiVersion": ELASTIC_JOBS.api_version, "kind": "ElasticJob", "name": NAME, "uid": "former"}
    former = {"ownerReferences": [{**owner, "controller": True}]}
    for kind in (DEPLOYMENTS, SERVICES):
        cluster.server.put(kind, etcd_name(NAME), metadata=former, spec={})
    cluster.add_job()
    await cluster.wait_for(lambda: cluster.server.count_requests("POST", SERVICES) >= 2)
    for kind in (DEPLOYMENTS, SERVICES):
        cluster.server.pop(kind, etcd_name(NAME))
    await cluster.wait_for(lambda: all(map(cluster.server.of_kind, (DEPLOYMENTS, SERVICES))))
    assert cluster.events("ResourcesBlocked") == []


async def test_a_throttled_event_is_retried(cluster: OperatedCluster) -> None:
    cluster.server.fault = failing("POST", EVENTS, 429, "busy", times=3)
    cluster.add_job(suspend=True)
    await cluster.wait_for(lambda: cluster.events("Suspended") == ["suspended"])
    assert cluster.server.count_requests("POST", EVENTS) == 4


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
async def test_an_event_is_recorded_once_if_the_answer_to_a_status_write_is_lost(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    original = Api.replace
    lost = iter([True])

    async def replace(self: Api, *args: Any) -> Any:
        loses = args[-1] == "status" and next(lost, False)
        if loses and not written:
            raise ClusterError("no answer")
        answer = await original(self, *args)
        if loses:
            cluster.cache.put(ELASTIC_JOBS, answer)  # a watch delivers the object, too
            raise ClusterError("no answer")
        return answer

    monkeypatch.setattr(Api, "replace", replace)
    cluster.add_job(suspend=True)
    await cluster.wait_for(lambda: cluster.events("Suspended") == ["suspended"] and cluster.holds("Suspended"))
    await cluster.reconcile()
    assert cluster.events("Suspended") == ["suspended"]


async def test_a_deleted_pod_group_is_created_again_when_it_changes(cluster: OperatedCluster) -> None:
    cluster.add_job(**GANG)
    await cluster.wait_for_pods(2)
    cluster.server.pop(SCHEDULER_PLUGINS_GROUPS, NAME)
    cluster.add_job(**GANG, minReplicas=1, maxReplicas=3, replicas=3)
    await cluster.wait_for_pods(3)
    assert cluster.server.get(SCHEDULER_PLUGINS_GROUPS, NAME)["spec"]["minMember"] == 1


async def test_an_unreadable_spec_is_invalid_and_nothing_else_changes(
    cluster: OperatedCluster,
) -> None:
    cluster.add_job()
    await cluster.wait_for_pods(2)
    await cluster.wait_for(lambda: cluster.status.get("desired") == 2)
    cluster.add_job(minReplicas="two")
    await cluster.wait_for(lambda: "minReplicas" in (cluster.message("Invalid") or ""))
    assert cluster.status["desired"] == 2
    assert len(cluster.server.of_kind(PODS)) == 2
    writes = cluster.server.count_requests("PUT", ELASTIC_JOBS)
    for _ in range(2):
        await cluster.reconcile()
    assert cluster.server.count_requests("PUT", ELASTIC_JOBS) == writes
    cluster.add_job()
    await cluster.wait_for(lambda: not cluster.holds("Invalid"))
    assert cluster.server.count_requests("PUT", ELASTIC_JOBS) == writes + 1


async def test_an_address_in_use_by_another_service_is_reported(cluster: OperatedCluster) -> None:
    cluster.add_job()
    await cluster.wait_for_pods(2)
    taken = 'spec.clusterIPs: Invalid value: ["127.9.9.9"]: failed to allocate IP: provided IP is already allocated'
    cluster.server.fault = failing("POST", SERVICES, 422, taken, times=inf)
    service = cluster.server.get(SERVICES, etcd_name(NAME))
    cluster.server.pop(SERVICES, etcd_name(NAME))
    cluster.cache.remove(SERVICES, service)
    await cluster.wait_for(lambda: "delete these pods" in str(cluster.status.get("conditions")))
    assert not cluster.holds("Invalid")


class Nodes:
    """A mirror of a job's etcd that contains the agents' metrics ports."""

    def __init__(self, **ports: int) -> None:
        self.nodes = {
            name: NodeRecord(name=name, address="10.0.0.1", workers=1, size=a_size(1), metrics=port)
            for name, port in ports.items()
        }
        self.connected = self.readable = False
        self.names: dict[str, str] = {}
        self.round = self.outcome = self.size = self.time_breakdown = self.history = None


@pytest.mark.parametrize("template", [{}, {"prometheus.io/scrape": "false", "prometheus.io/port": "80"}])
async def test_metrics_ports_chosen_by_agents_are_annotated_on_their_pods_once(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch, template: dict[str, str]
) -> None:
    cluster.add_job(metricsPort=0, template={"metadata": {"annotations": template}})
    await cluster.wait_for_pods(2)
    one, other = (pod["metadata"]["name"] for pod in cluster.server.of_kind(PODS))
    mirror = Nodes(**{one: 40123, other: 65536, "gone": 40125})
    monkeypatch.setattr(JobStores, "of", lambda _stores, _uid: mirror)
    forbidden = 'pods is forbidden: User "x" cannot patch resource "pods"'
    cluster.server.fault = lambda method, _path: (403, "Forbidden", forbidden) if method == "PATCH" else None
    cluster.run_pods()
    for _ in range(3):
        await cluster.reconcile()
    cluster.server.fault = lambda _method, _path: None

    def written() -> dict[str, str]:
        annotations: dict[str, str] = cluster.server.get(PODS, one)["metadata"]["annotations"]
        return annotations

    await cluster.wait_for(lambda: written().get("elastic.pytorch.org/metrics-port") == "40123")
    expected = {"scrape": "true", "port": "40123"} if not template else {"scrape": "false", "port": "80"}
    assert {name: written()[f"prometheus.io/{name}"] for name in expected} == expected
    writes = cluster.server.count_requests("PATCH", PODS)
    for _ in range(2):
        await cluster.reconcile()
    assert cluster.server.count_requests("PATCH", PODS) == writes
    assert "elastic.pytorch.org/metrics-port" not in cluster.server.get(PODS, other)["metadata"]["annotations"]
