"""The ElasticJob on a real API server, with kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from elastic_operator.manifest import crd
from tests.support.operator_namespace import manifest as job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.testbed.cluster import Cluster
    from tests.support.testbed.commands import Result

pytestmark = pytest.mark.control_plane

REPOSITORY = Path(__file__).parents[2]
DEFINITION = REPOSITORY / "crds" / "elasticjob.yaml"
MANIFESTS = REPOSITORY / "tests" / "unit" / "manifests"
EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.yaml"))
LARGEST_ANNOTATIONS = 262_144
OUT_OF_BOUNDS = "spec.replicas: Invalid value: must be between minReplicas and maxReplicas"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def space(cluster_with_crd: Cluster) -> AsyncIterator[str]:
    """A namespace for all these tests; each test uses its own job names."""
    async with cluster_with_crd.namespace() as name:
        yield name


class User:
    """A user of kubectl in the namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    async def __call__(self, *arguments: str, stdin: str | None = None, check: bool = True) -> Result:
        return await self._cluster.kubectl(f"--namespace={self._namespace}", *arguments, stdin=stdin, check=check)

    async def apply(self, manifest: dict[str, Any], *, check: bool = True) -> Result:
        return await self("apply", "--filename=-", stdin=yaml.safe_dump(manifest), check=check)

    async def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self("get", "elasticjob", name, "--output=json")).stdout)
        return found

    async def refusal(self, *arguments: str, stdin: str | None = None) -> str:
        """The error output of a refused command."""
        refused = await self(*arguments, stdin=stdin, check=False)
        assert refused.returncode != 0, refused.stdout
        return refused.stderr

    async def say(self, name: str, status: dict[str, Any]) -> None:
        """Write a job's status, as the operator does."""
        patch = json.dumps({"status": status})
        await self("patch", "elasticjob", name, "--subresource=status", "--type=merge", f"--patch={patch}")


@pytest.fixture
def kubectl(cluster_with_crd: Cluster, space: str) -> User:
    return User(cluster_with_crd, space)


# The CRD


async def test_the_crd_is_accepted_without_a_warning(cluster_with_crd: Cluster) -> None:
    again = await cluster_with_crd.kubectl("replace", "--dry-run=server", f"--filename={DEFINITION}")
    assert again.stderr == ""
    found = json.loads((await cluster_with_crd.kubectl("get", f"--filename={DEFINITION}", "--output=json")).stdout)
    conditions = {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    annotations = found["metadata"]["annotations"]
    assert sum(len(key) + len(value) for key, value in annotations.items()) < LARGEST_ANNOTATIONS // 2


# Sizes


async def test_a_job_is_scaled_within_its_bounds_and_shows_that_to_an_autoscaler(kubectl: User, space: str) -> None:
    await kubectl.apply(job("scaled", minReplicas=2, maxReplicas=4, replicas=2))
    await kubectl("scale", "elasticjob/scaled", "--replicas=4")
    for beyond in ("1", "5"):
        assert OUT_OF_BOUNDS in await kubectl.refusal("scale", "elasticjob/scaled", f"--replicas={beyond}")
    selector = "elastic.pytorch.org/job=scaled,elastic.pytorch.org/role=worker"
    await kubectl.say("scaled", {"replicas": 2, "selector": selector})
    path = f"/apis/elastic.pytorch.org/v1alpha1/namespaces/{space}/elasticjobs/scaled/scale"
    scale = json.loads((await kubectl("get", "--raw", path)).stdout)
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 2, "selector": selector}


async def test_a_job_without_replicas_can_be_scaled_and_then_has_them(kubectl: User) -> None:
    await kubectl.apply(job("numberless"))
    assert "replicas" not in (await kubectl.get("numberless"))["spec"]
    assert OUT_OF_BOUNDS in await kubectl.refusal("scale", "elasticjob/numberless", "--replicas=4")
    await kubectl("scale", "elasticjob/numberless", "--replicas=2")
    assert (await kubectl.get("numberless"))["spec"]["replicas"] == 2
    await kubectl.apply(job("numberless", maxRestarts=1))  # a file that never set the replicas leaves them unchanged
    assert (await kubectl.get("numberless"))["spec"]["replicas"] == 2


