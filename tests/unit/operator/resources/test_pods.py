"""The command and environment of a worker pod, and the validation of a job's spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from elastic_operator.api.spec import (
    CheckpointSpec,
    EtcdSpec,
    ExitCodes,
    FailureAction,
    FailureRule,
    PodCondition,
    PortRange,
    RendezvousSpec,
    launcher_flags,
    program_of,
)
from elastic_operator.api.validation import problem_of
from elastic_operator.controller.model import NewPod
from elastic_operator.resources.worker_pod import (
    agent_arguments,
    agent_variables,
    expand_references,
    termination_settings,
)
from tests.support.builders import UID, a_job, size
from torchelastic.config.flags import FLAGS
from torchelastic.config.parse import parse
from torchelastic.config.settings import AgentSettings, ProgramKind
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import ResumeRecord

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job

POD = NewPod(name="digits-1-abcde", index=1, size=size(2, generation=3, minimum=1, maximum=4))


def variables_of(job: Job, pod: NewPod = POD) -> dict[str, str]:
    where = {"checkpoints": "/checkpoints/digits/1", "termination_log": "/dev/termination-log"}
    return agent_variables(job, pod, store="10.0.0.9:2379", metrics_port=9100, tls=None, **where)


def parsed_by_the_agent(job: Job, pod: NewPod = POD) -> AgentSettings:
    return parse(agent_arguments(job.spec), {**variables_of(job, pod), Env.NODE_ADDRESS: "10.0.0.7"})


def test_agent_parses_its_command(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    job = a_job(maximum=4, nproc_per_node=3, max_restarts=7, args=(str(script), "--epochs", "10"))
    settings = parsed_by_the_agent(job)

    rendezvous = settings.rendezvous
    assert (rendezvous.run_id, rendezvous.unique_run, rendezvous.max_restarts) == (UID, True, 7)
    assert rendezvous.size == POD.size
    assert settings.store is not None
    assert settings.store.endpoints == ("10.0.0.9:2379",)
    assert (settings.node_name, settings.address, settings.workers) == ("digits-1-abcde", "10.0.0.7", 3)
    assert (settings.metrics_port, settings.termination_log) == (9100, Path("/dev/termination-log"))
    assert (settings.program.kind, settings.program.argv) == (ProgramKind.SCRIPT, (str(script), "--epochs", "10"))


def test_only_agents_of_a_job_with_spares_stand_by_unless_the_user_decides_otherwise() -> None:
    assert not parsed_by_the_agent(a_job(args=("-m", "json.tool"))).warm_spare
    job = a_job(args=("-m", "json.tool"), spares=1)
    assert parsed_by_the_agent(job).warm_spare
    off = a_job(args=("-m", "json.tool"), spares=1, env=({"name": "PET_WARM_SPARE", "value": "0"},))
    assert "PET_WARM_SPARE" not in variables_of(off)


def test_args_without_a_command_may_contain_launcher_flags() -> None:
    job = a_job(args=("--nproc-per-node=5", "-m", "json.tool", "--nnodes"))
    settings = parsed_by_the_agent(job)

    assert settings.workers == 5
    assert (settings.program.kind, settings.program.argv) == (ProgramKind.MODULE, ("json.tool", "--nnodes"))


def test_the_operator_knows_which_flags_of_the_agent_have_a_value() -> None:
    for flag in (flag for flags in FLAGS.values() for flag in flags):
        for written in (f"--{flag.name}", *([f"-{flag.short}"] if flag.short else [])):
            [found, *_] = launcher_flags((written, "train.py"))
            assert (found.words == (written,)) is (not flag.metavar), written


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (("/bin/echo",), ("--nproc-per-node=5", "--", "-m")),
        (("/bin/echo", "--"), ("x",)),
    ],
)
def test_command_is_not_parsed_for_flags(command: tuple[str, ...], args: tuple[str, ...]) -> None:
    settings = parsed_by_the_agent(a_job(command=command, args=args))

    assert (settings.program.kind, settings.program.argv) == (ProgramKind.COMMAND, (*command, *args))
    assert settings.workers == 1


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "-c", "python train.py  # not torchrun\n# torchrun x.py"),
        ("bash", "-c", "echo torchrun; python -m train torchrun"),
        ("bash", "-c", "version=$(torchrun --version); python train.py"),
        ("bash", "-c", "\n" * 100_000),  # must take linear time: the operator checks the specs of all tenants
        ("bash", "-c", ";a=" * 43_690),
        ("sh", "-c"),
        ("python", "torchrun.py"),
    ],
)
def test_command_that_only_mentions_a_launcher_is_valid(command: tuple[str, ...]) -> None:
    assert problem_of(a_job(image="i", command=command).spec) is None


def exit_rule(action: FailureAction, *codes: int, negated: bool = False) -> FailureRule:
    return FailureRule(action, exit_codes=ExitCodes(frozenset(codes), "NotIn" if negated else "In"))


FAIL, IGNORE, COUNT = FailureAction.FAIL_JOB, FailureAction.IGNORE, FailureAction.COUNT


@pytest.mark.parametrize(
    ("rules", "final", "free"),
    [
        ((), None, None),
        ((exit_rule(FAIL, 3),), "3", None),
        ((exit_rule(FAIL, 3, 4, 5, 64), exit_rule(IGNORE, 137)), "3-5,64", "137"),
        # The first rule that matches applies.
        ((exit_rule(COUNT, 1), exit_rule(FAIL, 1, 2, negated=True)), "3-255", None),
        ((exit_rule(FAIL, 2), exit_rule(IGNORE, 2, 3), exit_rule(COUNT, 3, 4)), "2", "3"),
        ((exit_rule(IGNORE, 1, negated=True), exit_rule(FAIL, 1)), "1", "2-255"),
        # Rules about pods are evaluated by the operator.
        ((FailureRule(FAIL, pod_reasons=frozenset({"OOMKilled"})), exit_rule(IGNORE, 9)), None, "9"),
        ((FailureRule(IGNORE, pod_conditions=(PodCondition("DisruptionTarget"),)),), None, None),
    ],
)
def test_exit_code_rules_are_passed_to_the_agents(
    rules: tuple[FailureRule, ...], final: str | None, free: str | None
) -> None:
    env = variables_of(a_job(failure_rules=rules))

    assert (env.get("PET_NON_RETRYABLE_EXIT_CODES"), env.get("PET_UNCHARGED_EXIT_CODES")) == (final, free)


def test_agent_parses_failure_rules_rendezvous_settings_and_the_resume_record(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    rules = (exit_rule(FAIL, 3, 64, 65), exit_rule(IGNORE, 1, 3, negated=True))
    job = a_job(
        args=(str(script),), failure_rules=rules, rendezvous=RendezvousSpec(30, 1200, 10, PortRange(20000, 20031))
    )
    resumed = replace(POD, resume=ResumeRecord(round=12, restarts=3, uncharged_restarts=5))
    settings = parsed_by_the_agent(job, resumed)

    assert settings.non_retryable_exit_codes == {3, 64, 65}
    assert settings.uncharged_exit_codes == {*range(1, 256)} - {1, 3, 64, 65}
    rendezvous = settings.rendezvous
    assert (rendezvous.last_call_timeout, rendezvous.join_timeout, rendezvous.lease) == (30.0, 1200.0, 10.0)
    assert "PET_RDZV_CONF" not in variables_of(a_job())
    assert rendezvous.resume == ResumeRecord(round=12, restarts=3, uncharged_restarts=5)
    assert rendezvous.ports is not None
    assert (rendezvous.ports.first, rendezvous.ports.last) == (20000, 20031)


@pytest.mark.parametrize(("period", "grace"), [(None, 60), (120, 60), (120, 0), (80, 60), (100, 75)])
def test_grace_period_is_passed_to_the_agents(tmp_path: Path, period: int | None, grace: int) -> None:
    (script := tmp_path / "train.py").touch()
    template = {} if period is None else pod_template(terminationGracePeriodSeconds=period)
    job = a_job(args=(str(script),), grace_period=grace, template=template)
    settings = parsed_by_the_agent(job)

    assert settings.shutdown_timeout == grace
    assert problem_of(msgspec.structs.replace(job.spec, image="i")) is None
    if period is None:
        assert settings.rendezvous.notice + grace < termination_settings(job.spec)[0]
    else:
        assert settings.rendezvous.notice == max(0, period - min(25, period / 4) - grace)


def container_template(**container: object) -> dict[str, object]:
    containers = [{"name": "sidecar", "args": ["no"]}, {"name": "worker", **container}]
    return {"spec": {"containers": containers}}


def pod_template(**fields: object) -> dict[str, object]:
    return {"spec": fields}


@pytest.mark.parametrize(
    "shape",
    [
        *({}, {"spec": None}, {"spec": {"containers": None}}, {"spec": {"containers": []}}),
        {"metadata": {"labels": None}, "spec": {"restartPolicy": "Never", "hostname": None}},
    ],
)
def test_template_may_be_empty_or_repeat_the_operators_values(shape: dict[str, object]) -> None:
    job = a_job(template=shape, image="i", args=("x.py",))

    assert program_of(job.spec) == ((), ("x.py",))
    assert problem_of(job.spec) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"minimum": 3, "maximum": 2}, "spec.minReplicas must be at least 1 and not larger than spec.maxReplicas"),
        (
            {"etcd": EtcdSpec(endpoint="a:99999")},
            'spec.etcd.endpoint: "a:99999" has the port 99999; a port is a number from 1 to 65535',
        ),
        (
            {"env": ({"name": "A"},), "template": container_template(env=[{"name": "A"}])},
            "the environment variable A is set twice; remove one of the entries",
        ),
        (
            {"env": ({"name": "PET_MAX_RESTARTS", "value": "1"},)},
            "the environment variable PET_MAX_RESTARTS is reserved for the operator; use spec.maxRestarts instead",
        ),
        (
            {"env": ({"name": "TORCHELASTIC_SIZE", "value": "1"},)},
            "the environment variable TORCHELASTIC_SIZE is reserved for the operator; remove it",
        ),
        (
            {"env": ({"name": "PET_RDZV_BACKEND", "value": "etcd-v2"},)},
            "the environment variable PET_RDZV_BACKEND is reserved for the operator; remove it",
        ),
        (
            {"args": ("--max-restarts=3", "x.py")},
            "the flag --max-restarts in args is reserved for the operator; use spec.maxRestarts instead",
        ),
        (
            {"template": container_template(image="i", args=["--tee", "3", "--rdzv_endpoint", "other:2379", "x.py"])},
            "the flag --rdzv_endpoint in args is reserved for the operator; use spec.etcd instead",
        ),
        (
            {"args": ("--nnode=2", "x.py")},
            "the flag --nnode in args is reserved for the operator; use spec.minReplicas and spec.maxReplicas instead",
        ),
        (
            {"args": ("--no-py", "--max-rest", "3", "./x")},
            "the flag --max-rest in args is reserved for the operator; use spec.maxRestarts instead",
        ),
        (
            {"args": ("-m", "--metrics-port=1", "x")},
            "the flag --metrics-port in args is reserved for the operator; use spec.metricsPort instead",
        ),
        *(
            ({"args": (flag, *value, "x.py")}, f"the flag {flag} in args is reserved for the operator; remove it")
            for flag, *value in (
                ("--rdzv-id", "mine"),
                ("--rdzv_backend", "etcd-v2"),
                ("--standalone",),
                ("--node-name", "me"),
                ("--termination_log", "/log"),
            )
        ),
        (
            {"args": ("x.py",), "template": container_template(args=["y.py"])},
            "spec.args and args of the container `worker` in spec.template are both set; set only one of them",
        ),
        (
            {"image": "a", "template": container_template(image="b")},
            "spec.image and image of the container `worker` in spec.template are both set; set only one of them",
        ),
        *(
            (
                {"grace_period": grace, "template": pod_template(terminationGracePeriodSeconds=period)},
                (
                    f"spec.template.spec.terminationGracePeriodSeconds is {period}, which is too short because "
                    f"spec.gracePeriodSeconds is {grace}; set it to at least {least}, or remove it"
                ),
            )
            for grace, period, least in ((300, 10, 325), (300, 324, 325), (60, 79, 80))
        ),
        ({"unsupported_reason": "it is too old"}, "it is too old"),
        (
            {"args": ("x.py",), "template": container_template()},
            "neither spec.image nor the container `worker` in spec.template sets an image; set one of them",
        ),
        (
            {"template": container_template(image="i")},
            "neither spec.args nor the container `worker` in spec.template sets args; set args in one of them",
        ),
    ],
)
def test_invalid_spec_is_rejected(fields: dict[str, object], message: str) -> None:
    assert problem_of(a_job(**fields).spec) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "command",
    [
        ("torchrun",),
        ("/opt/python3", "-m", "torch.distributed.run", "x.py"),
        ("python", "-um", "torch.distributed.launch", "x.py"),
        ("bash", "-c", "torchrun --nproc_per_node=4 x.py"),
        ("bash", "-c", "NCCL_DEBUG=${DEBUG:-INFO} torchrun x.py"),
        ("/bin/sh", "-e", "-xc", "cd /data && exec python -m torch.distributed.run x.py"),
    ],
)
def test_command_that_starts_a_launcher_is_rejected(command: tuple[str, ...]) -> None:
    for fields in ({"command": command}, {"template": container_template(image="i", command=[*command])}):
        assert str(problem_of(a_job(**fields).spec)).startswith(
            f'the command "{command[0]}" starts a launcher such as torchrun, but each pod runs the launcher itself'
        )
    for args in (command, ("--tee=3", "--no-python", "--", *command), ("-m", "torch.distributed.run", "x.py")):
        assert str(problem_of(a_job(args=args).spec)).startswith("the program in args starts a launcher, but each pod")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            pod_template(restartPolicy="OnFailure"),
            (
                'spec.template.spec.restartPolicy is "OnFailure", but the operator replaces failed pods and does not '
                "restart them; remove the field"
            ),
        ),
        (
            container_template(restartPolicy="Always"),
            (
                'restartPolicy of the container `worker` in spec.template is "Always", but the operator replaces '
                "failed pods and does not restart them; remove the field"
            ),
        ),
        (
            container_template(env={"A": "1"}),
            'env of the container `worker` in spec.template must be a list of name-value pairs, not {"A": "1"}',
        ),
        (
            container_template(args="train.py"),
            'args of the container `worker` in spec.template must be a list of strings, not "train.py"',
        ),
        (
            container_template(command=["sleep", 1]),
            'command of the container `worker` in spec.template must be a list of strings, not ["sleep", 1]',
        ),
    ],
)
def test_invalid_template_is_rejected(given: dict[str, object], message: str) -> None:
    assert problem_of(a_job(image="i", template=given).spec) == message


def test_flags_and_variables_in_addition_to_the_fields_are_valid() -> None:
    longest = {"name": "DATA", "value": "x" * (131_071 - 5)}
    env = ({"name": "PET_LOG_DIR", "value": "/logs"}, {"name": "A", "valueFrom": {"fieldRef": {}}}, longest)

    assert problem_of(a_job(command=("a",), args=("b",), env=env, template=container_template(image="c")).spec) is None
    for args in (
        ("--shutdown-timeout=4", "--rdzv-conf=lease=3", "x.py"),
        ("x.py", "--shutdown-timeout=4", "--standalone", "--max-restarts=3"),
        ("--", "x.py", "--rdzv-id=mine"),
    ):
        assert problem_of(a_job(args=args, grace_period=3).spec) is None
    of_a_command = a_job(command=("a",), args=("--shutdown-timeout=4", "--nnodes=3"), nproc_per_node=2)
    assert problem_of(of_a_command.spec) is None


def test_flags_take_precedence_over_fields(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    flags = ("--nproc_per_node=4", "--shutdown-timeout=90", "--port-range=1024-1040", "--non-retryable-exit-codes=4")
    rules = (exit_rule(FAIL, 3),)
    ports = RendezvousSpec(ports=PortRange(2000, 2015))
    job = a_job(args=(*flags, str(script)), nproc_per_node=2, grace_period=3, rendezvous=ports, failure_rules=rules)
    settings = parsed_by_the_agent(job)

    assert problem_of(msgspec.structs.replace(job.spec, image="i")) is None
    assert (settings.workers, settings.shutdown_timeout, settings.non_retryable_exit_codes) == (4, 90, {4})
    assert settings.rendezvous.ports is not None
    assert settings.rendezvous.ports.first == 1024
    assert termination_settings(job.spec)[0] == 145


def test_variable_references_are_expanded_as_in_a_kubelet() -> None:
    arguments = ("run", "$(A)-$(B)", "$(UNDEFINED)", "$$(A)", "$A")
    entries = [
        {"name": "B", "value": "<$(A)>"},
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "x"},
        {"name": "EMPTY"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {}}},
    ]
    resolved_arguments, variables = expand_references(arguments, {"A": "1"}, entries)

    assert resolved_arguments == ("run", "1-<1>", "$(UNDEFINED)", "$(A)", "$A")
    assert variables == {"A": "1", "B": "<1>", "EARLY": "$(LATE)", "LATE": "x", "EMPTY": ""}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"args": (flag, "x.py")}, f"the flag {flag} in args makes the agent print information and exit instead of")
            for flag in ("--help", "--version", "-h")
        ),
        ({"args": tuple(["x" * 100_000] * 3)}, "the spec is larger than 256 KiB"),
        *(
            ({"checkpoint": CheckpointSpec(volume)}, "which is not a volume source")
            for volume in ({"persistentVolumeClaim": None}, {"name": "x"}, {"hostPath": "/x"})
        ),
    ],
)
def test_spec_that_cannot_run_is_rejected(fields: dict[str, object], message: str) -> None:
    problem = problem_of(a_job(**{"image": "i", "args": ("x.py",), **fields}).spec)  # type: ignore[arg-type]
    assert message in str(problem)
