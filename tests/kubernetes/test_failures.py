"""Failures of programs, pods and nodes on a real kubelet: the effect on the job, and its messages.

The programs do not train and do not need torch, because only the failure of the program, pod or node matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster_user import job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.node import Node
    from tests.support.cluster_user import User

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NODE = "node1"
WAITS = "import time; time.sleep(100_000)"
"""A program that runs until it is stopped."""
UNPRIVILEGED = {"securityContext": {"runAsNonRoot": True}}
Json = dict[str, Any]


def a_job(name: str, program: str = WAITS, *, pod: Json | None = None, worker: Json | None = None, **spec: Any) -> Json:
    """Return a job of this program; ``pod`` and ``worker`` are fields of its template."""
    containers = {"containers": [{"name": "worker", **worker}]} if worker else {}
    template = {"spec": {**UNPRIVILEGED, **containers, **(pod or {})}}
    return job(name, command=["python3", "-c", program], template=template, **spec)


def message_of(status: Json, kind: str) -> str:
    """Return the message of a condition that is true, or else an empty string."""
    holds = (each for each in status.get("conditions", ()) if each["type"] == kind and each["status"] == "True")
    return str(next((each.get("message", "") for each in holds), ""))


def has_no_charges(status: Json) -> bool:
    return not status.get("podFailures") and not status.get("restarts")


async def evict(user: User, pod: str) -> None:
    """Evict a pod through the API, like ``kubectl drain``."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": user.namespace}}
    path = f"/api/v1/namespaces/{user.namespace}/pods/{pod}/eviction"
    await user.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


async def wait_for_ready_pods(user: User, name: str, count: int) -> dict[str, Json]:
    """Wait until this number of pods of a job is ready, and return the pods."""
    await user.wait(f"elasticjob/{name}", f"jsonpath={{.status.readyDesired}}={count}/{count}")
    return await user.pods(name)


# The program


async def test_a_program_exception_is_reported_with_rank_pod_and_message(user: User) -> None:
    program = f"""
import os
if os.environ["RANK"] == "3":
    raise ValueError("no such digit: 11")
{WAITS}
"""
    await user.apply(a_job("fails", program, replicas=2, minReplicas=2, nprocPerNode=2, maxRestarts=0))
    status = (await user.wait_for_status("fails", lambda status: bool(message_of(status, "Failed"))))["status"]
    assert re.search(r"rank 3 on fails-[01]-\w+: ValueError: no such digit: 11", message_of(status, "Failed"))
    assert "ValueError: no such digit: 11" in await user.events("fails")
    failure = status["lastFailure"]
    assert (failure["rank"], failure["exitCode"]) == (3, 1)
    assert f"rank 3 on {failure['pod']}: " in message_of(status, "Failed")
    assert "ValueError: no such digit: 11" in failure["message"]
    assert status["state"] == "Failed"


async def test_exit_codes_are_charged_as_the_failure_policy_says(user: User) -> None:
    program = """
import os, pathlib, sys
tries = pathlib.Path(os.environ["TORCHELASTIC_CHECKPOINT_DIR"])
tries.mkdir(parents=True, exist_ok=True)
number = len(list(tries.iterdir()))
(tries / str(number)).touch()
sys.exit(9 if number < 2 else 7)
"""
    rules = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [9]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [7]}},
    ]
    await user.apply(a_job("codes", program, replicas=1, maxRestarts=1, failurePolicy={"rules": rules}))
    status = (await user.wait_for_status("codes", lambda status: bool(message_of(status, "Failed"))))["status"]
    assert status["lastFailure"]["exitCode"] == 7
    assert status["restarts"] <= 1, "exit code 9 is charged"
    assert status["unchargedRestarts"] >= 2


async def test_a_program_over_its_memory_limit_is_reported_and_charged(user: User) -> None:
    program = "hoard = [bytearray(b'x' * 2**20) for _ in range(4096)]"
    limits = {"resources": {"limits": {"memory": "1500Mi"}}}
    await user.apply(a_job("hoards", program, worker=limits, replicas=1, maxRestarts=0))
    status = (await user.wait_for_status("hoards", lambda status: bool(message_of(status, "Failed"))))["status"]
    assert "memory" in message_of(status, "Failed")
    assert "memory" in await user.events("hoards")
    assert "memory" in status["lastFailure"]["message"]


