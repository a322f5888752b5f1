"""``elasticjob`` against a real API server: list, describe, scale and delete jobs.

There is no kubelet and no operator: the test writes the pods, their statuses and the events.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from elastic_operator.api.constants import ANNOTATION_METRICS_PORT
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, SERVICES, Api
from tests.support.cluster_objects import status
from tests.support.cluster_user import ELASTICJOB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.api.spec import Json
    from elastic_operator.kubernetes.client import Resource
    from tests.support.testbed.cluster import Cluster
    from tests.support.testbed.commands import Result

pytestmark = pytest.mark.control_plane

HOLD = "example.com/hold"
"""A finalizer that keeps an object until the test removes it, as a pod that ends slowly."""

SPEC = {"minReplicas": 2, "maxReplicas": 3, "replicas": 3, "image": "elastic-agent:dev", "args": ["digits.py"]}


class Team:
    """A namespace, its objects, and a user of ``elasticjob``."""

    def __init__(self, cluster: Cluster, api: Api, namespace: str) -> None:
        self.cluster = cluster
        self.api = api
        self.namespace = namespace

    async def elasticjob(self, *words: str, check: bool = True, env: dict[str, str] | None = None) -> Result:
        return await self.cluster.run(str(ELASTICJOB), *words, "-n", self.namespace, check=check, env=env)

    async def refused(self, *words: str, code: int, env: dict[str, str] | None = None) -> str:
        """The one sentence with which a command ends."""
        result = await self.elasticjob(*words, check=False, env=env)
        assert (result.returncode, result.stdout) == (code, "")
        assert result.stderr.startswith("elasticjob: ")
        assert result.stderr.count("\n") == 1
        return result.stderr.removeprefix("elasticjob: ").strip()

    async def make(self, resource: Resource, name: str, **parts: Any) -> Json:
        metadata = {"name": name, "namespace": self.namespace, **parts.pop("metadata", {})}
        body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, **parts}
        return await self.api.create(resource, self.namespace, body)

    async def make_job(self, name: str = "digits", **spec: Any) -> Json:
        return await self.make(ELASTIC_JOBS, name, spec=SPEC | spec)

    async def say(self, name: str, **about: Any) -> None:
        """Write a job's status."""
        await self.api.patch(ELASTIC_JOBS, self.namespace, name, {"status": status(**about)}, "status")

    async def make_pod(self, owner: Json, *, hold: bool = False) -> None:
        """The worker pod digits-0-aaaaa without a kubelet, with a status that a kubelet would write."""
        container = {"name": "worker", "image": "elastic-agent:dev"}
        metadata = _of(owner) | {
            "finalizers": [HOLD] if hold else [],
            "annotations": {ANNOTATION_METRICS_PORT: "9464"},
        }
        metadata["labels"] |= {"elastic.pytorch.org/role": "worker", "elastic.pytorch.org/index": "0"}
        spec = {"containers": [container], "schedulerName": "nobody"}
        await self.make(PODS, "digits-0-aaaaa", metadata=metadata, spec=spec)
        told = {"restartCount": 0, "imageID": "", "ready": True, "state": {"running": {}}, **container}
        about = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [told]}
        await self.api.patch(PODS, self.namespace, "digits-0-aaaaa", {"status": about}, "status")

    async def let_go(self, pod: str) -> None:
        await self.api.patch(PODS, self.namespace, pod, {"metadata": {"finalizers": []}})


@pytest_asyncio.fixture
async def team(cluster_with_crd: Cluster, namespace: str) -> AsyncIterator[Team]:
    async with await Api.from_kubeconfig(str(cluster_with_crd.kubeconfig)) as api:
        yield Team(cluster_with_crd, api, namespace)


async def test_get_lists_and_prints_jobs_as_kubectl_does(team: Team) -> None:
    assert (await team.elasticjob("get")).stderr.startswith(f"elasticjob: no jobs in the namespace {team.namespace};")
    await team.make_job()
    await team.say("digits")
    await team.make_job("alone", minReplicas=1, maxReplicas=1, replicas=1)
    ours = (await team.elasticjob("get")).stdout.splitlines()
    theirs = (await team.cluster.kubectl("get", "elasticjobs", "-n", team.namespace)).stdout.splitlines()
    assert ours[0].split() == theirs[0].split()
    assert ours[2].split()[:-1] == theirs[2].split()[:-1] == ["digits", "Running", "2/3", "2", "3", "1"]
    assert ours[1].split()[:3] == ["alone", "Pending", "0/0"]
    assert [line.split()[0] for line in ours[1:]] == [line.split()[0] for line in theirs[1:]]
    everywhere = (await team.cluster.run(str(ELASTICJOB), "get", "-A")).stdout.splitlines()
    assert [team.namespace, "digits"] in [line.split()[:2] for line in everywhere]
    assert everywhere[0].split()[0] == "NAMESPACE"

    one = json.loads((await team.elasticjob("get", "digits", "-o", "json")).stdout)
    printed = await team.cluster.kubectl("get", "elasticjob/digits", "-n", team.namespace, "-o", "json")
    assert one == json.loads(printed.stdout)
    listed = json.loads((await team.elasticjob("get", "-o", "json")).stdout)
    assert (listed["kind"], listed["items"][1]) == ("List", one)


