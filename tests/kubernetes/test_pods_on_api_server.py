"""A real API server accepts all objects of jobs, and reports errors in a template.

No object is stored (``dryRun=All``), but validation and admission are those of a real creation.
"""

from __future__ import annotations

import copy
import ipaddress
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from elastic_operator.api.spec import ElasticJobSpec
from elastic_operator.api.validation import problem_of
from elastic_operator.controller.model import Job, NewPod
from elastic_operator.controller.pods import pod_name
from elastic_operator.kubernetes.client import DEPLOYMENTS, DISRUPTION_BUDGETS, PODS, SERVICES
from elastic_operator.manifest.crd import apply_defaults
from elastic_operator.resources.owned_objects import PodSettings, disruption_budget, etcd_deployment, etcd_service
from elastic_operator.resources.worker_pod import worker_pod
from tests.support.builders import UID
from torchelastic.protocol.records import ResumeRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource
    from testbed.cluster import Cluster

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="session")]

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted([*(ROOT / "tests/unit/manifests").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
SETTINGS = PodSettings()
NON_ROOT = {"securityContext": {"runAsNonRoot": True}}


def the_job(manifest: dict[str, Any], namespace: str) -> Job:
    """Return the job of a manifest, as if it were stored in this namespace."""
    spec = ElasticJobSpec.of(apply_defaults(manifest)["spec"])
    assert problem_of(spec) is None
    return Job(name=manifest["metadata"]["name"], namespace=namespace, uid=UID, generation=1, spec=spec)


def a_job(namespace: str, template: dict[str, Any], **spec: Any) -> Job:
    """Return a job with this template's spec."""
    fields = {"maxReplicas": 2, "image": "elastic-agent:dev", "args": ["train.py"], **spec}
    return the_job({"metadata": {"name": "digits"}, "spec": {**fields, "template": {"spec": template}}}, namespace)


def its_pod(job: Job) -> dict[str, Any]:
    """Return the first pod of a job."""
    size = SizeRecord(min=job.spec.min_replicas, max=job.spec.max_replicas, generation=1, desired=2)
    new = NewPod(name=pod_name(job.name, job.uid, 0, ""), index=0, size=size)
    return worker_pod(job, new, SETTINGS, store="10.96.0.7:2379")


def pod_of(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a Deployment; the API server enforces pod security standards only on pods."""
    metadata = {
        **deployment["spec"]["template"]["metadata"],
        **{key: deployment["metadata"][key] for key in ("name", "namespace")},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": deployment["spec"]["template"]["spec"]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def free(control_plane: Cluster) -> AsyncIterator[str]:
    """A namespace that admits any pod."""
    async with control_plane.namespace() as name:
        yield name


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def strict(control_plane: Cluster) -> AsyncIterator[str]:
    """A namespace that admits only restricted pods."""
    async with control_plane.namespace(**{"pod-security.kubernetes.io/enforce": "restricted"}) as name:
        yield name


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def priorities(control_plane: Cluster) -> AsyncIterator[None]:
    """The priority classes that the manifests use."""
    policies = [yaml.safe_load(path.read_text())["spec"].get("schedulingPolicy", {}) for path in MANIFESTS]
    names = sorted({policy["priorityClassName"] for policy in policies if "priorityClassName" in policy})
    for name in names:
        await control_plane.kubectl("create", "priorityclass", name, "--value=1000")
    yield
    await control_plane.kubectl("delete", "priorityclass", *names)


def template_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the template in a manifest of either form; a missing template is added."""
    spec = manifest["spec"]
    place = spec["replicaSpecs"]["Worker"] if "replicaSpecs" in spec else spec
    template: dict[str, Any] = place.setdefault("template", {})
    return template


async def answer(cluster: Cluster, kind: Resource, body: dict[str, Any]) -> str:
    """Return the API server's error or warning about the creation of an object, or an empty string."""
    path = f"{kind.path(body['metadata']['namespace'])}?dryRun=All&fieldValidation=Strict"
    return (await cluster.kubectl("create", "--raw", path, "--filename=-", stdin=json.dumps(body), check=False)).stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
async def test_every_object_of_a_manifest_is_accepted(
    control_plane: Cluster, free: str, strict: str, path: Path
) -> None:
    manifest = yaml.safe_load(path.read_text())
    job = the_job(manifest, free)
    assert await answer(control_plane, PODS, its_pod(job)) == ""
    assert await answer(control_plane, DEPLOYMENTS, etcd_deployment(job, SETTINGS)) == ""
    assert await answer(control_plane, SERVICES, etcd_service(job, cluster_ip=None)) == ""

    # The pods meet the restricted standard if they have a non-root user, which depends on the image.
    restricted = copy.deepcopy(manifest)
    pod = template_of(restricted).setdefault("spec", {})
    pod["securityContext"] = {**pod.get("securityContext", {}), **NON_ROOT["securityContext"]}
    job = the_job(restricted, strict)
    assert await answer(control_plane, PODS, its_pod(job)) == ""
    assert await answer(control_plane, PODS, pod_of(etcd_deployment(job, SETTINGS))) == ""


async def test_every_pod_setting_of_a_job_is_accepted(control_plane: Cluster, free: str) -> None:
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}]
            }
        }
    }
    for gang in ("SchedulerPlugins", "Volcano"):
        job = a_job(
            free,
            {"affinity": affinity, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
            schedulingPolicy={"gang": gang},
            etcd={"endpoint": "https://etcd:2379", "tlsSecret": "hub"},
            metricsPort=9000,
            nodeLossSeconds=0,
        )
        new = NewPod("digits-0-bcdfg", 0, SizeRecord(min=1, max=2), resume=ResumeRecord(7), excluded=("a", "b"))
        pod = worker_pod(job, new, SETTINGS, store="https://etcd:2379")
        assert await answer(control_plane, PODS, pod) == ""
        assert await answer(control_plane, DISRUPTION_BUDGETS, disruption_budget(job, 2)) == ""


async def test_a_restricted_namespace_reports_the_settings_that_pods_lack(control_plane: Cluster, strict: str) -> None:
    said = await answer(control_plane, PODS, its_pod(a_job(strict, {})))
    assert "(Forbidden)" in said
    assert "runAsNonRoot != true" in said
    assert "allowPrivilegeEscalation" not in said


FULL: dict[str, Any] = {
    "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "big", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    "initContainers": [
        {"name": "fetch", "image": "busybox", "command": ["true"]},
        {"name": "proxy", "image": "envoy", "restartPolicy": "Always"},
    ],
    "containers": [
        {"name": "log", "image": "fluent", "ports": [{"name": "own-metrics", "containerPort": 9465}]},
        {
            "name": "worker",
            "ports": [{"name": "debug", "containerPort": 5678}],
            "volumeMounts": [{"name": "big", "mountPath": "/dev/shm/"}, {"name": "tmp", "mountPath": "/cache"}],
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "resources": {"limits": {"nvidia.com/gpu": 8}},
        },
    ],
    "imagePullSecrets": [{"name": "hub"}],
    "tolerations": [{"operator": "Exists"}],
    "subdomain": "workers",
    "priorityClassName": None,
}


