"""Dashboards and alerts of a real operator with a real Prometheus and a real API server.

There is no kubelet; the tests act as the kubelet and the agents. The metrics of agents are tested in tests/integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from scripts.monitoring.alerts import GROUPS
from scripts.monitoring.dashboard import Needs
from scripts.monitoring.fleet import FLEET_DASHBOARD
from scripts.monitoring.job import JOB_DASHBOARD
from tests.support.monitored import complaints, filled_in, queries, unit_of
from tests.support.operator_namespace import OperatorNamespace, holds
from tests.support.operator_process import OperatorProcess
from tests.support.prometheus import Prometheus, promtool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from scripts.monitoring.dashboard import Dashboard, Panel, Query
    from testbed.cluster import Cluster
    from tests.support.etcd import EtcdServer
    from tests.support.prometheus import Answer
    from tests.support.watching_api import WatchingApi

pytestmark = [pytest.mark.control_plane, pytest.mark.prometheus, pytest.mark.asyncio(loop_scope="session")]

ALERTS = {alert.name: alert for alerts in GROUPS.values() for alert in alerts}


class Watched:
    """An operator, its Prometheus, and two jobs: one job trains and the other one lacks a pod.

    Attributes:
        prometheus: the server, which scrapes the operator from before the jobs are created.
        operator: the operator, which is the leader.
        namespace: the namespace of the jobs.
    """

    prometheus: Prometheus
    operator: OperatorProcess
    namespace: str

    async def answer(self, expr: str, job: str) -> Answer:
        """Return the answer to a dashboard query about one job or all jobs."""
        return await self.prometheus.query(filled_in(expr, {"job_namespace": self.namespace, "elasticjob": job}))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(
    api: WatchingApi, cluster_with_crd: Cluster, etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Watched]:
    """The first job has replaced one of its two pods, which failed; one of the second job's two pods never runs."""
    folder = tmp_path_factory.mktemp("watched")
    found = Watched()
    async with (
        etcd.connected() as store,
        cluster_with_crd.namespace() as namespace,
        Prometheus.running(folder / "prometheus") as prometheus,
    ):
        ns = OperatorNamespace(api, cluster_with_crd, namespace)
        async with ns.operator(folder) as operator:
            prometheus.scrape([operator.address])
            found.prometheus, found.operator, found.namespace = prometheus, operator, namespace
            outside = {"etcd": {"endpoint": etcd.endpoint}}
            trains, lacks = [
                await ns.apply(name, minReplicas=2, replicas=2, backoffLimit=2, **outside)
                for name in ("trains", "lacks")
            ]
            # Prometheus sees an increase only of a series that it has scraped before.
            await prometheus.until(
                "count_over_time(elastic_operator_job_min_pods[1m]) > 4", lambda seen: len(seen) == 2
            )
            victim = min(await ns.wait_for_pods(2, "trains"))
            await ns.report_running(victim)
            await ns.report_ended(victim, 1)
            await ns.wait_for_job(lambda status: status.get("podFailures") == 1, "trains")
            await ns.report_round(store, trains, *await ns.wait_for_pods(2, "trains"))
            await ns.report_joined(store, lacks, min(await ns.wait_for_pods(2, "lacks")))
            await ns.wait_for_job(lambda status: status.get("readyReplicas") == 1, "lacks")
            await ns.wait_for_job(lambda status: holds(status, "Running"), "trains")
            await prometheus.until('elastic_operator_job_condition{condition="Running"} == 1')
            await prometheus.until("elastic_operator_apply_to_running_seconds_count offset 2s == 1")
            yield found


def answerable_queries(dashboard: Dashboard) -> list[Any]:
    """Return the dashboard queries that an operator answers."""
    return [
        pytest.param(panel, query, id=" ".join(filter(None, (panel.title, query.legend))))
        for panel, query in queries(dashboard)
        if query.needs is Needs.OPERATOR
    ]


