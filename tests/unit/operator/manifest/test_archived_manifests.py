"""Manifests of the archived pytorch/elastic controller are converted to the current spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.spec import CleanPodPolicy, ElasticJobSpec, current_spec, program_of, worker_container
from elastic_operator.api.validation import problem_of
from elastic_operator.controller.plan import plan
from elastic_operator.kubernetes.backend import job_of
from elastic_operator.manifest import loader as manifest
from tests.support.builders import NOW, a_job, a_world

ARCHIVED = Path(__file__).parents[2] / "manifests" / "archived.yaml"


def archived_spec(*args: object, spec: dict[str, Any] | None = None, **container: object) -> dict[str, Any]:
    """Return the spec of a manifest whose container has these arguments."""
    containers = [{"name": "elasticjob-worker", "image": "i", "args": [*args], **container}]
    worker = {"replicas": 2, "template": {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": containers}}}
    return {"minReplicas": 1, "maxReplicas": 4, "replicaSpecs": {"Worker": worker}, **(spec or {})}


def with_worker(**worker: object) -> dict[str, Any]:
    """Return the spec of a manifest with these fields of its worker."""
    spec = archived_spec("train.py")
    return {**spec, "replicaSpecs": {"Worker": {**spec["replicaSpecs"]["Worker"], **worker}}}


def with_pod(**template: object) -> ElasticJobSpec:
    """Return the ElasticJobSpec of a manifest with this template."""
    return ElasticJobSpec.of(with_worker(template=template))


def test_archived_manifest_is_converted() -> None:
    job = manifest.load_checked(ARCHIVED)
    spec = job.spec
    assert problem_of(spec) is None
    assert (spec.min_replicas, spec.max_replicas, spec.desired) == (1, 4, 2)
    assert (spec.etcd.endpoint, spec.nproc_per_node) == ("etcd-service:2379", 4)
    assert program_of(spec) == ((), ("/workspace/train.py", "--workers=0", "/data"))
    assert spec.clean_pod_policy is CleanPodPolicy.NONE
    assert spec.backoff_limit == spec.max_restarts == 100
    assert spec.template == {
        "metadata": {"creationTimestamp": None, "labels": {"team": "vision"}},
        "spec": {
            "nodeSelector": {"gpu": "v100"},
            "containers": [
                {
                    "name": "worker",
                    "image": "registry.example.org/team/train:0.2",
                    "imagePullPolicy": "Always",
                    "args": ["/workspace/train.py", "--workers=0", "/data"],
                    "resources": {"limits": {"nvidia.com/gpu": 4}},
                }
            ],
        },
    }
    assert job.job["spec"]["replicaSpecs"]["Worker"]["replicas"] == 2  # the object itself is unchanged


def test_archived_object_is_read_from_the_cluster() -> None:
    given = manifest.load_checked(ARCHIVED)
    stored = {**given.job, "metadata": {**given.job["metadata"], "uid": "1", "generation": 1}}
    assert job_of(stored).spec == given.spec
    held = given.spec.applied
    assert given.spec.with_applied(held) == given.spec
    assert held.template["spec"]["containers"][0]["name"] == "worker"


def test_current_spec_is_not_converted() -> None:
    current = {"maxReplicas": 3, "image": "i", "args": ["--nnodes=2", "train.py"]}
    assert current_spec(current) is current


# Numbers


def test_archived_replicas_are_the_default_maximum() -> None:
    given = archived_spec("train.py")
    del given["maxReplicas"]
    assert ElasticJobSpec.of(given).max_replicas == 2


def test_archived_replicas_are_written_to_the_spec() -> None:
    spec = ElasticJobSpec.of(archived_spec("train.py"))
    assert spec.replicas is None
    job = replace(a_job(), spec=spec)
    assert plan(job, a_world(), now=NOW).replicas == 2
    written = ElasticJobSpec.of(archived_spec("train.py", spec={"replicas": 2}))
    assert plan(replace(job, spec=written), a_world(), now=NOW).replicas is None


# Policies


@pytest.mark.parametrize(("policy", "limit"), [("Never", 0), ("ExitCode", 100), ("OnFailure", 100), ("Always", 100)])
def test_restart_policy_determines_the_backoff_limit(policy: str, limit: int) -> None:
    assert ElasticJobSpec.of(with_worker(restartPolicy=policy)).backoff_limit == limit


def test_run_policy_is_converted() -> None:
    policy = {"backoffLimit": 3, "ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 600, "cleanPodPolicy": "All"}
    filled_in = {"cleanPodPolicy": "Running"}  # the API server adds this default
    given = {**with_worker(restartPolicy="Never"), **filled_in, "RunPolicy": policy}
    spec = ElasticJobSpec.of(given)
    assert (spec.backoff_limit, spec.ttl_after_finished, spec.active_deadline) == (3, 60, 600)
    assert spec.clean_pod_policy is CleanPodPolicy.ALL


def test_archived_template_fields_without_effect_are_dropped() -> None:
    spec = with_pod(
        metadata={"name": "x", "generateName": "y", "namespace": "z", "annotations": {"a": "b"}},
        spec={"restartPolicy": "OnFailure", "containers": [{"name": "c", "image": "i", "args": ["train.py"]}]},
    )
    assert problem_of(spec) is None
    assert spec.template["metadata"] == {"annotations": {"a": "b"}}
    assert "restartPolicy" not in spec.template["spec"]


# Containers


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (("anything",), 0),
        (("first", "second"), 0),
        (("sidecar", "elasticjob-worker"), 1),
        (("elasticjob-worker", "worker"), 1),
    ],
)
def test_the_container_may_have_any_name(names: tuple[str, ...], own: int) -> None:
    containers = [{"name": name, "image": name, "args": ["--nproc_per_node=2", "train.py"]} for name in names]
    spec = with_pod(spec={"containers": containers})
    kept = spec.template["spec"]["containers"]
    assert worker_container(spec)["image"] == names[own]
    assert [kept[at] for at in range(len(names)) if at != own] == [
        containers[at] for at in range(len(names)) if at != own
    ]
    assert (spec.nproc_per_node, program_of(spec)) == (2, ((), ("train.py",)))


# Flags of the launcher


@pytest.mark.parametrize(
    ("args", "left", "nproc"),
    [
        (("--nproc_per_node=4", "train.py"), ("train.py",), 4),
        (("--nproc_per_node", "4", "train.py", "--nproc_per_node=9"), ("train.py", "--nproc_per_node=9"), 4),
        (("--nproc-per-node=gpu", "-m", "train"), ("-m", "train"), "gpu"),
        (("--nproc_per_node=$(GPUS)", "train.py"), ("--nproc_per_node=$(GPUS)", "train.py"), 1),
        (("--nnodes=1:8", "--rdzv_id=mine", "--rdzv_backend", "etcd", "train.py"), ("train.py",), 1),
        (("--rdzv_conf=lease=6", "--role", "r", "train.py"), ("--rdzv_conf=lease=6", "--role", "r", "train.py"), 1),
        (("--use_env", "--no_python", "--", "echo", "--nnodes=1"), ("--no_python", "--", "echo", "--nnodes=1"), 1),
        (("-t", "3", "-r3", "train.py"), ("-t", "3", "-r3", "train.py"), 1),
        (("--nnodes",), (), 1),
    ],
)  # fmt: skip
def test_flags_that_the_operator_sets_are_removed(
    args: tuple[str, ...], left: tuple[str, ...], nproc: int | str
) -> None:
    spec = ElasticJobSpec.of(archived_spec(*args))
    assert (program_of(spec), spec.nproc_per_node) == (((), left), nproc)


def test_max_restarts_flag_becomes_the_field() -> None:
    spec = ElasticJobSpec.of(archived_spec("--max_restarts=3", "train.py"))
    assert (spec.max_restarts, spec.backoff_limit, program_of(spec)) == (3, 3, ((), ("train.py",)))


def test_invalid_max_restarts_flag_is_rejected() -> None:
    problem = problem_of(ElasticJobSpec.of(archived_spec("--max_restarts=many", "x.py")))
    assert problem == "the flag --max_restarts in args is reserved for the operator; use spec.maxRestarts instead"


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun"],
        ["python", "-m", "torch.distributed.run"],
        ["python3.8", "-u", "-m", "torchelastic.distributed.launch"],
        [],
    ],
)
def test_launcher_in_the_command_is_removed(command: list[str]) -> None:
    spec = ElasticJobSpec.of(archived_spec("--nproc_per_node=1", "train.py", command=command))
    assert problem_of(spec) is None
    assert (program_of(spec), spec.nproc_per_node) == (((), ("train.py",)), 1)


def test_program_may_follow_the_launcher_in_the_command() -> None:
    command = ["torchrun", "--nproc_per_node=2", "train.py"]
    spec = ElasticJobSpec.of(archived_spec("--epochs=3", command=command))
    assert (program_of(spec), spec.nproc_per_node) == (((), ("train.py", "--epochs=3")), 2)


@pytest.mark.parametrize("command", [["bash", "-c", 'exec torchrun "$@"'], ["/run.sh"], ["python", "train.py"]])
def test_command_that_starts_a_launcher_indirectly_is_rejected(command: list[str]) -> None:
    problem = problem_of(ElasticJobSpec.of(archived_spec("train.py", command=command)))
    assert problem.startswith("the container elasticjob-worker of spec.replicaSpecs.Worker has the command [")
    assert problem.endswith("remove the command, and put the program into args")


# Any template

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "-", "--", "a", "--nproc_per_node", "torchrun"]),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "command", "args", "image"]), below, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec"]), JSON | st.fixed_dictionaries({"containers": JSON})))
def test_any_template_is_converted_or_rejected(template: dict[str, Any]) -> None:
    spec = ElasticJobSpec.of(with_worker(template=template))
    assert problem_of(spec) is None or len(str(problem_of(spec))) > 20
    assert current_spec(current_spec(with_worker(template=template))) == current_spec(with_worker(template=template))
