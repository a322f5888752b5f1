"""What a pod is started with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_operator.model import NewPod
from elastic_operator.pods import (
    RESERVED,
    AgentCommand,
    Surroundings,
    agent_command,
    ending_of,
    problem_of,
    program_of,
    resolved,
    user_env,
)
from elastic_operator.spec import EtcdSpec
from tests.support.builders import UID, a_job, size
from torchelastic.arguments import parse
from torchelastic.contract import CONTRACT_VERSION, Env, SizeRecord, decode
from torchelastic.settings import AgentSettings, ProgramKind

POD = NewPod(name="digits-1-abcde", index=1, size=size(2, generation=3, minimum=1, maximum=4))
HERE = Surroundings(
    store="10.0.0.9:2379",
    checkpoints="/checkpoints/digits/1",
    termination_log="/dev/termination-log",
    address="10.0.0.7",
    metrics_port=9100,
)


def as_the_agent_reads_it(command: AgentCommand) -> AgentSettings:
    return parse(command.argv[1:], command.env)


def test_the_agent_understands_all_that_it_is_given(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    job = a_job(maximum=4, nproc_per_node=3, max_restarts=7, args=(str(script), "--epochs", "10"))
    settings = as_the_agent_reads_it(agent_command(job, POD, HERE))

    rendezvous = settings.rendezvous
    assert (rendezvous.run_id, rendezvous.unique_run, rendezvous.max_restarts) == (UID, True, 7)
    assert rendezvous.size == POD.size
    assert settings.store is not None
    assert settings.store.endpoints == ("10.0.0.9:2379",)
    assert (settings.node_name, settings.address, settings.workers) == ("digits-1-abcde", "10.0.0.7", 3)
    assert (settings.metrics_port, settings.termination_log) == (9100, Path("/dev/termination-log"))
    assert (settings.program.kind, settings.program.argv) == (ProgramKind.SCRIPT, (str(script), "--epochs", "10"))


def test_without_a_command_the_arguments_may_be_flags_of_the_launcher() -> None:
    job = a_job(args=("--nproc-per-node=5", "-m", "json.tool", "--nnodes"))
    settings = as_the_agent_reads_it(agent_command(job, POD, HERE))

    assert settings.workers == 5
    assert (settings.program.kind, settings.program.argv) == (ProgramKind.MODULE, ("json.tool", "--nnodes"))


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (("/bin/echo",), ("--nproc-per-node=5", "--", "-m")),
        (("/bin/echo", "--standalone"), ()),
        (("/bin/echo", "--"), ("x",)),
    ],
)
def test_with_a_command_nothing_of_it_is_read_as_a_flag(command: tuple[str, ...], args: tuple[str, ...]) -> None:
    started = agent_command(a_job(command=command, args=args), POD, HERE)
    settings = as_the_agent_reads_it(started)

    assert started.argv == ("torchelastic-run", "--no-python", "--", *command, *args)
    assert (settings.program.kind, settings.program.argv) == (ProgramKind.COMMAND, (*command, *args))
    assert settings.workers == 1


def test_the_size_travels_as_the_record_that_the_store_would_have() -> None:
    env = agent_command(a_job(), POD, HERE).env

    assert decode(env[Env.SIZE].encode(), SizeRecord) == POD.size
    assert env[Env.CONTRACT] == str(CONTRACT_VERSION)
    assert env[Env.CHECKPOINT_DIR] == "/checkpoints/digits/1"


def test_what_is_known_only_later_is_left_to_others() -> None:
    elsewhere = replace(HERE, address=None, metrics_port=None)
    env = agent_command(a_job(), POD, elsewhere).env

    assert Env.NODE_ADDRESS not in env
    assert Env.METRICS_PORT not in env


def test_every_variable_that_is_given_is_reserved() -> None:
    assert set(agent_command(a_job(), POD, HERE).env) == RESERVED


def test_another_launcher_takes_the_place_of_the_first_words() -> None:
    launcher = ("/usr/bin/python3", "-m", "torchelastic.run")
    started = agent_command(a_job(args=("x.py",)), POD, replace(HERE, launcher=launcher))

    assert started.argv == (*launcher, "x.py")


def test_the_agent_is_told_the_notice_that_fits_into_the_pods_time_to_end(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    job = a_job(args=(str(script),), template=pod_template(terminationGracePeriodSeconds=120))
    settings = as_the_agent_reads_it(agent_command(job, POD, HERE))

    assert ending_of(job.spec).period == 120
    assert settings.rendezvous.notice + settings.stop_grace + 25 == 120
    by_itself = as_the_agent_reads_it(agent_command(a_job(args=(str(script),)), POD, HERE))
    assert by_itself.rendezvous.notice + by_itself.stop_grace < ending_of(a_job().spec).period
    days = a_job(args=(str(script),), template=pod_template(terminationGracePeriodSeconds=1_000_000))
    assert as_the_agent_reads_it(agent_command(days, POD, HERE)).rendezvous.notice == 86_400


def template(**container: object) -> dict[str, object]:
    containers = [{"name": "sidecar", "args": ["no"]}, {"name": "worker", **container}]
    return {"spec": {"containers": containers}}


def pod_template(**fields: object) -> dict[str, object]:
    return {"spec": fields}


def test_the_template_may_name_the_program_and_more_variables() -> None:
    job = a_job(
        template=template(command=["python"], args=["x.py"], env=[{"name": "A", "value": "1"}]),
        env=({"name": "B", "value": "2"},),
    )

    assert program_of(job.spec) == (("python",), ("x.py",))
    assert [entry["name"] for entry in user_env(job.spec)] == ["A", "B"]


@pytest.mark.parametrize("shape", [{}, {"spec": None}, {"spec": {"containers": None}}, {"spec": {"containers": []}}])
def test_a_template_may_be_as_good_as_empty(shape: dict[str, object]) -> None:
    job = a_job(template=shape, image="i", args=("x.py",))

    assert program_of(job.spec) == ((), ("x.py",))
    assert problem_of(job.spec) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"minimum": 3, "maximum": 2}, "spec.minReplicas must be at least 1 and not larger than spec.maxReplicas"),
        ({"minimum": 0}, "spec.minReplicas must be at least 1 and not larger than spec.maxReplicas"),
        (
            {"etcd": EtcdSpec(endpoint="https://a,http://b")},
            "spec.etcd.endpoint: the servers of one etcd are all reached over http:// or all over https://; choose one",
        ),
        (
            {"etcd": EtcdSpec(endpoint="a:99999")},
            'spec.etcd.endpoint: "a:99999" has the port 99999; a port is a number from 1 to 65535',
        ),
        (
            {"env": ({"name": "A", "value": "1"}, {"name": "A", "value": "1"})},
            "the environment variable A is given twice; remove one of the two",
        ),
        (
            {"env": ({"name": "A"},), "template": template(env=[{"name": "A"}])},
            "the environment variable A is given twice; remove one of the two",
        ),
        (
            {"env": ({"name": "PET_MAX_RESTARTS", "value": "1"},)},
            "the environment variable PET_MAX_RESTARTS is set by the operator; use spec.maxRestarts instead",
        ),
        (
            {"env": ({"name": "TORCHELASTIC_SIZE", "value": "1"},)},
            "the environment variable TORCHELASTIC_SIZE is set by the operator; remove it",
        ),
        (
            {"args": ("x.py",), "template": template(args=["y.py"])},
            "spec.args and args of the template's container worker are both given; remove one of the two",
        ),
        (
            {"image": "a", "template": template(image="b")},
            "spec.image and image of the template's container worker are both given; remove one of the two",
        ),
        (
            {
                "checkpoint_volume": {"emptyDir": {}},
                "template": template(volumeMounts=[{"name": "mine", "mountPath": "/checkpoints/"}]),
            },
            (
                "spec.checkpoint.volume and a mount of the template's container worker at /checkpoints are both given; "
                "remove one of the two"
            ),
        ),
    ],
)
def test_what_is_said_twice_is_a_problem_that_is_put_into_words(fields: dict[str, object], words: str) -> None:
    assert problem_of(a_job(**fields).spec) == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            pod_template(restartPolicy="OnFailure"),
            'restartPolicy of the template is "OnFailure", but pods are replaced and never restarted; remove it',
        ),
        (
            template(restartPolicy="Always"),
            (
                'restartPolicy of the template\'s container worker is "Always", but pods are replaced and never '
                "restarted; remove it"
            ),
        ),
        (
            pod_template(hostname="me"),
            "hostname of the template is given, but each pod has one of its own, <job>-<index>; remove it",
        ),
        (
            template(ports=[{"name": "web", "containerPort": 80}, {"name": "metrics", "containerPort": 81}]),
            "the template's container worker has a port named metrics, which is the agent's own; give it another name",
        ),
        (
            {"metadata": {"name": "me"}},
            "metadata.name of the template is given, but each pod has a name of its own; remove it",
        ),
        (
            {"metadata": {"namespace": "here"}},
            "metadata.namespace of the template is given, but pods live in the namespace of their job; remove it",
        ),
        (
            {"metadata": {"ownerReferences": [{"kind": "ConfigMap", "name": "mine"}]}},
            "metadata.ownerReferences of the template is given, but pods belong to their job alone; remove it",
        ),
        (
            {"metadata": {"finalizers": ["mine/never"]}},
            "metadata.finalizers of the template is given, but pods go with their job; remove it",
        ),
        (
            {"metadata": {"labels": {"elastic.pytorch.org/job": "x"}}},
            "labels of the template name elastic.pytorch.org/job, which only the operator sets; remove it",
        ),
        (
            {"metadata": {"annotations": {"elastic.pytorch.org/new": "x"}}},
            "annotations of the template name elastic.pytorch.org/new, which only the operator sets; remove it",
        ),
        (
            pod_template(containers={"name": "worker"}),
            'containers of the template\'s spec must be a list of containers, and not {"name": "worker"}',
        ),
        (
            template(env={"A": "1"}),
            'env of the template\'s container worker must be a list of names with values, and not {"A": "1"}',
        ),
        (
            template(args="train.py"),
            'args of the template\'s container worker must be a list of texts, and not "train.py"',
        ),
        (
            template(command=["sleep", 1]),
            "command[1] of the template's container worker is 1 and not a text; put it in quotes",
        ),
    ],
)
def test_what_a_template_must_not_say_is_a_problem_that_is_put_into_words(given: dict[str, object], words: str) -> None:
    assert problem_of(a_job(image="i", template=given).spec) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"args": ("x.py",), "template": template()},
            "neither spec.image nor the template's container worker names an image; give one of the two",
        ),
        (
            {"template": template(image="i")},
            "neither spec.args nor the template's container worker names a program; give args in one of the two",
        ),
    ],
)
def test_what_neither_spec_nor_template_says_is_a_problem(fields: dict[str, object], words: str) -> None:
    assert problem_of(a_job(**fields).spec) == words  # type: ignore[arg-type]


def test_what_only_repeats_the_rule_is_no_problem() -> None:
    given = {"metadata": {"name": "", "labels": None}, "spec": {"restartPolicy": "Never", "hostname": None}}

    assert problem_of(a_job(image="i", args=("x.py",), template=given).spec) is None


def test_what_is_said_once_is_no_problem() -> None:
    env = ({"name": "PET_LOG_DIR", "value": "/logs"}, {"name": "A", "valueFrom": {"fieldRef": {}}})

    assert problem_of(a_job(command=("a",), args=("b",), env=env, template=template(image="c")).spec) is None


def test_references_are_resolved_as_a_kubelet_would() -> None:
    started = AgentCommand(("run", "$(A)-$(B)", "$(NOBODY)", "$$(A)", "$A"), {"A": "1"})
    entries = [
        {"name": "B", "value": "<$(A)>"},
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "x"},
        {"name": "EMPTY"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {}}},
    ]
    result = resolved(started, entries)

    assert result.argv == ("run", "1-<1>", "$(NOBODY)", "$(A)", "$A")
    assert result.env == {"A": "1", "B": "<1>", "EARLY": "$(LATE)", "LATE": "x", "EMPTY": ""}
