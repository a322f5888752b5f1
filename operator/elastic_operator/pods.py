"""What a worker pod is started with, on Kubernetes as on this machine: the agent's command line and environment.

What runs is always the agent, ``torchelastic-run``. The program is named by ``spec.command`` and ``spec.args``, or by
the container ``worker`` of the template.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.launcher_words import launcher_flags, program_is_launcher, starts_launcher
from elastic_operator.names import ETCD_TLS_FOLDER
from elastic_operator.pod_ending import PodEnding, pod_ending
from elastic_operator.problem import shown
from elastic_operator.spec import FailureAction
from elastic_operator.template import WORKER, template_problem, worker_container
from elastic_operator.unchecked import integer, listing, mappings
from torchelastic.contract import CONTRACT_VERSION, Env, encode
from torchelastic.endpoints import parse_endpoints
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from elastic_operator.model import Job, NewPod
    from elastic_operator.spec import ElasticJobSpec, FailureRule, Json

__all__ = [
    "LAUNCHER",
    "RESERVED",
    "WORKER",
    "AgentCommand",
    "Pet",
    "Surroundings",
    "agent_command",
    "ending_of",
    "problem_of",
    "program_of",
    "resolved",
    "user_env",
    "worker_container",
]

LAUNCHER: Final = ("torchelastic-run",)
"""The agent, as it is called in an image."""


class Pet:
    """torchrun's own variables, as far as the operator sets them; each stands for a field of the spec or of the job."""

    RDZV_ENDPOINT: Final = "PET_RDZV_ENDPOINT"
    RDZV_ID: Final = "PET_RDZV_ID"
    NNODES: Final = "PET_NNODES"
    NPROC_PER_NODE: Final = "PET_NPROC_PER_NODE"
    MAX_RESTARTS: Final = "PET_MAX_RESTARTS"
    FINAL_EXIT_CODES: Final = "PET_FINAL_EXIT_CODES"
    FREE_EXIT_CODES: Final = "PET_FREE_EXIT_CODES"
    RDZV_CONF: Final = "PET_RDZV_CONF"
    PORT_RANGE: Final = "PET_PORT_RANGE"
    STOP_GRACE: Final = "PET_STOP_GRACE"


_FIELD_OF: Final = {
    Pet.RDZV_ENDPOINT: "spec.etcd",
    Pet.NNODES: "spec.minReplicas and spec.maxReplicas",
    Pet.NPROC_PER_NODE: "spec.nprocPerNode",
    Pet.MAX_RESTARTS: "spec.maxRestarts",
    "PET_METRICS_PORT": "spec.metricsPort",
    Env.METRICS_PORT: "spec.metricsPort",
    Env.CHECKPOINT_DIR: "spec.checkpoint",
}

RESERVED: Final = frozenset(
    {
        Pet.RDZV_ENDPOINT,
        Pet.RDZV_ID,
        Pet.NNODES,
        Pet.NPROC_PER_NODE,
        Pet.MAX_RESTARTS,
        Env.NODE_NAME,
        Env.NODE_ADDRESS,
        Env.SIZE,
        Env.RESUME,
        Env.JOB,
        Env.JOB_CREATED,
        Env.UNIQUE_RUN,
        Env.CHECKPOINT_DIR,
        Env.TERMINATION_LOG,
        Env.METRICS_PORT,
        Env.CONTRACT,
    }
)
"""Variables that only the operator sets. To set one of them a second time would be to say two things at once."""

_NOBODYS: Final = frozenset(
    {"PET_METRICS_PORT", "PET_NODE_NAME", "PET_RDZV_BACKEND", "PET_STANDALONE", "PET_TERMINATION_LOG"}
)
"""Variables that agents heed and that would have them do other than what the operator tells and expects of them."""

_FLAGS_OF_OPERATOR: Final = {
    name.removeprefix("PET_").lower().replace("_", "-"): name
    for name in (RESERVED | _NOBODYS) - {Pet.NPROC_PER_NODE}
    if name.startswith("PET_")
}
"""Flags that say the same, with their variables. How many workers there are in a pod may be said in a flag instead."""

