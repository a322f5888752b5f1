"""A user's work on a real kubelet, from ``helm install`` to ``helm uninstall``, with the images of the Dockerfiles."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.cluster_user import AGENT, ROOT, SIGHT, job

if TYPE_CHECKING:
    from testbed.node import Node
    from tests.support.cluster_user import User

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

RELEASE = "elastic-operator"
SYSTEM = "elastic-system"
ASKS_ETCD = """
import http.client, os, ssl, sys
folder = "/etc/torchelastic/etcd/"
context = ssl.create_default_context(cafile=folder + "ca.crt")
if sys.argv[1:]:
    context.load_cert_chain(folder + "tls.crt", folder + "tls.key")
connection = http.client.HTTPSConnection(os.environ["PET_RDZV_ENDPOINT"], context=context)
try:
    connection.request("POST", "/v3/kv/range", '{"key": "AA==", "range_end": "AA==", "count_only": true}')
    print(connection.getresponse().read().decode())
except (OSError, http.client.HTTPException) as error:
    print(f"refused: {error}")
"""


async def test_helm_test_asks_the_installed_operator(installed: Node) -> None:
    tested = await installed.run("helm", "test", RELEASE, "--namespace", SYSTEM, timeout=120)
    assert re.search(r"Phase: +Succeeded", tested.stdout)
    left = await installed.kubectl("--namespace", SYSTEM, "get", "pods,services", "--output=name")
    assert "-test" not in left.stdout


async def test_digits_trains_grows_succeeds_and_leaves_nothing(user: User) -> None:
    digits = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    # The job has fewer epochs than the example, because three pods share the machine.
    digits["spec"]["args"] = ["digits.py", "--epochs", "8"]
    await user.apply(digits)
    await user.wait("elasticjob/digits", "condition=Running")
    first = await user.pods("digits")
    assert len(first) == 2
    paused = max(first)
    await user.kill(first[paused], "digits.py", signal.SIGSTOP)  # so that training lasts until the third pod runs

    refused = await user.kubectl("scale", "elasticjob/digits", "--replicas=4", check=False)
    assert refused.returncode != 0
    assert "between minReplicas and maxReplicas" in refused.stderr

    await user.kubectl("scale", "elasticjob/digits", "--replicas=3")
    async with asyncio.timeout(SIGHT):
        while not (added := (await user.pods("digits")).keys() - first.keys()):
            pass
    await user.wait(f"pod/{added.pop()}", "jsonpath={.status.phase}=Running")
    await user.kill(first[paused], "digits.py", signal.SIGCONT)
    await user.wait("elasticjob/digits", "jsonpath={.status.worldSize}=3")
    await user.wait("elasticjob/digits", "jsonpath={.status.readyDesired}=3/3")
    now = await user.pods("digits")
    assert len(now) == 3
    for name, pod in first.items():
        assert now[name]["metadata"]["uid"] == pod["metadata"]["uid"], "a remaining pod was created again"

    shown = (await user.kubectl("get", "elasticjobs")).stdout.splitlines()
    assert shown[0].split() == ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert shown[1].split()[:6] == ["digits", "Running", "3/3", "1", "3", "0"]

    await user.wait("elasticjob/digits", "condition=Succeeded", limit="800s")
    await user.wait("elasticjob/digits", "condition=Finished")
    # The output of the pods is still available.
    printed = (await user.elasticjob("logs", "digits")).stdout
    assert re.search(r"test accuracy 0\.9\d\d", printed)
    split = (await user.get("elasticjob/digits"))["status"]["timeBreakdown"]["seconds"]
    assert split["training"] > split["restoring"] > 0
    assert "asOf" in (await user.get("elasticjob/digits"))["status"]["timeBreakdown"]
    page = (await user.elasticjob("report", "digits", "-o", "-")).stdout
    assert page.startswith("<!doctype html>")
    assert "Succeeded" in page
    assert (await user.get("configmap/digits-report"))["metadata"]["ownerReferences"][0]["name"] == "digits"

    events = await user.events("digits")
    assert "training started with 2 pods" in events
    assert "scaled from 2 to 3 pods" in events
    assert "Succeeded" in events

    assert await user.delete("digits") == []
    operator = (await user.node.kubectl("logs", "--namespace", SYSTEM, f"deployment/{RELEASE}")).stdout
    assert "managing the ElasticJobs" in operator
    assert " ERROR " not in operator
    assert "Traceback" not in operator


async def test_training_continues_after_every_kill_and_the_events_explain_the_failures(user: User) -> None:
    await user.apply(job("rounds", replicas=2))
    assert "of 2 workers" in await user.first_log_line("rounds")

    # Only those who have a certificate of the job can use its etcd.
    before = await user.pods("rounds")
    ask = ("exec", min(before), "--container=worker", "--", "python3", "-c", ASKS_ETCD)
    assert '"count":"' in (await user.kubectl(*ask, "with a certificate")).stdout
    assert "refused: " in (await user.kubectl(*ask)).stdout

    # A worker is killed: the same pods continue, and the failure is charged.
    await user.kill(next(iter(before.values())), "finish.exists")
    await user.wait("elasticjob/rounds", "jsonpath={.status.restarts}=1")
    await user.wait("elasticjob/rounds", "jsonpath={.status.worldSize}=2")
    assert (await user.pods("rounds")).keys() == before.keys()

    # A pod is deleted: it is replaced without a charge, and its last output is reported.
    victim = min(before)
    await user.kubectl("delete", "pod", victim)
    await user.wait("elasticjob/rounds", "jsonpath={.status.readyDesired}=2/2")
    await user.wait("elasticjob/rounds", "jsonpath={.status.worldSize}=2")
    status = (await user.get("elasticjob/rounds"))["status"]
    assert status["podFailures"] == 0
    assert status["restarts"] == 1

    # An agent is killed: its pod is kept for its log, and a new pod replaces it.
    victim = max(await user.pods("rounds"))
    await user.kill((await user.pods("rounds"))[victim], AGENT)
    await user.wait(f"pod/{victim}", "jsonpath={.status.phase}=Failed")
    await user.wait("elasticjob/rounds", "jsonpath={.status.podFailures}=1")
    await user.wait("elasticjob/rounds", "jsonpath={.status.readyDesired}=2/2")
    await user.wait("elasticjob/rounds", "jsonpath={.status.worldSize}=2")
    assert "round" in (await user.kubectl("logs", victim, "-c", "worker")).stdout

    # etcd is killed: training continues, and changes are possible again after its restart.
    round = (await user.get("elasticjob/rounds"))["status"]["round"]
    etcd = "-l=elastic.pytorch.org/job=rounds,elastic.pytorch.org/role=etcd"
    await user.kubectl("delete", "pod", etcd, "--grace-period=0", "--force")
    await user.wait("deployment/rounds-etcd", "condition=Available")
    assert (await user.get("elasticjob/rounds"))["status"]["round"] == round
    await user.kubectl("scale", "elasticjob/rounds", "--replicas=1")
    await user.wait("elasticjob/rounds", "jsonpath={.status.worldSize}=1")
    await user.wait("elasticjob/rounds", "jsonpath={.status.readyDesired}=1/1")

    events = await user.events("rounds")
    assert f"{victim} " in events
    assert "killed by SIGKILL" in events
    await user.finish("rounds")
    await user.wait("elasticjob/rounds", "condition=Succeeded")
    assert await user.delete("rounds") == []


async def test_an_operator_upgrade_disturbs_no_job(user: User) -> None:
    await user.apply(job("steady", replicas=1))
    await user.wait("elasticjob/steady", "condition=Running")
    before = await user.pods("steady")
    await user.node.run(
        "helm", "upgrade", RELEASE, str(ROOT / "charts"), "--namespace", SYSTEM, "--wait",
        "--set", "podLabels.upgraded=yes", timeout=180,
    )  # fmt: skip
    await user.kubectl("scale", "elasticjob/steady", "--replicas=2")
    await user.wait("elasticjob/steady", "jsonpath={.status.worldSize}=2")
    after = await user.pods("steady")
    assert {name: pod["metadata"]["uid"] for name, pod in before.items()}.items() <= {
        name: pod["metadata"]["uid"] for name, pod in after.items()
    }.items()


async def test_an_image_without_the_agent_is_reported_as_such(user: User) -> None:
    non_root = {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 65532}}}
    await user.apply(job("bare", image="quay.io/coreos/etcd:v3.7.3", command=["etcd"], template=non_root))
    await user.wait("elasticjob/bare", "condition=Finished")
    events = await user.events("bare")
    assert re.search(r"image quay.io/coreos/etcd:v3.7.3 has no\s+torchelastic-run", events)


async def test_elasticjob_reports_on_a_cluster(user: User) -> None:
    await user.apply(job("seen", replicas=2))
    await user.wait("elasticjob/seen", "jsonpath={.status.worldSize}=2")
    await user.wait("elasticjob/seen", "jsonpath={.status.readyDesired}=2/2")
    await user.wait_for_event("seen", "training started with 2 pods")
    table = (await user.elasticjob("get")).stdout.splitlines()
    assert table[1].split()[:3] == ["seen", "Running", "2/2"]
    assert "training started with 2 pods" in (await user.elasticjob("describe", "seen")).stdout
    assert "of 2 workers" in await user.first_log_line("seen", "--rank", "0")
    top = (await user.elasticjob("top", "seen", "--once")).stdout
    assert "Running" in top
    assert "training" in top, "the metrics of the agents are read through the API server"
    await user.elasticjob("scale", "seen", "--replicas", "1")
    await user.wait("elasticjob/seen", "jsonpath={.status.worldSize}=1")
    await user.elasticjob("delete", "seen")
    assert await user.left_for_good() == []
