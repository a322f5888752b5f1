"""Dashboards on a real kubelet: a real Prometheus on the node scrapes the pods and the operator.

Debian's Prometheus has no Kubernetes discovery, so the test writes its targets from the API server's pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from scripts.monitoring.fleet import FLEET_PAGE
from scripts.monitoring.job import JOB_PAGE
from scripts.monitoring.page import Needs
from tests.support.cluster_user import SIGHT, job
from tests.support.monitored import OWN, PROGRAM, complaints, filled_in, queries, unit_of
from tests.support.prometheus import EVERY, answer_of, program, prometheus_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.cluster_user import User
    from tests.support.prometheus import Answer
    from tests.support.testbed.node import Node

pytestmark = [
    pytest.mark.node,
    pytest.mark.prometheus,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

TARGETS = "targets.json"
PORT = 9090
"""A port that is unused on the node."""


class PrometheusInside:
    """A Prometheus on the node, queried with promtool."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def query(self, expr: str) -> Answer:
        """The present answer to a query."""
        where = f"http://127.0.0.1:{PORT}"
        asked = await self._node.run(str(program("promtool")), "query", "--format=json", "instant", where, expr)
        return answer_of(json.loads(asked.stdout))

    async def until(self, expr: str, condition: Callable[[Answer], object] = bool) -> Answer:
        """Query until the answer meets a condition."""
        answer: Answer = []
        try:
            async with asyncio.timeout(SIGHT):
                while True:
                    with contextlib.suppress(AssertionError):  # Prometheus does not serve yet
                        answer = await self.query(expr)
                        if condition(answer):
                            return answer
                    await asyncio.sleep(EVERY)
        except TimeoutError:
            raise AssertionError(f"{expr} did not meet the condition; last answer: {answer}") from None


@contextlib.asynccontextmanager
async def prometheus_on(node: Node, folder: Path) -> AsyncIterator[PrometheusInside]:
    """A Prometheus on the node."""
    found = {"job_name": "elastic", "file_sd_configs": [{"files": [str(folder / TARGETS)]}]}
    process = await node.popen(*prometheus_command(folder, PORT, [found]), stderr=asyncio.subprocess.STDOUT)
    assert process.stdout is not None
    log = asyncio.create_task(process.stdout.read())
    try:
        yield PrometheusInside(node)
        assert process.returncode is None, (await log).decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await log


async def annotated_targets(node: Node) -> list[dict[str, Any]]:
    """The pods with scrape annotations, as a Prometheus with annotation discovery finds them."""
    listing = json.loads((await node.kubectl("get", "pods", "--all-namespaces", "-o", "json")).stdout)
    found = []
    for pod in listing["items"]:
        about, address = pod["metadata"], pod["status"].get("podIP")
        notes = {name.removeprefix("prometheus.io/"): text for name, text in about.get("annotations", {}).items()}
        if address and notes.get("scrape") == "true":
            names = {"namespace": about["namespace"], "pod": about["name"], "__metrics_path__": notes["path"]}
            found.append({"targets": [f"{address}:{notes['port']}"], "labels": names})
    return found