async def test_a_job_is_scaled_suspended_and_resumed_by_command(team: Team) -> None:
    async def spec() -> Json:
        return dict((await team.api.get(ELASTIC_JOBS, team.namespace, "digits"))["spec"])

    await team.make_job()
    assert (await team.elasticjob("scale", "digits", "--replicas", "2")).stdout == "elasticjob digits scaled to 2\n"
    said = await team.refused("scale", "digits", "--replicas", "4", code=2)
    assert "spec.replicas: " in said
    assert "must be between minReplicas and maxReplicas; change it, or move the bounds first" in said
    assert (await spec())["replicas"] == 2
    for command, said, rests in (("suspend", "suspended", True), ("resume", "resumed", False)):
        assert (await team.elasticjob(command, "digits")).stdout == f"elasticjob digits {said}\n"
        assert (await spec())["suspend"] is rests
    assert "`elasticjob describe` shows its state" in await team.refused("logs", "digits", code=1)


async def test_delete_returns_when_the_job_and_its_pods_are_gone(team: Team) -> None:
    # It may take half a minute: the garbage collector discovers kinds of objects periodically.
    job = await team.make_job()
    await team.make_pod(job, hold=True)
    await team.make(SERVICES, "digits-etcd", spec={"ports": [{"port": 2379}]}, metadata=_of(job))
    deleting = asyncio.create_task(team.elasticjob("delete", "digits"))
    await team.cluster.kubectl("wait", "-n", team.namespace, "--for=delete", "elasticjob/digits", "--timeout=90s")
    await team.cluster.kubectl(
        "wait", "-n", team.namespace, "--for=jsonpath={.metadata.deletionTimestamp}", "pod/digits-0-aaaaa",
        "--timeout=90s",
    )  # fmt: skip
    assert not deleting.done(), "its pod is still there"
    await team.let_go("digits-0-aaaaa")
    assert (await deleting).stdout == "elasticjob digits deleted\n"
    assert (await team.api.list(PODS, team.namespace))[0] == []


async def test_delete_waits_neither_if_told_so_nor_for_pods_of_a_new_job_of_that_name(team: Team) -> None:
    job = await team.make_job()
    await team.make_pod(job, hold=True)
    await team.elasticjob("delete", "digits", "--no-wait")
    await team.cluster.kubectl("wait", "-n", team.namespace, "--for=delete", "elasticjob/digits", "--timeout=90s")
    await team.make_job()
    await team.elasticjob("delete", "digits")
    await team.let_go("digits-0-aaaaa")


async def test_missing_permissions_get_one_sentence(team: Team) -> None:
    job = await team.make_job()
    await team.make_pod(job)
    at = f"--namespace={team.namespace}"
    await team.cluster.kubectl("create", "serviceaccount", "ada", at)
    kubeconfig = await team.cluster.kubeconfig_for(team.namespace, "ada")
    as_ada = {"KUBECONFIG": str(kubeconfig)}
    said = await team.refused("get", code=1, env=as_ada)
    assert said.startswith("you may not do this on this cluster: elasticjobs.elastic.pytorch.org is forbidden: ")

    for role, resource in (("jobs", "elasticjobs.elastic.pytorch.org"), ("pods", "pods")):
        account = f"--serviceaccount={team.namespace}:ada"
        await team.cluster.kubectl("create", "role", role, at, "--verb=get,list", f"--resource={resource}")
        await team.cluster.kubectl("create", "rolebinding", role, at, f"--role={role}", account)
        if role == "jobs":
            described = await team.elasticjob("describe", "digits", env=as_ada)
            assert described.stdout.startswith("Name: ")
            assert described.stderr.count("you may not see the ") == 2
    shown = (await team.elasticjob("top", "digits", env=as_ada)).stdout.splitlines()
    assert shown[-1].startswith("the agents' metrics cannot be read (")
    assert shown[-1].endswith("; grant yourself `get` on pods/proxy, unless the pod itself refuses")
    said = await team.refused("report", "digits", code=1, env=as_ada)
    assert said.startswith("you may not do this on this cluster: configmaps")

    kubeconfig.write_text(kubeconfig.read_text().replace('"token": "', '"token": "x'))
    said = await team.refused("get", code=1, env=as_ada)
    assert said.startswith("the API server does not accept these credentials")


def _of(job: Json) -> dict[str, Any]:
    """Metadata of objects that belong to a job."""
    owner = {"kind": "ElasticJob", "apiVersion": ELASTIC_JOBS.api_version, "controller": True}
    return {
        "labels": {"elastic.pytorch.org/job": job["metadata"]["name"]},
        "ownerReferences": [{**owner, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}],
    }