_INSTEAD_OF_TRAINING: Final = frozenset({"h", "help", "version"})

_ONE_WORKER: Final = 1
"""What stands in spec.nprocPerNode where nobody says anything."""

_ALL_CODES: Final = range(1, 256)
"""The exit codes of a program that failed; 128 + n for one that signal n has killed."""

_LONGEST: Final = 131_071
"""Bytes that Linux takes of one argument, or of one variable with its name and the equals sign."""
_TOO_LONG: Final = f"each may have {_LONGEST} bytes, its name included: put it into a file"

_LARGEST: Final = 512 << 10
"""Bytes of a spec. etcd takes 1.5 MiB in one request, which has the spec and what is pinned of it."""
_NUL: Final = "\0"

_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a pod finds where it runs.

    Attributes:
        store: host:port of the store, several with commas.
        checkpoints: the folder in which its program keeps its checkpoints.
        termination_log: the file that gets the agent's last words.
        address: under which its peers reach it; None where it is known only once the pod runs.
        metrics_port: of the agent's /metrics, 0 for any free one; None for no /metrics.
        launcher: the agent's executable, and what stands before its flags.
    """

    store: str
    checkpoints: str
    termination_log: str
    address: str | None = None
    metrics_port: int | None = None
    launcher: tuple[str, ...] = LAUNCHER


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """An agent's start.

    Attributes:
        argv: its command line.
        env: what its environment has beyond that of the place where it runs.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def agent_command(job: Job, pod: NewPod, surroundings: Surroundings) -> AgentCommand:
    """What the pod is started with, as far as the operator gives it.

    The user's own variables (:func:`user_env`) come on top; none of them is also one of these. References such as
    ``$(NAME)`` are left as they stand: on Kubernetes the kubelet resolves them, elsewhere :func:`resolved` does.
    """
    command, args = program_of(job.spec)
    argv = (
        (*surroundings.launcher, "--no-python", "--", *command, *args) if command else (*surroundings.launcher, *args)
    )
    env = {
        Pet.RDZV_ENDPOINT: surroundings.store,
        Pet.RDZV_ID: job.uid,
        Pet.NNODES: f"{job.spec.min_replicas}:{job.spec.max_replicas}",
        Pet.NPROC_PER_NODE: str(job.spec.nproc_per_node),
        Pet.MAX_RESTARTS: str(job.spec.max_restarts),
        Env.NODE_NAME: pod.name,
        Env.SIZE: encode(pod.size).decode(),
        Env.JOB: f"{job.namespace}/{job.name}",
        Env.JOB_CREATED: f"{job.created:.3f}",
        Env.UNIQUE_RUN: "1",
        Env.CHECKPOINT_DIR: surroundings.checkpoints,
        Env.TERMINATION_LOG: surroundings.termination_log,
        Env.CONTRACT: str(CONTRACT_VERSION),
        **_asked_for(job.spec),
        **ending_of(job.spec).env,
    }
    if pod.resume is not None:
        env[Env.RESUME] = encode(pod.resume).decode()
    if surroundings.address is not None:
        env[Env.NODE_ADDRESS] = surroundings.address
    if surroundings.metrics_port is not None:
        env[Env.METRICS_PORT] = str(surroundings.metrics_port)
    return AgentCommand(argv, env)


def ending_of(spec: ElasticJobSpec) -> PodEnding:
    """How the pods of a job end."""
    command, args = program_of(spec)
    period = integer(spec.template, "spec", "terminationGracePeriodSeconds")
    return pod_ending(period=period, grace=spec.grace_period, env=user_env(spec), flags=() if command else args)


