"""The command line and environment of a worker pod's agent, on Kubernetes and on this machine.

An agent that is asked to leave gives its workers *notice*, so that they save, and then *grace* between SIGTERM and
SIGKILL. The sum of both is below the pod's termination grace period. If the template does not set that period, it is
the sum of notice, grace and :data:`AROUND`. If it does, a quarter of it (at most :data:`AROUND`) is reserved for the
agent itself; of the rest, grace gets its default but at most half, and notice the remainder. The user's values take
precedence.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ETCD_TLS_FOLDER
from elastic_operator.api.json_values import integer
from elastic_operator.api.legacy import launcher_flags
from elastic_operator.api.spec import FailureAction, program_of, user_env
from elastic_operator.api.validation import AROUND
from torchelastic.protocol import PROTOCOL_VERSION, Env, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_operator.api.spec import AppliedSpec, FailureRule, Json
    from elastic_operator.controller.model import Job, NewPod

LAUNCHER: Final = "torchelastic-run"
"""The agent's executable in an image."""

NOTICE: Final = 30.0
"""The default notice in seconds."""

GRACE: Final = 5.0
"""The default grace in seconds."""

_LONGEST_NOTICE: Final = 24 * 3600.0
"""The agent's own limit."""

_LONGEST: Final = 7 * 24 * 3600.0

_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


def agent_arguments(spec: AppliedSpec) -> tuple[str, ...]:
    """Return the arguments of the agent: flags, the program, and the program's arguments."""
    command, args = program_of(spec)
    return ("--no-python", "--", *command, *args) if command else args


def agent_variables(
    job: Job, pod: NewPod, *, store: str, checkpoints: str, termination_log: str, metrics_port: int
) -> dict[str, str]:
    """Return the operator's variables for a pod's agent, without the address of its node and the user's variables.

    Args:
        job: the owner.
        pod: the pod of the plan.
        store: host:port of the store, several with commas.
        checkpoints: the folder for the program's checkpoints.
        termination_log: the file for the agent's termination message.
        metrics_port: the port of the agent's /metrics; 0 for any free port.
    """
    env = {
        "PET_RDZV_ENDPOINT": store,
        "PET_RDZV_ID": job.uid,
        "PET_NNODES": f"{job.spec.min_replicas}:{job.spec.max_replicas}",
        "PET_NPROC_PER_NODE": str(job.spec.nproc_per_node),
        "PET_MAX_RESTARTS": str(job.spec.max_restarts),
        Env.NODE_NAME: pod.name,
        Env.SIZE: encode(pod.size).decode(),
        Env.JOB: f"{job.namespace}/{job.name}",
        Env.JOB_CREATED: f"{job.created:.3f}",
        Env.UNIQUE_RUN: "1",
        Env.CHECKPOINT_DIR: checkpoints,
        Env.TERMINATION_LOG: termination_log,
        Env.PROTOCOL: str(PROTOCOL_VERSION),
        Env.METRICS_PORT: str(metrics_port),
        **_optional_variables(job.spec),
        **ending_of(job.spec)[1],
    }
    return env if pod.resume is None else {**env, Env.RESUME: encode(pod.resume).decode()}


def _optional_variables(spec: AppliedSpec) -> dict[str, str]:
    """Return the variables for optional settings that the spec gives."""
    rendezvous = spec.rendezvous
    conf = {
        "last_call_timeout": rendezvous.joining_window,
        "join_timeout": rendezvous.join_timeout,
        "lease": rendezvous.lease,
        "tls": None if spec.etcd.tls_secret is None else ETCD_TLS_FOLDER,
    }
    found = {
        "PET_FINAL_EXIT_CODES": _exit_codes(spec.failure_rules, FailureAction.FAIL_JOB),
        "PET_FREE_EXIT_CODES": _exit_codes(spec.failure_rules, FailureAction.IGNORE),
        "PET_PORT_RANGE": "" if rendezvous.ports is None else f"{rendezvous.ports.first}-{rendezvous.ports.last}",
        "PET_RDZV_CONF": ",".join(f"{key}={value}" for key, value in conf.items() if value is not None),
    }
    return {variable: value for variable, value in found.items() if value}


@functools.lru_cache(maxsize=256)
def _exit_codes(rules: tuple[FailureRule, ...], action: FailureAction) -> str:
    """Return the workers' exit codes with this action in the failure policy: 3,64,137."""
    of_workers = [(rule.exit_codes, rule.action) for rule in rules if rule.exit_codes is not None]
    codes = [code for code in range(1, 256) if next((act for of, act in of_workers if code in of), None) is action]
    firsts = [code for code in codes if code - 1 not in codes]
    lasts = [code for code in codes if code + 1 not in codes]
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def ending_of(spec: AppliedSpec) -> tuple[int, dict[str, str]]:
    """Return how the pods of a job end: the seconds from SIGTERM to SIGKILL of a pod, and variables for its agent."""
    told: dict[str, str] = {}
    notice, grace = _given_time(spec, "notice"), _given_time(spec, "stop-grace")
    if grace is None and spec.grace_period is not None:
        grace, told["PET_STOP_GRACE"] = float(spec.grace_period), f"{spec.grace_period}"
    period = integer(spec.template, "spec", "terminationGracePeriodSeconds")
    if period is None or period < 0:
        # Not below the agent's defaults: a flag of the same name may belong to the program.
        return math.ceil(max(notice or 0.0, NOTICE) + max(grace or 0.0, GRACE) + AROUND), told
    left = period - min(AROUND, period / 4)
    if grace is None:
        grace = min(GRACE, left / 2 if notice is None else max(left - notice, 0.0))
        told["PET_STOP_GRACE"] = f"{grace:g}"
    if notice is None:
        told["PET_NOTICE"] = f"{min(max(left - grace, 0.0), _LONGEST_NOTICE):g}"
    return period, told


def _given_time(spec: AppliedSpec, flag: str) -> float | None:
    """Return the seconds from a flag in the arguments, or else from its variable; None without a valid value."""
    command, args = program_of(spec)
    variable = "PET_" + flag.upper().replace("-", "_")
    given = [entry.get("value") for entry in user_env(spec) if entry.get("name") == variable]
    given += [each.value for each in (() if command else launcher_flags(args)) if each.name == flag]
    try:
        seconds = float(str(given[-1])) if given else -1.0
    except ValueError:
        return None
    return min(seconds, _LONGEST) if 0 <= seconds < math.inf else None


def resolved(
    arguments: Iterable[str], variables: Mapping[str, str], entries: Iterable[Json]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments and all literal variables with their references resolved, as by a kubelet.

    ``$(NAME)`` stands for a variable that was defined before, ``$$`` for a dollar sign; unknown references stay as they
    are. Entries with ``valueFrom`` are left out, because only a cluster can resolve them.

    Args:
        arguments: the arguments of the agent.
        variables: the operator's variables.
        entries: the user's variables.
    """
    env = dict(variables)
    for entry in entries:
        if "valueFrom" not in entry:
            env[str(entry.get("name"))] = _expand(str(entry.get("value") or ""), env)
    return tuple(_expand(argument, env) for argument in arguments), env


def _expand(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
