"""What a worker pod is started with, on Kubernetes as on this machine: the agent's command line and environment.

What runs is always the agent, ``torchelastic-run``. The program is named by ``spec.command`` and ``spec.args``, or by
the container ``worker`` of the template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.pod_ending import PodEnding, pod_ending
from elastic_operator.template import WORKER, template_problem, worker_container
from elastic_operator.unchecked import integer, listing, mappings
from torchelastic.contract import CONTRACT_VERSION, Env, encode
from torchelastic.endpoints import parse_endpoints
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_operator.model import Job, NewPod
    from elastic_operator.spec import ElasticJobSpec, Json

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


_FIELD_OF: Final = {
    Pet.RDZV_ENDPOINT: "spec.etcd",
    Pet.NNODES: "spec.minReplicas and spec.maxReplicas",
    Pet.NPROC_PER_NODE: "spec.nprocPerNode",
    Pet.MAX_RESTARTS: "spec.maxRestarts",
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
        Env.UNIQUE_RUN,
        Env.CHECKPOINT_DIR,
        Env.TERMINATION_LOG,
        Env.METRICS_PORT,
        Env.CONTRACT,
    }
)
"""Variables that only the operator sets. To set one of them a second time would be to say two things at once."""

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
        Env.UNIQUE_RUN: "1",
        Env.CHECKPOINT_DIR: surroundings.checkpoints,
        Env.TERMINATION_LOG: surroundings.termination_log,
        Env.CONTRACT: str(CONTRACT_VERSION),
        **ending_of(job.spec).env,
    }
    if surroundings.address is not None:
        env[Env.NODE_ADDRESS] = surroundings.address
    if surroundings.metrics_port is not None:
        env[Env.METRICS_PORT] = str(surroundings.metrics_port)
    return AgentCommand(argv, env)


def ending_of(spec: ElasticJobSpec) -> PodEnding:
    """How the pods of a job end."""
    command, args = program_of(spec)
    period = integer(spec.template, "spec", "terminationGracePeriodSeconds")
    return pod_ending(period=period, env=user_env(spec), flags=() if command else args)


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
    seen: set[str] = set()
    for entry in user_env(spec):
        name = str(entry.get("name"))
        if name in RESERVED:
            instead = f"use {_FIELD_OF[name]} instead" if name in _FIELD_OF else "remove it"
            return f"the environment variable {name} is set by the operator; {instead}"
        if name in seen:
            return f"the environment variable {name} is given twice; remove one of the two"
        seen.add(name)
    return template_problem(spec)


def _expand(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