# The pod


async def test_an_evicted_or_deleted_pod_is_replaced_without_a_charge(user: User) -> None:
    await user.apply(a_job("evicted", replicas=2))
    first = await wait_for_ready_pods(user, "evicted", 2)
    victim = min(first)
    await evict(user, victim)
    await user.wait(f"pod/{victim}", "delete")
    second = await wait_for_ready_pods(user, "evicted", 2)
    assert first[max(first)]["metadata"]["uid"] == second[max(first)]["metadata"]["uid"], "the other pod is replaced"

    await user.kubectl("delete", "pod", max(first), "--grace-period=0", "--force")
    await user.wait_for_status("evicted", lambda status: status["readyDesired"] == "2/2")
    third = await wait_for_ready_pods(user, "evicted", 2)
    assert max(first) not in third
    status = (await user.get("elasticjob/evicted"))["status"]
    assert has_no_charges(status)
    events = await user.events("evicted")
    assert victim in events
    assert max(first) in events


@pytest.mark.parametrize("excludes", [False, True])
async def test_a_pod_over_its_storage_limit_is_evicted_and_charged_unless_a_rule_ignores_the_failure(
    user: User, excludes: bool
) -> None:
    program = f"open('/scratch/file', 'wb').write(b'x' * 64 * 2**20)\n{WAITS}"
    rule = {"action": "Ignore", "onPodReasons": ["Evicted"], "excludeNode": True}
    await user.apply(
        a_job(
            "writes",
            program,
            pod={"volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}}]},
            worker={"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
            replicas=1,
            backoffLimit=0,
            **({"failurePolicy": {"rules": [rule]}} if excludes else {}),
        )
    )
    if excludes:
        status = (
            await user.wait_for_status(
                "writes", lambda status: "it cannot be scheduled" in message_of(status, "Waiting")
            )
        )["status"]
        assert status["excludedNodes"] == [NODE]
        assert has_no_charges(status), "the failure of the pod itself is also counted"
        assert NODE in await user.events("writes")
    else:
        status = (await user.wait_for_status("writes", lambda status: bool(message_of(status, "Failed"))))["status"]
        assert status["podFailures"] == 1
        assert 'Usage of EmptyDir volume "scratch" exceeds the limit' in message_of(status, "Failed")


async def test_a_missing_image_is_reported_without_a_charge(user: User) -> None:
    late = f"localhost/late:{uuid.uuid4().hex}"
    await user.apply(a_job("late", replicas=1, image=late))
    await user.wait_for_status(
        "late", lambda status: f"the image {late} cannot be pulled" in message_of(status, "Waiting")
    )
    async with user.node.image_called(late, "elastic-agent:dev"):
        await wait_for_ready_pods(user, "late", 1)
        assert has_no_charges((await user.get("elasticjob/late"))["status"])
        assert await user.delete("late") == []


async def test_a_volume_with_a_missing_secret_is_reported_without_a_charge(user: User) -> None:
    keyed = a_job(
        "keyed",
        pod={"volumes": [{"name": "key", "secret": {"secretName": "late-key"}}]},
        worker={"volumeMounts": [{"name": "key", "mountPath": "/key"}]},
        replicas=1,
    )
    await user.apply(keyed)
    missing = 'MountVolume.SetUp failed for volume "key" : secret "late-key" not found; create it'
    await user.wait_for_status("keyed", lambda status: missing in message_of(status, "Waiting"))
    await user.kubectl("create", "secret", "generic", "late-key", "--from-literal=key=1")
    await wait_for_ready_pods(user, "keyed", 1)
    status = (await user.wait_for_status("keyed", lambda status: not message_of(status, "Waiting")))["status"]
    assert has_no_charges(status)


async def test_a_pod_rejected_by_its_node_is_created_again_with_backoff_and_without_a_charge(user: User) -> None:
    await user.apply(
        a_job("forced", pod={"nodeName": NODE}, worker={"resources": {"requests": {"cpu": "1000"}}}, replicas=1)
    )
    job = await user.wait_for_status(
        "forced", lambda status: "failed 2 times in a row" in message_of(status, "Waiting")
    )
    assert has_no_charges(job["status"])
    assert re.search(rf"was not admitted by its node\s+{NODE}: OutOfcpu", await user.events("forced"))


# The node


async def test_a_drained_node_loses_its_pods_without_a_charge(user: User) -> None:
    await user.apply(a_job("drained", replicas=2))
    before = await wait_for_ready_pods(user, "drained", 2)
    workers = "--pod-selector=elastic.pytorch.org/job=drained,elastic.pytorch.org/role=worker"
    try:
        await user.node.kubectl("drain", NODE, workers, "--delete-emptydir-data", "--timeout=120s")
        job = await user.wait_for_status("drained", lambda status: "unschedulable" in message_of(status, "Waiting"))
        assert job["status"]["state"] == "Waiting"
    finally:
        await user.node.kubectl("uncordon", NODE)
    after = await wait_for_ready_pods(user, "drained", 2)
    assert not before.keys() & after.keys()
    assert has_no_charges((await user.get("elasticjob/drained"))["status"])
    events = await user.events("drained")
    for pod in before:
        assert pod in events


@contextlib.asynccontextmanager
async def another_node(node: Node) -> AsyncIterator[None]:
    """Add a second, unschedulable node, because Kubernetes evicts no pods if all nodes are silent."""
    name = "witness"
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Well",
        "lastHeartbeatTime": now(),
        "lastTransitionTime": now(),
    }
    about = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"unschedulable": True}}
    await node.kubectl("create", "-f", "-", stdin=json.dumps(about))

    async def live() -> None:
        while True:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name, "namespace": "kube-node-lease"},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now(micro=True)},
            }
            await node.kubectl("apply", "-f", "-", stdin=json.dumps(lease))
            await asyncio.sleep(10)  # as a kubelet does

    living = asyncio.create_task(live())
    try:
        status = json.dumps({"status": {"conditions": [ready]}})
        await node.kubectl("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={status}")
        yield
    finally:
        living.cancel()
        await asyncio.wait({living})
        await node.kubectl("delete", "node", name)
        await node.kubectl("delete", "lease", name, "--namespace=kube-node-lease", "--ignore-not-found")


