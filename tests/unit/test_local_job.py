"""What of a job is this machine's own: its live object, its processes' command lines, and what they can't honour."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from elastic_operator.errors import BadInput
from elastic_operator.local.cluster import LocalCluster
from elastic_operator.local.etcd_process import EtcdSettings
from elastic_operator.local.live_job import LiveJob
from elastic_operator.local.not_honoured import not_honoured, warning_of
from elastic_operator.local.pod_command import PodCommands
from elastic_operator.local.run_folder import RunFolder
from elastic_operator.local.snapshot import last_line
from elastic_operator.manifest import load, load_checked
from elastic_operator.model import EtcdState, JobState, JobStatus, NewPod
from torchelastic.contract import SizeRecord

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_700_000_000.0
UID = "0b0c7a52-8f0e-4c61-9a4e-6f0d5b0a9a11"
SIZE = SizeRecord(min=1, max=3, generation=1, wanted=2)


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


def test_the_live_object_is_what_an_api_server_would_hold(file: Path) -> None:
    live = live_of(file, replicas=2)
    assert live.key == "default/digits"
    assert live.manifest["metadata"] == {
        "name": "digits",
        "namespace": "default",
        "uid": UID,
        "generation": 1,
        "creationTimestamp": "2023-11-14T22:13:20Z",
    }
    assert live.manifest["spec"]["nprocPerNode"] == 1
    assert live.job().spec.replicas == 2


def test_each_change_of_the_spec_is_a_generation(file: Path) -> None:
    live = live_of(file)
    live.set_replicas(3)
    assert live.scale(2)
    assert not live.scale(2)
    assert (live.job().generation, live.manifest["metadata"]["generation"]) == (3, 3)
    assert live.job().spec.desired == 2


@pytest.mark.parametrize("replicas", [-1, 0, 4])
def test_a_size_out_of_range_is_refused_and_changes_nothing(file: Path, replicas: int) -> None:
    live = live_of(file, replicas=2)
    before = live.manifest
    with pytest.raises(BadInput, match=r"spec.*replicas"):
        live.scale(replicas)
    assert live.manifest == before


def test_a_saved_file_sets_what_it_names_and_leaves_what_it_never_named(file: Path) -> None:
    live = live_of(file)
    live.set_replicas(3)
    live.scale(1)
    assert live.apply(load(write(file, minReplicas=1, maxReplicas=5)))
    assert live.job().spec.replicas == 1
    assert live.job().spec.max_replicas == 5
    assert live.apply(load(write(file, maxReplicas=5, replicas=4)))
    assert live.job().spec.replicas == 4
    assert live.apply(load(write(file, maxReplicas=5)))
    assert live.job().spec.replicas is None  # named before and no longer: removed


def test_a_file_that_was_saved_unchanged_changes_nothing(file: Path) -> None:
    live = live_of(file)
    assert not live.apply(load(write(file)))
    assert live.job().generation == 1


def test_a_change_that_a_running_job_cannot_follow_is_refused_with_its_line(file: Path) -> None:
    live = live_of(file, replicas=2)
    with pytest.raises(BadInput, match=r"digits.yaml:\d+: spec.args"):
        live.apply(load(write(file, replicas=3, args=["other.py"])))
    assert live.job().spec.replicas == 2
    assert live.apply(load(write(file, replicas=3)))


def test_a_job_rests_and_goes_on(file: Path) -> None:
    live = live_of(file)
    assert live.suspend(rest=True)
    assert not live.suspend(rest=True)
    assert (live.job().spec.suspend, live.manifest["spec"]["suspend"], live.job().generation) == (True, True, 2)
    # What the file never named stays as it is, and while the job rests the file may say other things.
    assert live.apply(load(write(file, args=["other.py"], image="another", nprocPerNode=2)))
    assert (live.job().spec.suspend, live.job().spec.args) == (True, ("other.py",))
    assert live.suspend(rest=False)
    with pytest.raises(BadInput, match=r"spec.image: \"another\" cannot become \"some/image\" while the job runs"):
        live.apply(load(write(file, args=["other.py"])))


def test_a_saved_file_can_have_a_job_rest(file: Path) -> None:
    live = live_of(file)
    assert live.apply(load(write(file, suspend=True, args=["other.py"])))
    assert live.job().spec.suspend
    assert live.apply(load(write(file, args=["other.py"])))
    assert not live.job().spec.suspend


def test_a_job_keeps_to_its_etcd_even_while_it_rests(file: Path) -> None:
    live = live_of(file, suspend=True)
    with pytest.raises(BadInput, match=r"spec.etcd.endpoint: cannot be set, changed or removed while the job exists"):
        live.apply(load(write(file, suspend=True, etcd={"endpoint": "a:1"})))


def test_what_would_mean_something_else_here_has_no_effect(file: Path) -> None:
    given = live_of(
        file,
        managedBy="example.org/other",
        ttlSecondsAfterFinished=1,
        cleanPodPolicy="None",
        disruptionBudget=True,
        schedulingPolicy={"gang": "Volcano"},
        rendezvous={"leaseSeconds": 9, "ports": {"first": 20000, "last": 20015}},
        failurePolicy={
            "rules": [
                {"action": "FailJob", "onPodReasons": ["Error"]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}},
            ]
        },
        activeDeadlineSeconds=60,
        gracePeriodSeconds=7,
    )
    plain = live_of(
        file,
        rendezvous={"leaseSeconds": 9},
        failurePolicy={"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}]},
        activeDeadlineSeconds=60,
        gracePeriodSeconds=7,
    )
    assert given.job().spec == plain.job().spec
    assert given.manifest["spec"]["managedBy"] == "example.org/other"  # the object says what was asked for


@pytest.mark.parametrize("end", ["finished", "deleted"])
def test_a_job_that_is_over_does_not_change(file: Path, end: str) -> None:
    live = live_of(file, replicas=2)
    if end == "deleted":
        live.delete()
    else:
        live.status = JobStatus(state=JobState.SUCCEEDED)
    changes: list[Callable[[], object]] = [
        lambda: live.scale(3),
        lambda: live.suspend(rest=True),
        lambda: live.apply(load(write(file, replicas=3))),
    ]
    for change in changes:
        with pytest.raises(BadInput, match="does not change any more"):
            change()


def commands(tmp_path: Path, **environ: str) -> PodCommands:
    return PodCommands(run=RunFolder(tmp_path / "run"), base=tmp_path, environ=environ)


def test_a_pod_inherits_the_environment_but_not_what_is_meant_for_another_agent(tmp_path: Path, file: Path) -> None:
    job = live_of(file, env=[{"name": "DATA", "value": "$(HOME_OF_DATA)/$(PET_NPROC_PER_NODE)"}]).job()
    inherited = commands(
        tmp_path, PATH="/bin", HOME_OF_DATA="/data", PET_NNODES="7", TORCHELASTIC_SIZE="{}", DATA="overridden"
    )
    command = inherited.command(job, NewPod("digits-1-abcde", 1, SIZE), "127.0.0.1:2379")
    assert command.env["PATH"] == "/bin"
    assert command.env["DATA"] == "$(HOME_OF_DATA)/1"  # as in a pod: only what the manifest names is referred to
    assert command.env["PET_NNODES"] == "1:3"
    assert json.loads(command.env["TORCHELASTIC_SIZE"])["w"] == 2
    assert command.env["PET_RDZV_ID"] == UID
    assert command.env["TORCHELASTIC_NODE_ADDRESS"] == "127.0.0.1"
    assert command.env["TORCHELASTIC_METRICS_PORT"] == "0"
    assert command.env["TORCHELASTIC_CHECKPOINT_DIR"] == str(tmp_path / "run" / "checkpoints" / "digits" / "1")
    assert command.env["PET_LOG_DIR"] == str(tmp_path / "run" / "logs" / "digits-1-abcde")
    assert command.folder == tmp_path
    assert command.argv[-1] == "train.py"


async def test_the_check_passes_for_a_script_beside_the_manifest_and_names_one_that_is_missing(
    tmp_path: Path, file: Path
) -> None:
    asked = commands(tmp_path, **os.environ)
    with pytest.raises(BadInput, match=r"There is no script train.py \(looked up from .*\)"):
        await asked.check(live_of(file).job())
    (tmp_path / "train.py").touch()
    await asked.check(live_of(file).job())
    # Not even one that is called like a module of the agent's own is mistaken for it.
    (tmp_path / "asyncio.py").write_text("raise SystemExit(7)")
    await asked.check(live_of(file).job())
    assert not (tmp_path / "run").exists()


def test_what_is_honoured_is_not_warned_of() -> None:
    worker = {"name": "worker", "image": "i", "args": ["x"], "env": [{"name": "A", "value": "1"}]}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [worker], "restartPolicy": "Never"}}
    assert warning_of({"image": "i", "env": [{"name": "B", "value": "2"}], "template": template}) is None


def test_what_takes_rights_away_from_a_container_is_not_warned_of_but_what_gives_them_is() -> None:
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    containers = [{"name": "worker", "securityContext": restricted}]
    pod = {"automountServiceAccountToken": False, "securityContext": restricted, "containers": containers}
    assert warning_of({"image": "i", "template": {"spec": pod}}) is None

    mighty = {"privileged": True, "capabilities": {"add": ["SYS_PTRACE"]}}
    pod = {"hostNetwork": True, "containers": [{"name": "worker", "securityContext": mighty}]}
    assert list(not_honoured({"template": {"spec": pod}})) == [
        "template.spec.hostNetwork",
        "template.spec.containers[worker].securityContext.privileged",
        "template.spec.containers[worker].securityContext.capabilities",
    ]


def test_of_the_life_of_a_job_that_is_named_which_needs_a_cluster() -> None:
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}},
        {"action": "Ignore", "onPodReasons": ["Evicted"]},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    assert list(
        not_honoured(
            {
                "suspend": False,
                "backoffLimit": 3,
                "activeDeadlineSeconds": 60,
                "gracePeriodSeconds": 5,
                "managedBy": "example.org/other",
                "ttlSecondsAfterFinished": 60,
                "cleanPodPolicy": "All",
                "failurePolicy": {"rules": rules},
                "schedulingPolicy": {"gang": "Volcano", "queue": "q"},
                "rendezvous": {"leaseSeconds": 9, "ports": {"first": 20000, "last": 20015}},
                "nodeLossSeconds": 60,
                "disruptionBudget": True,
                "metricsPort": 9100,
                "etcd": {"endpoint": "https://etcd", "tlsSecret": "s"},
            }
        )
    ) == [
        "managedBy (who runs a job here looks after it)",
        "ttlSecondsAfterFinished (a run's folder stays)",
        "cleanPodPolicy (no process outlives its run, and all logs stay)",
        "failurePolicy.rules[1].onPodReasons",
        "failurePolicy.rules[2].onPodConditions",
        "schedulingPolicy.gang",
        "schedulingPolicy.queue",
        "rendezvous.ports (all pods share this machine's)",
        "nodeLossSeconds",
        "disruptionBudget",
        "metricsPort (each pod takes a free one)",
        "etcd.tlsSecret",
    ]


def test_of_an_archived_manifest_that_is_named_which_its_pods_would_have(file: Path) -> None:
    container = {"name": "elasticjob-worker", "image": "i", "args": ["train.py"], "resources": {"limits": {"cpu": 1}}}
    worker = {"replicas": 2, "template": {"kind": "Pod", "spec": {"restartPolicy": "Never", "containers": [container]}}}
    live = live_of(file, image=None, args=None, replicaSpecs={"Worker": worker}, RunPolicy={"cleanPodPolicy": "All"})
    assert list(not_honoured(live.manifest["spec"])) == [
        "cleanPodPolicy (no process outlives its run, and all logs stay)",
        "template.spec.containers[worker].resources",
    ]
    assert live.job().spec.desired == 2


@pytest.mark.parametrize("name", ["digits.yaml", "hello.yaml"])
def test_the_examples_say_nothing_that_is_not_honoured(name: str) -> None:
    examples = Path(__file__).parents[2] / "examples"
    assert warning_of(load_checked(examples / name).job["spec"]) is None


def test_each_field_that_has_no_effect_is_named() -> None:
    reference = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    worker = {"name": "worker", "resources": {}, "volumeMounts": [], "env": [reference]}
    spec = {
        "env": [reference],
        "etcd": {"image": "e", "storage": {}},
        "checkpoint": {"volume": {"emptyDir": {}}},
        "template": {
            "spec": {
                "nodeSelector": {},
                "securityContext": {"runAsUser": 0, "runAsNonRoot": True},
                "containers": [{"name": "log"}, worker],
            }
        },
    }
    hint = "valueFrom (set TOKEN where you type elasticjob)"
    assert list(not_honoured(spec)) == [
        f"env[TOKEN].{hint}",
        "etcd.image",
        "etcd.storage",
        "checkpoint.volume (checkpoints are in the run's folder)",
        "template.spec.nodeSelector",
        "template.spec.securityContext.runAsUser",
        "the container 'log' of template.spec.containers",
        "template.spec.containers[worker].resources",
        "template.spec.containers[worker].volumeMounts",
        f"template.spec.containers[worker].env[TOKEN].{hint}",
    ]


@pytest.mark.parametrize("template", [{"spec": 1}, {"spec": {"containers": "x"}}, {"spec": {"containers": [1, {}]}}])
def test_a_template_that_makes_no_sense_is_no_reason_to_fail(template: Any) -> None:
    list(not_honoured({"template": template, "env": None}))


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (b"", None),
        (b"\n  \n", None),
        (b"epoch 1\nepoch 2\n\n", "epoch 2"),
        (b"epoch 1\n 10%\r 20%\r", " 20%"),
        (b"half a line", "half a line"),
        (b"\xff\xfe caf\xc3\xa9\n", "\ufffd\ufffd caf\u00e9"),
        (b"x" * 100_000 + b"\nlast\n", "last"),
        (b"y" * 100_000, "y" * 500),
    ],
)
def test_progress_is_the_last_line_that_says_something(tmp_path: Path, printed: bytes, line: str | None) -> None:
    output = tmp_path / "output.log"
    output.write_bytes(printed)
    found = last_line(output)
    assert (found and found["line"]) == line


def test_where_nothing_was_printed_there_is_no_progress(tmp_path: Path) -> None:
    assert last_line(tmp_path / "output.log") is None


async def test_an_own_etcd_that_runs_and_does_not_answer_is_not_ready(file: Path, tmp_path: Path) -> None:
    changes: list[str] = []
    etcd = EtcdSettings(tmp_path / "etcd", tmp_path / "data", tmp_path / "log", {})
    live = live_of(file)
    cluster = LocalCluster(
        live,
        etcd=etcd,
        command=lambda _new, _endpoint: pytest.fail("no pod is made"),
        changed=lambda: changes.append("changed"),
        broken=lambda error: pytest.fail(f"{error}"),
        keep=lambda _report: pytest.fail("nothing is kept"),
    )
    assert cluster.etcd is not None
    cluster.etcd.state = EtcdState.READY

    async def state() -> EtcdState:
        seen = await cluster.observe(live.key)
        assert seen is not None
        return seen[1].etcd

    assert await state() is EtcdState.READY
    cluster._tell_store_away("etcd at 127.0.0.1 gave no answer in time")
    assert (await state(), changes, list(cluster.events)) == (EtcdState.STARTING, ["changed"], [])
    cluster.mirror.readable = True
    cluster._mirror_changed()
    assert (await state(), list(cluster.events)) == (EtcdState.READY, [])