@pytest.mark.parametrize(
    "template",
    [
        FULL,
        {"hostNetwork": True},
        {"containers": [{"name": "worker", "securityContext": {"privileged": True}}]},
        {"containers": [{"name": "worker", "securityContext": {"capabilities": {"add": ["CAP_SYS_ADMIN"]}}}]},
        {"containers": [{"name": "worker", "ports": [{"containerPort": 80}], "terminationMessagePath": "/run/words"}]},
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}, "terminationGracePeriodSeconds": 3},
    ],
    ids=["full", "hostNetwork", "privileged", "CAP_SYS_ADMIN", "worker", "pod"],
)
async def test_a_valid_template_is_accepted(control_plane: Cluster, free: str, template: dict[str, Any]) -> None:
    job = a_job(free, template)
    assert await answer(control_plane, PODS, its_pod(job)) == ""
    assert await answer(control_plane, DEPLOYMENTS, etcd_deployment(job, SETTINGS)) == ""


async def test_an_etcd_with_a_volume_is_accepted(control_plane: Cluster, strict: str) -> None:
    storage = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    job = a_job(strict, {}, etcd={"storage": storage, "resources": {"limits": {"memory": "1Gi"}}, "image": "etcd:1"})
    deployment = etcd_deployment(job, SETTINGS)
    assert await answer(control_plane, DEPLOYMENTS, deployment) == ""
    assert await answer(control_plane, PODS, pod_of(deployment)) == ""


async def test_the_address_of_the_etcd_can_be_read(control_plane: Cluster, free: str) -> None:
    words = ("get", "service/kubernetes", "--namespace=default", "--output=jsonpath={.spec.clusterIP}")
    first = ipaddress.ip_address((await control_plane.kubectl(*words)).stdout)
    service = etcd_service(a_job(free, {}), cluster_ip=str(first + 200))
    assert await answer(control_plane, SERVICES, service) == ""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"nodeSelektor": {"gpu": "yes"}}, 'unknown field "spec.nodeSelektor"'),
        ({"containers": [{"name": "log"}]}, "spec.containers[1].image: Required value"),
        (
            {"containers": [{"name": "worker", "volumeMounts": [{"name": "mine", "mountPath": "/data"}]}]},
            'spec.containers[0].volumeMounts[0].name: Not found: "mine"',
        ),
        ({"priorityClassName": "no such"}, "no PriorityClass with name no such"),
        ({"metadata": {"lables": {}}}, 'unknown field "metadata.lables"'),
        ({"metadata": {"labels": {"team": "a b"}}}, "metadata.labels: Invalid value"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
async def test_a_template_error_is_reported_by_the_api_server(
    control_plane: Cluster, free: str, template: dict[str, Any], words: str
) -> None:
    whole = template if "metadata" in template else {"spec": template}
    spec = {"maxReplicas": 1, "image": "i", "args": ["x"], "template": whole}
    job = the_job({"metadata": {"name": "digits"}, "spec": spec}, free)
    said = await answer(control_plane, PODS, its_pod(job))
    assert words in said
    assert "(BadRequest)" in said or "is invalid" in said or "(Forbidden)" in said