def program_of(spec: ElasticJobSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command and the arguments, from the spec or from the template's container ``worker``."""
    container = worker_container(spec)
    return (
        spec.command or tuple(str(item) for item in listing(container, "command")),
        spec.args or tuple(str(item) for item in listing(container, "args")),
    )


def user_env(spec: ElasticJobSpec) -> tuple[Json, ...]:
    """The user's environment variables, each as in a container's spec: the template's, then the spec's."""
    return (*mappings(worker_container(spec), "env"), *spec.env)


def resolved(command: AgentCommand, entries: Iterable[Json]) -> AgentCommand:
    """The command with the user's literal variables on top and all references resolved, as a kubelet would do it.

    ``$(NAME)`` stands for the value of a variable that was named before, ``$$`` for a dollar sign; what refers to
    nothing stays as it is. Entries with ``valueFrom`` are left out: only a cluster has what they refer to.

    Args:
        command: what the operator gives.
        entries: the user's variables, see :func:`user_env`.
    """
    env = dict(command.env)
    for entry in entries:
        if "valueFrom" not in entry:
            env[str(entry.get("name"))] = _expand(str(entry.get("value") or ""), env)
    return AgentCommand(tuple(_expand(argument, env) for argument in command.argv), env)


def problem_of(spec: ElasticJobSpec) -> str | None:
    """What a spec says twice, or its template must not say, in a sentence; None where there is nothing."""
    if spec.objection is not None:
        return spec.objection
    if not 1 <= spec.min_replicas <= spec.max_replicas:
        return "spec.minReplicas must be at least 1 and not larger than spec.maxReplicas"
    if spec.etcd.endpoint is not None:
        try:
            parse_endpoints(spec.etcd.endpoint)
        except SettingsError as error:
            return f"spec.etcd.endpoint: {error}"
    container = worker_container(spec)
    for name, value in (("image", spec.image), ("command", spec.command), ("args", spec.args)):
        if value and container.get(name):
            return f"spec.{name} and {name} of the template's container {WORKER} are both given; remove one of the two"
    command, args = program_of(spec)
    if command and starts_launcher((*command, *args)):
        return (
            f"the command {shown(command[0])} starts a launcher such as torchrun, but each pod is the launcher itself, "
            "and the command is what each worker is; remove it, and give the launcher's flags and the program in args"
        )
    if not command and program_is_launcher(args):
        return (
            "the program in args starts a launcher, but each pod is the launcher itself; name the program alone, and "
            "before it the launcher's flags"
        )
    seen: set[str] = set()
    for entry in user_env(spec):
        name = str(entry.get("name"))
        if name in RESERVED or name in _NOBODYS:
            return f"the environment variable {name} is the operator's to set; {_instead(name)}"
        if name in seen:
            return f"the environment variable {name} is given twice; remove one of the two"
        seen.add(name)
    return next(_said_twice(spec, seen), None) or next(_unstartable(spec), None) or template_problem(spec)


def _unstartable(spec: ElasticJobSpec) -> Iterator[str]:
    """What Linux, or an API server, refuses to take."""
    for entry in user_env(spec):
        name = entry.get("name")
        if not isinstance(name, str) or not name or "=" in name:
            yield f"{shown(name)} is no name of an environment variable: that is a text without an equals sign"
        elif _NUL in f"{name}{entry.get('value') or ''}":
            yield f"the environment variable {shown(name)} has a NUL in it, which no program can be given"
        elif _is_too_long(f"{name}={entry.get('value') or ''}"):
            yield f"the environment variable {name} is too long to start a program with; {_TOO_LONG}"
    command, args = program_of(spec)
    if any(_NUL in word for word in (*command, *args)):
        yield "one of the arguments has a NUL in it, which no program can be given"
    if any(map(_is_too_long, (*command, *args))):
        yield f"one of the arguments is too long to start a program with; {_TOO_LONG}"
    if _size(spec) > _LARGEST:
        yield (
            f"the spec has more than {_LARGEST >> 10} KiB, and what the status repeats of it would not fit into the "
            "cluster's etcd: put what is long into a ConfigMap, or into the image"
        )


def _size(spec: ElasticJobSpec) -> int:
    """How many bytes that may be long has the spec, about."""
    long = (spec.command, spec.args, spec.env, spec.template, spec.checkpoint_volume)
    return sum(len(part) for each in long for part in json.JSONEncoder(default=str).iterencode(each))


def _is_too_long(text: str) -> bool:
    """Whether one argument, or variable with its name, has more bytes than it may."""
    return len(text) > _LONGEST // 4 and len(text.encode(errors="replace")) > _LONGEST


def _said_twice(spec: ElasticJobSpec, variables: Collection[str]) -> Iterator[str]:
    """What a field of the spec says, and a variable or a flag too."""
    command, args = program_of(spec)
    flags = {} if command else {flag.name: flag.words[0].partition("=")[0] for flag in launcher_flags(args)}
    for flag, written in flags.items():
        if flag in _INSTEAD_OF_TRAINING:
            yield f"the flag {written} in args has the agent say something and end, as if it had trained; remove it"
        if flag in _FLAGS_OF_OPERATOR:
            yield f"the flag {written} in args is the operator's to set; {_instead(_FLAGS_OF_OPERATOR[flag])}"
    for variable, field_name in _given_fields(spec).items():
        flag = variable.removeprefix("PET_").lower().replace("_", "-")
        if variable in variables:
            yield f"{field_name} and the environment variable {variable} are both given; remove one of the two"
        if flag in flags:
            yield f"{field_name} and {flags[flag]} in args are both given; remove one of the two"


def _instead(variable: str) -> str:
    """What to do where a variable or its flag is not the user's to give."""
    return f"use {_FIELD_OF[variable]} instead" if variable in _FIELD_OF else "remove it"


def _given_fields(spec: ElasticJobSpec) -> dict[str, str]:
    """The variables that the operator sets for this job, and a user may set for another, with their fields."""
    fields = {
        Pet.FINAL_EXIT_CODES: "spec.failurePolicy",
        Pet.FREE_EXIT_CODES: "spec.failurePolicy",
        Pet.PORT_RANGE: "spec.rendezvous.ports",
        Pet.RDZV_CONF: "spec.etcd.tlsSecret" if spec.etcd.tls_secret is not None else "spec.rendezvous",
    }
    given = {variable: fields[variable] for variable in _asked_for(spec)}
    if any(rule.exit_codes is not None for rule in spec.failure_rules):
        given |= {variable: fields[variable] for variable in (Pet.FINAL_EXIT_CODES, Pet.FREE_EXIT_CODES)}
    if spec.grace_period is not None:
        given[Pet.STOP_GRACE] = "spec.gracePeriodSeconds"
    if spec.nproc_per_node != _ONE_WORKER:
        given[Pet.NPROC_PER_NODE] = _FIELD_OF[Pet.NPROC_PER_NODE]
    return given


def _asked_for(spec: ElasticJobSpec) -> dict[str, str]:
    """The variables for what a job may leave to the agents, as far as it does not."""
    rendezvous = spec.rendezvous
    conf = {
        "joining_window": rendezvous.joining_window,
        "join_timeout": rendezvous.join_timeout,
        "lease": rendezvous.lease,
        "tls": None if spec.etcd.tls_secret is None else ETCD_TLS_FOLDER,
    }
    final, free = (_exit_codes(spec.failure_rules, action) for action in (FailureAction.FAIL_JOB, FailureAction.IGNORE))
    found = {
        Pet.FINAL_EXIT_CODES: final,
        Pet.FREE_EXIT_CODES: free,
        Pet.PORT_RANGE: "" if rendezvous.ports is None else "{}-{}".format(*rendezvous.ports),
        Pet.RDZV_CONF: ",".join(f"{key}={value}" for key, value in conf.items() if value is not None),
    }
    return {variable: value for variable, value in found.items() if value}


@functools.lru_cache(maxsize=256)
def _exit_codes(rules: tuple[FailureRule, ...], action: FailureAction) -> str:
    """The exit codes of workers for which the failure policy has this action, as ranges: 3,64-70,137."""
    of_workers = [(rule.exit_codes, rule.action) for rule in rules if rule.exit_codes is not None]
    codes = {code for code in _ALL_CODES if next((does for of, does in of_workers if code in of), None) is action}
    firsts = sorted(code for code in codes if code - 1 not in codes)
    lasts = sorted(code for code in codes if code + 1 not in codes)
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def _expand(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