async def test_every_panel_shows_a_job_that_is_scaled_and_loses_a_worker(user: User, tmp_path: Path) -> None:
    command = ["python3", "-c", PROGRAM, "/tmp"]
    # The operator has reconciled no job in the last seconds, but in the last minute.
    values = {"job_namespace": user.namespace, "elasticjob": "measured", **OWN, "__rate_interval": "1m"}

    async with prometheus_on(user.node, tmp_path) as prometheus:

        async def scrape() -> None:
            (tmp_path / "new").write_text(json.dumps(await annotated_targets(user.node)))
            (tmp_path / "new").rename(tmp_path / TARGETS)

        async def one(title: str, legend: str = "") -> float:
            found = {(panel.title, query.legend): query.expr for panel, query in queries(JOB_PAGE)}
            [sample] = await prometheus.query(filled_in(found[title, legend], values))
            return sample.value

        await user.apply(job("measured", replicas=2, maxRestarts=5, command=command))
        await user.wait("elasticjob/measured", "jsonpath={.status.worldSize}=2")
        await scrape()
        await prometheus.until("torchelastic_world_size == 2", lambda answer: len(answer) == 2)
        await user.kubectl("scale", "elasticjob/measured", "--replicas=3")
        await user.wait("elasticjob/measured", "jsonpath={.status.worldSize}=3")
        await scrape()
        await prometheus.until("torchelastic_checkpoint_write_latency_seconds_count > 1", lambda seen: len(seen) == 3)
        pods = await user.pods("measured")
        await user.kill(next(iter(pods.values())), "my_app")
        await user.wait("elasticjob/measured", "jsonpath={.status.restarts}=1")
        await user.wait("elasticjob/measured", "jsonpath={.status.worldSize}=3")
        round = (await user.get("elasticjob/measured"))["status"]["round"]
        await prometheus.until(f"torchelastic_round offset 10s == {round}", lambda answer: len(answer) == 3)

        wrong = {}
        for page in (JOB_PAGE, FLEET_PAGE):
            for panel, query in queries(page):
                if query.needs is not Needs.GPU:
                    answer = await prometheus.query(filled_in(query.expr, values))
                    if said := list(complaints(answer, unit_of(panel, query), age=600)):
                        wrong[page.title, panel.title, query.legend] = said
        assert wrong == {}

        assert await one("Workers") == 3
        assert await one("Round", "round") == round
        assert await one("Restarts", "charged") == 1
        assert await one("Remaining restarts") == 4
        assert await one("Pods", "ready") == 3
        made = (await user.get("elasticjob/measured"))["metadata"]["creationTimestamp"]
        [age] = await prometheus.query(f"vector(time() - {datetime.fromisoformat(made).timestamp()})")
        assert await one("Age") == pytest.approx(age.value, abs=3, rel=0.01)
        answer = await prometheus.query('torchelastic_round{elasticjob="measured"}')
        assert {sample.labels["pod"] for sample in answer} == pods.keys()
        assert {sample.labels["namespace"] for sample in answer} == {user.namespace}
    assert await user.delete("measured") == []


async def test_agents_on_host_network_are_found_on_their_actual_ports(user: User, tmp_path: Path) -> None:
    """Several agents on one node, without ports in the pod specs."""
    enforced = "pod-security.kubernetes.io/enforce"
    await user.kubectl("label", "namespace", user.namespace, f"{enforced}=privileged", "--overwrite")
    pod = {"hostNetwork": True, "securityContext": {"runAsNonRoot": True}}
    await user.apply(job("hosted", replicas=2, template={"spec": pod}))
    await user.wait("elasticjob/hosted", "jsonpath={.status.worldSize}=2")
    pods = await user.pods("hosted")
    for name in pods:
        await user.wait(f"pod/{name}", r"jsonpath={.metadata.annotations.elastic\.pytorch\.org/metrics-port}")
    places = {found["labels"]["pod"]: found["targets"][0] for found in await annotated_targets(user.node)}
    own = {name: places[name] for name in pods}
    assert len(set(own.values())) == 2

    async with prometheus_on(user.node, tmp_path) as prometheus:
        (tmp_path / "new").write_text(json.dumps(await annotated_targets(user.node)))
        (tmp_path / "new").rename(tmp_path / TARGETS)
        seen = await prometheus.until('torchelastic_world_size{elasticjob="hosted"} == 2', lambda seen: len(seen) == 2)
        assert {sample.labels["pod"]: sample.labels["instance"] for sample in seen} == own

    shown = (await user.elasticjob("get", "hosted", "-o", "wide")).stdout
    assert all(place in shown for place in own.values())
    figures = (await user.elasticjob("top", "hosted")).stdout
    assert all(name in figures for name in pods)
    assert await user.delete("hosted") == []
