"""The ElasticJob on a real API server, with kubectl."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from elastic_operator.kubernetes.client import ELASTIC_JOBS
from tests.support.operator_namespace import OperatorNamespace
from tests.support.operator_namespace import manifest as job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.cluster import Cluster, Result
    from tests.support.watching_api import WatchingApi

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="session")]

REPOSITORY = Path(__file__).parents[2]
DEFINITION = REPOSITORY / "crds" / "elasticjob.yaml"
MANIFESTS = REPOSITORY / "tests" / "unit" / "manifests"
EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.yaml"))
LARGEST_ANNOTATIONS = 262_144
OUT_OF_BOUNDS = "spec.replicas: Invalid value: must be between minReplicas and maxReplicas"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ns(api: WatchingApi, cluster_with_crd: Cluster) -> AsyncIterator[OperatorNamespace]:
    """A namespace for all these tests; each test uses its own job names."""
    async with cluster_with_crd.namespace() as name:
        yield OperatorNamespace(api, cluster_with_crd, name)


async def apply(ns: OperatorNamespace, manifest: dict[str, Any], *, check: bool = True) -> Result:
    """Apply a manifest with kubectl and strict validation."""
    result: Result = await ns.kubectl(
        "apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump(manifest), check=check
    )
    return result


async def refusal(ns: OperatorNamespace, name: str, replicas: int) -> str:
    """Scale a job, which must be refused, and return the error."""
    refused = await ns.kubectl("scale", f"elasticjob/{name}", f"--replicas={replicas}", check=False)
    assert refused.returncode != 0, refused.stdout
    return str(refused.stderr)


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


async def test_a_job_is_scaled_within_its_bounds_and_reports_its_size_to_an_autoscaler(ns: OperatorNamespace) -> None:
    await apply(ns, job("scaled", minReplicas=2, maxReplicas=4, replicas=2))
    await ns.kubectl("scale", "elasticjob/scaled", "--replicas=4")
    for beyond in (1, 5):
        assert OUT_OF_BOUNDS in await refusal(ns, "scaled", beyond)
    selector = "elastic.pytorch.org/job=scaled,elastic.pytorch.org/role=worker"
    await ns.api.patch(ELASTIC_JOBS, ns.name, "scaled", {"status": {"replicas": 2, "selector": selector}}, "status")
    path = f"/apis/elastic.pytorch.org/v1alpha1/namespaces/{ns.name}/elasticjobs/scaled/scale"
    scale = json.loads((await ns.kubectl("get", "--raw", path)).stdout)
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 2, "selector": selector}


async def test_a_job_without_replicas_can_be_scaled_and_then_has_them(ns: OperatorNamespace) -> None:
    await apply(ns, job("numberless"))
    assert "replicas" not in (await ns.api.get(ELASTIC_JOBS, ns.name, "numberless"))["spec"]
    assert OUT_OF_BOUNDS in await refusal(ns, "numberless", 4)
    await ns.kubectl("scale", "elasticjob/numberless", "--replicas=2")
    assert (await ns.api.get(ELASTIC_JOBS, ns.name, "numberless"))["spec"]["replicas"] == 2
    await apply(ns, job("numberless", maxRestarts=1))  # a file that never set the replicas leaves them unchanged
    assert (await ns.api.get(ELASTIC_JOBS, ns.name, "numberless"))["spec"]["replicas"] == 2


# The output of kubectl


async def test_kubectl_shows_the_state_of_a_job_and_waits_for_its_end(ns: OperatorNamespace) -> None:
    await apply(ns, {**job("listed", minReplicas=2, maxReplicas=8), "status": {"state": "Succeeded"}})
    assert "status" not in await ns.api.get(ELASTIC_JOBS, ns.name, "listed")
    ended = {
        "status": "True",
        "reason": "AllWorkersSucceeded",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    conditions = [{**ended, "type": kind} for kind in ("Succeeded", "Finished")]
    await ns.api.patch(
        ELASTIC_JOBS,
        ns.name,
        "listed",
        {"status": {"state": "Running", "readyDesired": "3/4", "restarts": 5, "conditions": conditions}},
        "status",
    )
    header, row = (await ns.kubectl("get", "ej", "listed")).stdout.splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert row.split()[:-1] == ["listed", "Running", "3/4", "2", "8", "5"]
    for kind in ("Succeeded", "Finished"):
        await ns.kubectl("wait", f"--for=condition={kind}", "elasticjob/listed", "--timeout=10s")


# Manifests


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
async def test_an_example_is_accepted_unchanged(ns: OperatorNamespace, path: Path) -> None:
    applied = await ns.kubectl("apply", "--validate=strict", f"--filename={path}")
    assert (applied.stdout.endswith(" created\n"), applied.stderr) == (True, "")
    again = await ns.kubectl("apply", "--validate=strict", f"--filename={path}")
    assert again.stdout.endswith(" unchanged\n")
    await ns.kubectl("delete", f"--filename={path}")


async def test_a_manifest_with_every_field_is_accepted_under_strict_validation(ns: OperatorNamespace) -> None:
    manifest = yaml.safe_load((MANIFESTS / "everything.yaml").read_text())
    del manifest["metadata"]["namespace"]
    applied = await apply(ns, manifest)
    assert (applied.stdout.endswith(" created\n"), applied.stderr) == (True, "")


async def test_a_job_of_the_first_controller_follows_its_file_until_its_replicas_are_set(ns: OperatorNamespace) -> None:
    manifest = yaml.safe_load((MANIFESTS / "archived.yaml").read_text())
    manifest["metadata"] = {"name": "former"}
    worker = manifest["spec"]["replicaSpecs"]["Worker"]
    applied = await apply(ns, manifest)
    assert (applied.stdout.endswith(" created\n"), applied.stderr) == (True, "")
    worker["replicas"] = 3
    await apply(ns, manifest)
    await ns.kubectl("scale", "elasticjob/former", "--replicas=4")
    worker["replicas"] = 2
    refused = await apply(ns, manifest, check=False)
    assert "is only the initial number" in " ".join(refused.stderr.split())
    assert OUT_OF_BOUNDS in await refusal(ns, "former", 5)


# The policy that limits templates

POLICY = REPOSITORY / "examples" / "policies" / "templates.yaml"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def limited(api: WatchingApi, cluster_with_crd: Cluster) -> AsyncIterator[OperatorNamespace]:
    """A namespace in which the example of an admission policy is in force."""
    await cluster_with_crd.kubectl("apply", f"--filename={POLICY}")
    async with cluster_with_crd.namespace(**{"elastic.pytorch.org/limit-templates": "true"}) as name:
        ns = OperatorNamespace(api, cluster_with_crd, name)
        privileged = job("probe", template=template(hostNetwork=True))
        async with asyncio.timeout(60):  # an API server uses a new policy some time later
            while (await apply(ns, privileged, check=False)).returncode == 0:
                await ns.kubectl("delete", "elasticjob/probe")
        yield ns
    await cluster_with_crd.kubectl("delete", f"--filename={POLICY}")


def template(**pod: Any) -> dict[str, Any]:
    return {"spec": pod}


def container(**context: Any) -> dict[str, Any]:
    return {"name": "worker", "securityContext": context}


HOST_FILES = {"hostPath": {"path": "/"}}
ORDINARY = template(
    serviceAccountName="elasticjob",
    hostNetwork=False,
    volumes=[{"name": "scratch", "emptyDir": {}}],
    containers=[container(privileged=False, capabilities={"drop": ["ALL"]})],
)
ARCHIVED = {"replicaSpecs": {"Worker": {"replicas": 1, "template": {"spec": {"containers": [], "hostPID": True}}}}}


async def test_the_example_policy_accepts_ordinary_jobs(limited: OperatorNamespace) -> None:
    for number, spec in enumerate(({}, {"template": ORDINARY}, {"checkpoint": {"volume": {"emptyDir": {}}}})):
        await apply(limited, job(f"ordinary{number}", **spec))
    refused = await apply(limited, job("ordinary0", template=template(hostIPC=True)), check=False)
    assert "remove hostNetwork, hostPID and hostIPC" in refused.stderr, "a change is checked, too"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"template": template(volumes=[{"name": "root", **HOST_FILES}])}, "replace hostPath"),
        ({"checkpoint": {"volume": HOST_FILES}}, "replace hostPath"),
        ({"template": template(containers=[container(privileged=True)])}, "remove securityContext.privileged"),
        ({"template": template(initContainers=[container(privileged=True)])}, "remove securityContext.privileged"),
        (
            {"template": template(containers=[container(capabilities={"add": ["SYS_ADMIN"]})])},
            "remove securityContext.capabilities.add",
        ),
        ({"template": template(hostNetwork=True)}, "remove hostNetwork, hostPID and hostIPC"),
        ({"template": template(serviceAccountName="admin")}, "change serviceAccountName"),
        ({"template": template(serviceAccount="admin")}, "change serviceAccountName"),
        (ARCHIVED, "remove hostNetwork, hostPID and hostIPC"),
    ],
)
async def test_the_example_policy_refuses_a_template_that_reaches_beyond_its_namespace(
    limited: OperatorNamespace, spec: dict[str, Any], words: str
) -> None:
    manifest = job("reaches", **spec)
    if "replicaSpecs" in spec:
        for field in ("image", "args"):
            manifest["spec"].pop(field, None)
    refused = await apply(limited, manifest, check=False)
    assert refused.returncode != 0
    assert "ValidatingAdmissionPolicy 'elasticjob-templates'" in refused.stderr
    assert words in refused.stderr
