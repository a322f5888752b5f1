"""The command line and environment of a worker pod's agent, on Kubernetes and on this machine.

An agent that is asked to leave gives its workers *notice*, so that they save, and then *grace* between SIGTERM and
SIGKILL. Both together stay below the pod's termination grace period. If the template does not set that period, it is
notice and grace and :data:`AROUND`. If it does, a quarter of it (at most :data:`AROUND`) is kept for the agent itself;
of the rest, grace gets its default but at most half, and notice the remainder. What the user sets takes precedence.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.api.json_values import integer
from elastic_operator.api.spec import program_of, user_env
from elastic_operator.api.validation import AROUND, Pet, optional_variables
from torchelastic.protocol import PROTOCOL_VERSION, Env, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_operator.api.spec import AppliedSpec, Json
    from elastic_operator.controller.model import Job, NewPod

LAUNCHER: Final = ("torchelastic-run",)
"""The agent's executable in an image."""

NOTICE: Final = 30.0
"""Seconds of notice by default."""

GRACE: Final = 5.0
"""Seconds of grace by default."""

_LONGEST_NOTICE: Final = 24 * 3600.0
"""The agent's own limit."""

_LONGEST: Final = 7 * 24 * 3600.0

_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The environment in which a pod runs.

    Attributes:
        store: host:port of the store, several with commas.
        checkpoints: the folder for the program's checkpoints.
        termination_log: the file for the agent's termination message.
        address: under which its peers reach it; None if it is known only once the pod runs.
        metrics_port: of the agent's /metrics, 0 for any free one; None for no /metrics.
        launcher: the agent's executable, and words before its flags.
    """

    store: str
    checkpoints: str
    termination_log: str
    address: str | None = None
    metrics_port: int | None = None
    launcher: tuple[str, ...] = LAUNCHER


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """The command line of an agent, and the variables that it gets in addition to its environment.

    Attributes:
        argv: the command line.
        env: the variables.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodEnding:
    """How a pod ends.

    Attributes:
        period: seconds from SIGTERM to SIGKILL of the whole pod.
        env: variables for its agent.
    """

    period: int
    env: Mapping[str, str] = field(default_factory=dict)


def agent_command(job: Job, pod: NewPod, surroundings: Surroundings) -> AgentCommand:
    """The command and the operator's variables for a pod; the user's variables are added to them.

    References such as ``$(NAME)`` are resolved by the kubelet on Kubernetes, and by :func:`resolved` elsewhere.
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
        Env.PROTOCOL: str(PROTOCOL_VERSION),
        **optional_variables(job.spec),
        **ending_of(job.spec).env,
    }
    if pod.resume is not None:
        env[Env.RESUME] = encode(pod.resume).decode()
    if surroundings.address is not None:
        env[Env.NODE_ADDRESS] = surroundings.address
    if surroundings.metrics_port is not None:
        env[Env.METRICS_PORT] = str(surroundings.metrics_port)
    return AgentCommand(argv, env)


def ending_of(spec: AppliedSpec) -> PodEnding:
    """How the pods of a job end."""
    command, args = program_of(spec)
    flags = () if command else args
    entries = tuple(user_env(spec))
    period = integer(spec.template, "spec", "terminationGracePeriodSeconds")
    grace = spec.grace_period
    notice = _said("notice", NOTICE, entries, flags)
    told = {} if grace is None else {_variable("stop-grace"): f"{grace}"}
    said = _said("stop-grace", GRACE, entries, flags) if grace is None else float(grace)
    if period is None or period < 0:
        # Not below the agent's defaults: a flag of the same name may belong to the program.
        return PodEnding(math.ceil(max(notice or 0.0, NOTICE) + max(said or 0.0, GRACE) + AROUND), told)
    left = period - min(AROUND, period / 4)
    if said is None:
        said = min(GRACE, left / 2 if notice is None else max(left - notice, 0.0))
        told[_variable("stop-grace")] = f"{said:g}"
    if notice is None:
        told[_variable("notice")] = f"{min(max(left - said, 0.0), _LONGEST_NOTICE):g}"
    return PodEnding(period, told)


def resolved(command: AgentCommand, entries: Iterable[Json]) -> AgentCommand:
    """The command with the user's literal variables and all references resolved, as by a kubelet.

    ``$(NAME)`` stands for a variable that was defined before, ``$$`` for a dollar sign; unknown references stay as they
    are. Entries with ``valueFrom`` are left out, as only a cluster can resolve them.

    Args:
        command: the operator's part.
        entries: the user's variables.
    """
    env = dict(command.env)
    for entry in entries:
        if "valueFrom" not in entry:
            env[str(entry.get("name"))] = _expand(str(entry.get("value") or ""), env)
    return AgentCommand(tuple(_expand(argument, env) for argument in command.argv), env)


def _expand(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _said(flag: str, own: float, env: Iterable[Json], flags: Sequence[str]) -> float | None:
    """The longest time that the user may have set; None if it is not set.

    Args:
        flag: of the agent.
        own: the agent's default, used for a value that only the cluster knows.
        env: the user's variables.
        flags: the arguments that may contain flags of the agent.
    """
    said = [
        f"{own}" if "valueFrom" in entry else str(entry.get("value"))
        for entry in env
        if entry.get("name") == _variable(flag)
    ]
    pattern = re.compile(rf"--?{flag.replace('-', '[-_]')}(?:=(?P<value>.*))?")
    for word, following in itertools.pairwise((*flags, "")):
        if (match := pattern.fullmatch(word)) is not None:
            said.append(following if match["value"] is None else match["value"])
    return max((seconds for text in said if (seconds := _seconds(text)) is not None), default=None)


def _seconds(text: str) -> float | None:
    """The seconds in a text; None for an invalid value, which the agent will reject."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return min(max(seconds, 0.0), _LONGEST) if math.isfinite(seconds) else None


def _variable(flag: str) -> str:
    return "PET_" + flag.upper().replace("-", "_")