# The output of kubectl


async def test_kubectl_explain_describes_a_job_and_its_fields(kubectl: User) -> None:
    whole = crd.schema()["properties"]["spec"]
    explained = await kubectl("explain", "elasticjob.spec")
    assert explained.stderr == ""
    assert [name for name in whole["properties"] if f"  {name}\t<" not in explained.stdout] == []
    for field in ("replicas", "failurePolicy.rules.onExitCodes.values", "etcd.tlsSecret", "RunPolicy.cleanPodPolicy"):
        described = whole
        for name in field.split("."):
            described = described.get("items", described)["properties"][name]
        said = " ".join((await kubectl("explain", f"elasticjob.spec.{field}")).stdout.split())
        assert " ".join(described["description"].split()) in said


async def test_kubectl_shows_the_state_of_a_job_and_waits_for_its_end(kubectl: User) -> None:
    await kubectl.apply({**job("listed", minReplicas=2, maxReplicas=8), "status": {"state": "Succeeded"}})
    assert "status" not in await kubectl.get("listed")
    ended = {
        "status": "True",
        "reason": "AllWorkersSucceeded",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    conditions = [{**ended, "type": kind} for kind in ("Succeeded", "Finished")]
    await kubectl.say("listed", {"state": "Running", "readyDesired": "3/4", "restarts": 5, "conditions": conditions})
    header, row = (await kubectl("get", "ej", "listed")).stdout.splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert row.split()[:-1] == ["listed", "Running", "3/4", "2", "8", "5"]
    for kind in ("Succeeded", "Finished"):
        await kubectl("wait", f"--for=condition={kind}", "elasticjob/listed", "--timeout=10s")


# Manifests


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
async def test_an_example_is_accepted_unchanged(kubectl: User, path: Path) -> None:
    applied = await kubectl("apply", "--validate=strict", f"--filename={path}")
    assert (applied.stdout.endswith(" created\n"), applied.stderr) == (True, "")
    again = await kubectl("apply", "--validate=strict", f"--filename={path}")
    assert again.stdout.endswith(" unchanged\n")
    await kubectl("delete", f"--filename={path}")


async def test_a_manifest_with_every_field_is_accepted_under_strict_validation(kubectl: User) -> None:
    manifest = yaml.safe_load((MANIFESTS / "everything.yaml").read_text())
    del manifest["metadata"]["namespace"]
    applied = await kubectl("apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump(manifest))
    assert (applied.stdout.endswith(" created\n"), applied.stderr) == (True, "")


async def test_an_archived_job_follows_its_file_until_its_replicas_are_set(kubectl: User) -> None:
    manifest = yaml.safe_load((MANIFESTS / "archived.yaml").read_text())
    manifest["metadata"] = {"name": "former"}
    worker = manifest["spec"]["replicaSpecs"]["Worker"]
    applied = await kubectl("apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump(manifest))
    assert (applied.stdout.endswith(" created\n"), applied.stderr) == (True, "")
    worker["replicas"] = 3
    await kubectl.apply(manifest)
    await kubectl("scale", "elasticjob/former", "--replicas=4")
    worker["replicas"] = 2
    refusal = await kubectl.refusal("apply", "--filename=-", stdin=yaml.safe_dump(manifest))
    assert "is only the initial number" in " ".join(refusal.split())
    assert OUT_OF_BOUNDS in await kubectl.refusal("scale", "elasticjob/former", "--replicas=5")


async def test_a_large_template_can_be_applied_repeatedly(kubectl: User) -> None:
    environment = [{"name": f"V{number}", "value": "x" * 1000} for number in range(200)]
    template = {"spec": {"containers": [{"name": "worker", "env": environment}]}}
    for restarts in (1, 2):
        await kubectl.apply(job("large", template=template, maxRestarts=restarts))
    assert (await kubectl.get("large"))["spec"]["template"] == template


async def test_elasticjob_refuses_what_the_api_server_refuses_with_the_same_sentence(kubectl: User) -> None:
    wrong = job("twice", minReplicas=4)
    refusal = await kubectl.refusal("apply", "--filename=-", stdin=yaml.safe_dump(wrong))
    [problem] = crd.validate(wrong)
    assert problem.message in refusal