@pytest.mark.parametrize(("panel", "query"), [*answerable_queries(FLEET_DASHBOARD), *answerable_queries(JOB_DASHBOARD)])
async def test_every_operator_panel_has_data_of_the_right_unit_and_size(
    watched: Watched, panel: Panel, query: Query
) -> None:
    answer = await watched.answer(query.expr, "trains")
    assert not list(complaints(answer, unit_of(panel, query), age=600)), query.expr


async def test_the_dashboards_show_the_jobs(watched: Watched) -> None:
    async def one(dashboard: Dashboard, title: str, legend: str = "", job: str = "trains") -> float:
        found = {(panel.title, query.legend): query.expr for panel, query in queries(dashboard)}
        [sample] = await watched.answer(found[title, legend], job)
        return sample.value

    assert await one(FLEET_DASHBOARD, "Jobs") == 2
    assert await one(FLEET_DASHBOARD, "Running") == 1
    assert await one(FLEET_DASHBOARD, "Waiting") == 1
    # Prometheus extrapolates an increase to the ends of its range.
    assert round(await one(FLEET_DASHBOARD, "Restarts")) == 1
    for legend, trains, lacks in (("desired", 2, 2), ("ready", 2, 1), ("minimum", 2, 2)):
        assert await one(JOB_DASHBOARD, "Pods", legend) == trains
        assert await one(JOB_DASHBOARD, "Pods", legend, "lacks") == lacks
    assert await one(FLEET_DASHBOARD, "Leader", "{{instance}}") == 1
    causes = {(panel.title, query.legend): query.expr for panel, query in queries(FLEET_DASHBOARD)}
    by_cause = {
        sample.labels["cause"]: round(sample.value)
        for sample in await watched.answer(causes["Restarts by cause", "{{cause}}"], "")
    }
    assert by_cause == {"worker_failed": 0, "uncharged": 0, "pod_failed": 1}


async def test_alerts_name_the_job_concerned(watched: Watched) -> None:
    async def about(name: str) -> set[str]:
        return {sample.labels["elasticjob"] for sample in await watched.prometheus.query(ALERTS[name].expr)}

    assert await about("ElasticJobBelowMinimum") == {"lacks"}
    assert await about("ElasticJobBudgetNearlySpent") == {"trains"}
    assert await about("ElasticJobNotScraped") == {"trains"}
    assert await about("ElasticJobRestartStorm") == set()
    assert await about("ElasticJobStoreUnreachable") == set()
    for name in ("ElasticOperatorDown", "ElasticOperatorNotReconciling"):
        assert await watched.prometheus.query(ALERTS[name].expr) == []


async def test_promtool_accepts_the_metrics_page_of_the_operator(watched: Watched) -> None:
    status, page = await watched.operator.get("/metrics")
    assert status == 200
    run = promtool("check", "metrics", stdin=page)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


async def test_an_operator_without_list_permission_raises_an_alert(cluster_with_crd: Cluster, tmp_path: Path) -> None:
    async with cluster_with_crd.namespace() as namespace, Prometheus.running(tmp_path / "prometheus") as prometheus:
        await cluster_with_crd.kubectl("create", "serviceaccount", "nobody", f"--namespace={namespace}")
        kubeconfig = await cluster_with_crd.kubeconfig_for(namespace, "nobody")
        async with OperatorProcess(tmp_path, kubeconfig, f"--namespace={namespace}", wait=False) as operator:
            await operator.wait_for_log(
                "the objects cannot be listed: ", f":{namespace}:nobody", 'cannot list resource "'
            )
            prometheus.scrape([operator.address])
            [sample] = await prometheus.until("max(elastic_operator_leader)")
            assert sample.value == 0
            assert await prometheus.query(ALERTS["ElasticOperatorDown"].expr)
            status, words = await operator.get("/readyz")
            assert status == 503
            assert "grant the operator its permissions" in words


async def test_a_missing_operator_raises_an_alert(watched: Watched) -> None:
    assert await watched.operator.stop() == 0
    assert await watched.prometheus.until(ALERTS["ElasticOperatorDown"].expr)
