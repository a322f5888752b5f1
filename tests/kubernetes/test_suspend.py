"""Suspension on a real kubelet: the job keeps only its checkpoints, and resumes from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster_user import job

if TYPE_CHECKING:
    from tests.support.cluster_user import User

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

WAITS = "import time; time.sleep(100_000)"
UNPRIVILEGED = {"securityContext": {"runAsNonRoot": True}}


async def test_a_suspended_job_frees_its_resources_and_keeps_its_charges(user: User) -> None:
    await user.apply(job("rests", command=["python3", "-c", WAITS], replicas=2))
    await user.wait("elasticjob/rests", "condition=Running")
    await user.wait("elasticjob/rests", "jsonpath={.status.worldSize}=2")
    await user.kill(next(iter((await user.pods("rests")).values())), WAITS)
    await user.wait("elasticjob/rests", "jsonpath={.status.restarts}=1")
    await user.wait("elasticjob/rests", "condition=Running")
    before = (await user.get("elasticjob/rests"))["status"]

    await user.kubectl("patch", "elasticjob", "rests", "--type=merge", '--patch={"spec":{"suspend":true}}')
    await user.wait("elasticjob/rests", "condition=Suspended")
    itself, report = "elasticjob.elastic.pytorch.org/rests", "configmap/rests-report"
    left = [report, "secret/rests-etcd", itself]
    assert await user.left_for_good(*left) == left
    resting = (await user.get("elasticjob/rests"))["status"]
    assert resting["state"] == "Suspended"
    assert (resting["restarts"], resting["replicas"], resting["podFailures"]) == (1, 0, 0)
    assert resting["round"] >= before["round"]
    assert resting["timeBreakdown"]["seconds"]["training"] > 0

    # The pod settings may change while the job is suspended.
    template = {"metadata": {"labels": {"tier": "night"}}, "spec": UNPRIVILEGED}
    await user.apply(
        job("rests", command=["python3", "-c", WAITS], replicas=1, template=template, suspend=False, maxRestarts=1)
    )
    await user.wait("elasticjob/rests", "condition=Running")
    (pod,) = (await user.pods("rests")).values()
    assert pod["metadata"]["labels"]["tier"] == "night"
    after = (await user.get("elasticjob/rests"))["status"]
    assert after["round"] > resting["round"]
    assert (after["restarts"], after["podFailures"]) == (1, 0)

    # Earlier failures count: one failure is permitted, and this is the second.
    await user.kill(pod, WAITS)
    await user.wait("elasticjob/rests", "condition=Failed")
    kept = json.loads((await user.get(report))["data"]["report.json"])
    assert [round["number"] for round in kept["rounds"]] == list(range(1, kept["outcome"]["round"] + 1))
    assert kept["timeBreakdown"] == (await user.get("elasticjob/rests"))["status"]["timeBreakdown"]
    assert await user.delete("rests") == []
