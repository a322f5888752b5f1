"""A job on this machine: its live object, the command lines of its processes, and unsupported fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.api.status import JobState, JobStatus
from elastic_operator.controller.model import NewPod
from elastic_operator.errors import BadInput
from elastic_operator.local.job import LiveJob, unsupported_fields
from elastic_operator.local.processes import pod_command
from elastic_operator.local.run import last_line
from elastic_operator.local.run_dir import RunDir
from elastic_operator.manifest.loader import load, load_checked
from torchelastic.protocol.records import SizeRecord

NOW = 1_700_000_000.0
UID = "0b0c7a52-8f0e-4c61-9a4e-6f0d5b0a9a11"
SIZE = SizeRecord(min=1, max=3, generation=1, desired=2)


def write(file: Path, **spec: Any) -> Path:
    given = {"minReplicas": 1, "maxReplicas": 3, "image": "some/image", "args": ["train.py"], **spec}
    job = {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "digits"},
        "spec": {key: value for key, value in given.items() if value is not None},
    }
    file.write_text(yaml.safe_dump(job))
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "digits.yaml"


def live_of(file: Path, **spec: Any) -> LiveJob:
    return LiveJob(load_checked(write(file, **spec)), uid=UID, created=NOW)


# The live object


@pytest.mark.parametrize(
    "fields", [{"replicas": -1}, {"replicas": 0}, {"replicas": 4}, {"replicas": "3"}, {"suspend": 1}]
)
def test_an_invalid_patch_is_refused_and_changes_nothing(file: Path, fields: dict[str, Any]) -> None:
    live = live_of(file, replicas=2)
    before = live.manifest
    with pytest.raises(BadInput, match=f"spec.{next(iter(fields))}: "):
        live.patch(fields)
    assert live.manifest == before


def test_a_saved_file_is_applied_as_kubectl_apply_would(file: Path) -> None:
    live = live_of(file)
    assert not live.apply(load(write(file)))
    assert live.job.generation == 1
    live.set_replicas(3)
    live.patch({"replicas": 1})
    assert live.apply(load(write(file, maxReplicas=5)))
    assert (live.job.spec.replicas, live.job.spec.max_replicas) == (1, 5), "a field that was never in the file is kept"
    assert live.manifest["metadata"]["uid"] == UID
    for replicas in (4, None):  # a field that is removed from the file is removed from the object
        assert live.apply(load(write(file, maxReplicas=5, replicas=replicas)))
        assert live.job.spec.replicas == replicas
    live.apply(load(write(file, replicas=2)))
    live.patch({"replicas": 3})
    assert live.apply(load(write(file, replicas=2))), "the file wins over a patch"
    assert live.job.spec.replicas == 2


def test_a_field_that_would_have_another_effect_locally_is_ignored(file: Path) -> None:
    exit_codes = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}
    plain = {"activeDeadlineSeconds": 60, "gracePeriodSeconds": 7}
    given = live_of(
        file,
        managedBy="example.org/other",
        ttlSecondsAfterFinished=1,
        cleanPodPolicy="None",
        disruptionBudget=True,
        schedulingPolicy={"gang": "Volcano"},
        rendezvous={"leaseSeconds": 9, "ports": {"first": 20000, "last": 20015}},
        failurePolicy={"rules": [{"action": "FailJob", "onPodReasons": ["Error"]}, exit_codes]},
        **plain,
    )
    same = live_of(file, rendezvous={"leaseSeconds": 9}, failurePolicy={"rules": [exit_codes]}, **plain)
    assert given.job.spec == same.job.spec
    assert given.manifest["spec"]["managedBy"] == "example.org/other"


def test_a_finished_or_deleted_job_does_not_change(file: Path) -> None:
    finished, deleted = live_of(file, replicas=2), live_of(file, replicas=2)
    finished.job = replace(finished.job, status=JobStatus(state=JobState.SUCCEEDED))
    deleted.delete()
    for live in (finished, deleted):
        with pytest.raises(BadInput, match="can no longer be changed"):
            live.patch({"replicas": 3})
        with pytest.raises(BadInput, match="can no longer be changed"):
            live.apply(load(write(file, replicas=3)))


# Processes


def test_a_pod_inherits_the_environment_but_not_settings_for_another_agent(tmp_path: Path, file: Path) -> None:
    job = live_of(file, env=[{"name": "DATA", "value": "$(HOME_OF_DATA)/$(PET_NPROC_PER_NODE)"}]).job
    environ = {"PATH": "/bin", "HOME_OF_DATA": "/data", "PET_NNODES": "7", "TORCHELASTIC_SIZE": "{}", "DATA": "old"}
    pod = NewPod("digits-1-abcde", 1, SIZE)
    command = pod_command(job, pod, "127.0.0.1:2379", run=RunDir(tmp_path / "run"), base=tmp_path, environ=environ)
    assert json.loads(command.env["TORCHELASTIC_SIZE"])["desired"] == 2
    expected = {
        "PATH": "/bin",
        "DATA": "$(HOME_OF_DATA)/1",  # as in a pod, only variables of the manifest can be referenced
        "PET_NNODES": "1:3",
        "PET_RDZV_ID": UID,
        "TORCHELASTIC_NODE_ADDRESS": "127.0.0.1",
        "TORCHELASTIC_METRICS_PORT": "0",
        "TORCHELASTIC_CHECKPOINT_DIR": str(tmp_path / "run" / "checkpoints" / "digits" / "1"),
        "PET_LOG_DIR": str(tmp_path / "run" / "logs" / "digits-1-abcde"),
    }
    assert {name: command.env[name] for name in expected} == expected
    assert command.cwd == tmp_path
    assert command.argv[-1] == "train.py"


# Unsupported fields


def test_each_unsupported_field_is_named() -> None:
    reference = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    worker = {"name": "worker", "resources": {}, "env": [reference]}
    exit_codes = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}
    rules = [exit_codes, {"action": "Ignore", "onPodReasons": ["Evicted"]}]
    examples = Path(__file__).parents[4] / "examples"
    assert not list(unsupported_fields(load_checked(examples / "digits.yaml").job["spec"]))
    spec = {
        "activeDeadlineSeconds": 60,
        "env": [reference],
        "managedBy": "example.org/other",
        "failurePolicy": {"rules": rules},
        "rendezvous": {"leaseSeconds": 9, "ports": {"first": 20000, "last": 20015}},
        "disruptionBudget": True,
        "template": {"spec": {"nodeSelector": {}, "restartPolicy": "Never", "containers": [{"name": "log"}, worker]}},
    }
    hint = "valueFrom (set TOKEN in the environment of elasticjob)"
    assert list(unsupported_fields(spec)) == [
        f"env[TOKEN].{hint}",
        "managedBy",
        "disruptionBudget",
        "rendezvous.ports",
        "failurePolicy.rules[1].onPodReasons",
        "template.spec.nodeSelector",
        "the container 'log' of template.spec.containers",
        "template.spec.containers[worker].resources",
        f"template.spec.containers[worker].env[TOKEN].{hint}",
    ]


def test_the_fields_of_an_archived_manifest_have_their_current_names(file: Path) -> None:
    container = {"name": "elasticjob-worker", "image": "i", "args": ["train.py"], "resources": {"limits": {"cpu": 1}}}
    worker = {"replicas": 2, "template": {"kind": "Pod", "spec": {"restartPolicy": "Never", "containers": [container]}}}
    live = live_of(file, image=None, args=None, replicaSpecs={"Worker": worker}, RunPolicy={"cleanPodPolicy": "All"})
    assert list(unsupported_fields(live.manifest["spec"])) == [
        "cleanPodPolicy",
        "template.spec.containers[worker].resources",
    ]
    assert live.job.spec.desired == 2


# Progress


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (None, None),
        (b"round 1\nround 2\n\n", "round 2"),
        (b"round 1\n 10%\r 20%\r", " 20%"),
        (b"\xff\xfe caf\xc3\xa9\n", "\ufffd\ufffd caf\u00e9"),
        (b"x" * 100_000 + b"\nlast\n", "last"),
        (b"y" * 100_000, "y" * 500),
    ],
)
def test_progress_is_the_last_line_that_is_not_blank(tmp_path: Path, printed: bytes | None, line: str | None) -> None:
    output = tmp_path / "output.log"
    if printed is not None:
        output.write_bytes(printed)
    found = last_line(output)
    assert (found and found.line) == line
