"""The ConfigMap with the report of a job, also on a failing API server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elastic_operator.api.status import JobState, Report, decode_report
from elastic_operator.kubernetes.client import CONFIG_MAPS, DEPLOYMENTS, PODS, Api
from elastic_operator.kubernetes.object_cache import ObjectCache
from elastic_operator.kubernetes.writer import Blocked, Writer
from tests.support.builders import NAME, NOW, UID, a_job
from tests.support.object_server import MADE, NAMESPACE, ObjectServer
from tests.support.operated_cluster import OperatedCluster
from torchelastic.protocol.records import HistoryRecord, PastRound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.object_server import Fault

REPORT = f"{NAME}-report"


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    async with ObjectServer() as server:
        yield server


@pytest.fixture
async def api(server: ObjectServer) -> AsyncIterator[Api]:
    async with Api(server.configuration) as api:
        yield api


def a_report(*numbers: int, state: JobState = JobState.SUCCEEDED) -> Report:
    rounds = tuple(PastRound(number=number, began=NOW) for number in numbers)
    history = HistoryRecord(created=NOW, rounds=rounds)
    return Report(namespace=NAMESPACE, name=NAME, uid=UID, created=NOW, state=state, history=history)


def stored_report(server: ObjectServer) -> Report:
    return decode_report(server.get(CONFIG_MAPS, REPORT)["data"]["report.json"])


async def store_report(api: Api, report: Report) -> None:
    writer = Writer(api, ObjectCache(changed=lambda _key: None))
    await writer.write_report(replace(a_job(), namespace=NAMESPACE), report)


async def test_a_later_report_is_merged_with_the_one_that_exists(server: ObjectServer, api: Api) -> None:
    await store_report(api, a_report(1, 2, state=JobState.SUSPENDED))
    await store_report(api, a_report(3))
    assert stored_report(server) == a_report(1, 2, 3)
    assert [method for method, _ in server.requests] == ["POST", "POST", "GET", "PATCH"]
    await store_report(api, a_report(3))
    assert [method for method, _ in server.requests[4:]] == ["POST", "GET"], "an unchanged report is not written again"
    server.put(CONFIG_MAPS, REPORT, data={"report.json": "overwritten"})
    await store_report(api, a_report(2))
    assert stored_report(server) == a_report(2)


async def test_a_config_map_of_another_owner_is_not_changed(server: ObjectServer, api: Api) -> None:
    server.put(CONFIG_MAPS, REPORT, data={"mine": "1"})
    with pytest.raises(Blocked, match=f"a ConfigMap named {REPORT} exists and does not belong to this job"):
        await store_report(api, a_report(1))
    assert server.get(CONFIG_MAPS, REPORT)["data"] == {"mine": "1"}


def succeeds(cluster: OperatedCluster) -> None:
    """Let all agents exit with the code of a successful run."""
    worker = {"name": "worker", "state": {"terminated": {"exitCode": 0, "finishedAt": MADE}}}
    for pod in cluster.server.of_kind(PODS):
        cluster.change(PODS, pod["metadata"]["name"], status={"phase": "Succeeded", "containerStatuses": [worker]})


@pytest.fixture
async def cluster() -> AsyncIterator[OperatedCluster]:
    async with OperatedCluster() as cluster:
        yield cluster


async def test_the_report_is_written_before_the_final_status_and_before_etcd_is_deleted(
    cluster: OperatedCluster,
) -> None:
    cluster.add_job()
    await cluster.wait_for_pods()
    succeeds(cluster)
    await cluster.wait_for(lambda: cluster.server.count_requests("DELETE", DEPLOYMENTS) == 1)
    assert cluster.status["state"] == "Succeeded"
    assert cluster.status["timeBreakdown"]["seconds"].keys() == {"waiting"}
    written = [path for _, path in cluster.server.requests].index(CONFIG_MAPS.path(NAMESPACE))
    statuses = [at for at, (method, _) in enumerate(cluster.server.requests) if method == "PUT"]
    assert statuses[-2] < written < statuses[-1]
    document = json.loads(cluster.server.get(CONFIG_MAPS, REPORT)["data"]["report.json"])
    assert (document["job"]["name"], document["job"]["state"]) == (NAME, "Succeeded")
    assert document["timeBreakdown"] == cluster.status["timeBreakdown"]
    await cluster.reconcile()
    assert cluster.server.count_requests("POST", CONFIG_MAPS) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((403, "Forbidden", "configmaps is forbidden: exceeded quota: small"), "raise that quota"),
        ((422, "Invalid", "metadata.labels: no"), "metadata.labels: no"),
        ((500, "InternalError", 'admission webhook "a.b.c" denied the request: no'), "denied the request: no"),
    ],
)
async def test_a_job_whose_report_is_rejected_finishes_with_an_event(
    cluster: OperatedCluster, fault: Fault, words: str
) -> None:
    cluster.server.fault = lambda _method, path: fault if "configmaps" in path else None
    cluster.add_job()
    await cluster.wait_for_pods()
    succeeds(cluster)
    await cluster.wait_for(lambda: cluster.server.count_requests("DELETE", DEPLOYMENTS) == 1)
    await cluster.wait_for(lambda: len(cluster.events("ReportNotKept")) == 1)
    message = cluster.events("ReportNotKept")[0]
    assert message.startswith(f"the run's report cannot be written to the ConfigMap {REPORT}: ")
    assert words in message
    assert cluster.status["state"] == "Succeeded"
    await cluster.reconcile()
    assert cluster.server.count_requests("POST", CONFIG_MAPS) == 1


@pytest.mark.parametrize("why", ["etcdserver: leader changed", 'failed calling webhook "a.b.c": connection refused'])
async def test_etcd_is_kept_while_the_report_cannot_be_written(cluster: OperatedCluster, why: str) -> None:
    def fault(_method: str, path: str) -> Fault | None:
        return (500, "InternalError", why) if "configmaps" in path else None

    cluster.server.fault = fault
    cluster.add_job()
    await cluster.wait_for_pods()
    succeeds(cluster)
    await cluster.wait_for(lambda: cluster.status.get("state") == "Succeeded")
    for _ in range(2):
        await cluster.reconcile()
    tried = cluster.server.count_requests("DELETE", DEPLOYMENTS)
    cluster.server.fault = lambda _method, _path: None
    await cluster.wait_for(lambda: cluster.server.count_requests("DELETE", DEPLOYMENTS) == 1)
    assert tried == 0