def now(*, micro: bool = False) -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


async def test_pods_of_a_silent_node_are_replaced_without_a_charge(user: User) -> None:
    await user.apply(a_job("silent", replicas=1, nodeLossSeconds=1))
    (lost,) = await wait_for_ready_pods(user, "silent", 1)
    async with another_node(user.node):
        await user.node.run("pkill", "-STOP", "-x", "kubelet")
        try:
            # The pods of the node stay Terminating until their kubelet reports that they have terminated.
            await user.wait(f"pod/{lost}", "jsonpath={.metadata.deletionTimestamp}")
            job = await user.wait_for_status(
                "silent", lambda status: "it cannot be scheduled" in message_of(status, "Waiting")
            )
            assert len((await user.pods("silent")).keys() - {lost}) == 1
            assert (await user.get(f"pod/{lost}"))["status"]["phase"] == "Running", "the pod is reported as ended"
            assert has_no_charges(job["status"])
            assert re.search(rf"{lost}[^\n]*\n?[^\n]*lost with\s+its node {NODE}", await user.events("silent"))
        finally:
            await user.node.run("pkill", "-CONT", "-x", "kubelet")
        await user.node.kubectl("wait", f"node/{NODE}", "--for=condition=Ready", "--timeout=120s")
    await user.wait(f"pod/{lost}", "delete")
    after = await wait_for_ready_pods(user, "silent", 1)
    assert lost not in after
    assert has_no_charges((await user.get("elasticjob/silent"))["status"])
