"""Problems of a manifest, and the checks that the CRD cannot make.

The checks find contradictions within a spec, and problems in the parts of the pod template that the operator reads.
Everything else in a template is checked by the API server when pods are created.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ETCD_TLS_FOLDER
from elastic_operator.api.json_values import get_dict, get_int, shown
from elastic_operator.api.spec import (
    NEVER,
    WORKER,
    current_spec,
    launcher_flags,
    mounted_folders,
    program_is_launcher,
    program_of,
    starts_launcher,
    user_env,
    worker_container,
)
from torchelastic.errors import SettingsError
from torchelastic.protocol.pod import Env
from torchelastic.store.api import parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_operator.api.json_values import Json
    from elastic_operator.api.spec import ElasticJobSpec


Location = tuple[str | int, ...]
"""The path of a value: keys and list indices from the root."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that must be fixed before the manifest can be accepted.

    Attributes:
        location: the path of the value.
        message: what is wrong and what to change, as the words after ``spec.field: ``.
    """

    location: Location
    message: str

    @property
    def path(self) -> str:
        """The location as a string, such as ``spec.args[0]`` or ``metadata.labels[app.kubernetes.io/name]``."""
        path = ""
        for step in self.location:
            is_plain = isinstance(step, str) and _PLAIN_KEY.fullmatch(step)
            path += f"[{step}]" if not is_plain else f".{step}" if path else f"{step}"
        return path

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.location else self.message


def error_list(problems: Sequence[str | Problem]) -> str:
    """Return the first problem as a sentence, and the number of further problems with a line for each."""
    first, *others = [str(problem) for problem in problems]
    if not others:
        return first
    count = "1 more problem" if len(others) == 1 else f"{len(others)} more problems"
    return "\n".join([f"{first}; and {count}:", *(f"  {other}" for other in others)])


_FIELD_OF: Final = {
    "PET_RDZV_ENDPOINT": "spec.etcd",
    "PET_NNODES": "spec.minReplicas and spec.maxReplicas",
    "PET_NPROC_PER_NODE": "spec.nprocPerNode",
    "PET_MAX_RESTARTS": "spec.maxRestarts",
    "PET_METRICS_PORT": "spec.metricsPort",
    Env.METRICS_PORT: "spec.metricsPort",
    Env.CHECKPOINT_DIR: "spec.checkpoint",
}

RESERVED: Final = frozenset(
    [value for name, value in vars(Env).items() if name.isupper()]
    + ["PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MAX_RESTARTS"]
)
"""Environment variables that only the operator may set."""

_UNSUPPORTED: Final = frozenset(
    {"PET_METRICS_PORT", "PET_NODE_NAME", "PET_RDZV_BACKEND", "PET_STANDALONE", "PET_TERMINATION_LOG"}
)
"""Other variables of agents that a job may not set: they would break the operator's assumptions about agents."""

_FLAGS_OF_OPERATOR: Final = {
    name.removeprefix("PET_").lower().replace("_", "-"): name
    for name in (RESERVED | _UNSUPPORTED) - {"PET_NPROC_PER_NODE"}
    if name.startswith("PET_")
}
"""The reserved flags, each with the variable of the same effect. --nproc-per-node is not reserved."""

_CONTAINER: Final = f"the container `{WORKER}` in spec.template"

_INFORMATION_FLAGS: Final = frozenset({"h", "help", "version"})

_LARGEST: Final = 256 << 10
"""Maximum size of a spec in bytes. The status of a job repeats the applied spec, and the operator keeps both for each
job: twenty of the largest jobs take 10 MiB."""

_SHORT: Final = 2048
"""Maximum size of a value that is kept of a larger spec, in bytes."""

_TOO_LARGE: Final = (
    f"the spec is larger than {_LARGEST >> 10} KiB, and the operator keeps it in memory: move long values into a "
    "ConfigMap, or into the image"
)

AGENT_TIME: Final = 25.0
"""Seconds that a pod has in addition to notice and grace, to leave the store and to write final messages."""


def problem_of(spec: ElasticJobSpec) -> str | None:
    """Return what is wrong with a spec, in a sentence; None for a valid spec."""
    return next(_problems(spec, worker_container(spec)), None)


def _problems(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    if spec.unsupported_reason is not None:
        yield spec.unsupported_reason
    if not 1 <= spec.min_replicas <= spec.max_replicas:
        yield "spec.minReplicas must be at least 1 and not larger than spec.maxReplicas"
    if spec.etcd.endpoint is not None:
        try:
            parse_endpoints(spec.etcd.endpoint)
        except SettingsError as error:
            yield f"spec.etcd.endpoint: {error}"
    if spec.etcd.has_certificates and ETCD_TLS_FOLDER in mounted_folders(worker):
        yield f"{_CONTAINER} mounts a volume at {ETCD_TLS_FOLDER}, the folder of its certificates; choose another path"
    yield from _program_problems(spec, worker)
    yield from _variable_problems(spec)
    yield from _template_problems(spec, worker)
    long = (spec.command, spec.args, spec.env, spec.template, spec.checkpoint.volume)
    if sum(len(json.dumps(each, default=str)) for each in long) > _LARGEST:
        yield _TOO_LARGE


def bounded_spec(spec: Json) -> Json:
    """Return a spec as it is; of a spec that is too large, only the short values, with which it is invalid too."""
    if len(json.dumps(spec)) <= _LARGEST:
        return spec
    short = {name: value for name, value in current_spec(spec).items() if len(json.dumps(value)) <= _SHORT}
    return {"minReplicas": 1, "maxReplicas": 1, **short, "unsupportedReason": _TOO_LARGE}


def _program_problems(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    """Yield the problems of the image, the command and its arguments."""
    for name, value in (("image", spec.image), ("command", spec.command), ("args", spec.args)):
        if value and worker.get(name):
            yield f"spec.{name} and {name} of {_CONTAINER} are both set; set only one of them"
    command, args = program_of(spec)
    if command and starts_launcher((*command, *args)):
        yield (
            f"the command {shown(command[0])} starts a launcher such as torchrun, but each pod runs the launcher "
            "itself; remove command, and put the launcher's flags and the program into args"
        )
    if not command and program_is_launcher(args):
        yield (
            "the program in args starts a launcher, but each pod runs the launcher itself; put only the launcher's "
            "flags and the program into args"
        )
    for flag in () if command else launcher_flags(args):
        written = flag.words[0].partition("=")[0]
        if flag.name in _INFORMATION_FLAGS:
            yield (
                f"the flag {written} in args makes the agent print information and exit instead of running the "
                "program; remove it"
            )
        if flag.name in _FLAGS_OF_OPERATOR:
            yield f"the flag {written} in args is reserved for the operator; {_instead(_FLAGS_OF_OPERATOR[flag.name])}"


def _variable_problems(spec: ElasticJobSpec) -> Iterator[str]:
    """Yield the problems of the environment variables."""
    seen: set[str] = set()
    for entry in user_env(spec):
        name = str(entry.get("name"))
        if name in RESERVED or name in _UNSUPPORTED:
            yield f"the environment variable {name} is reserved for the operator; {_instead(name)}"
        if name in seen:
            yield f"the environment variable {name} is set twice; remove one of the entries"
        seen.add(name)


def _instead(variable: str) -> str:
    """Return the alternative to a variable or its flag."""
    return f"use {_FIELD_OF[variable]} instead" if variable in _FIELD_OF else "remove it"


def _template_problems(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    """Yield the problems of the pod template and of the volume for checkpoints."""
    for source, value in (spec.checkpoint.volume or {}).items():
        if not isinstance(value, dict):  # the API server would treat it as an emptyDir
            yield (
                f"spec.checkpoint.volume has {shown(source)} with {shown(value)}, which is not a volume source, "
                "such as persistentVolumeClaim with its claimName"
            )
    checks = (("env", dict, "name-value pairs"), ("command", str, "strings"), ("args", str, "strings"))
    for name, kind, things in checks:
        value = worker.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, kind) for item in value)):
            yield f"{name} of {_CONTAINER} must be a list of {things}, not {shown(value)}"
    pod = get_dict(spec.template, "spec")
    for field, value in (
        ("spec.template.spec.restartPolicy", pod.get("restartPolicy")),
        (f"restartPolicy of {_CONTAINER}", worker.get("restartPolicy")),
    ):
        if value not in (None, NEVER):
            yield (
                f"{field} is {shown(value)}, but the operator replaces failed pods and does not restart them; remove "
                "the field"
            )
    period, grace = get_int(pod, "terminationGracePeriodSeconds"), spec.grace_period
    if (
        period is not None
        and grace is not None
        and period < (least := math.ceil(min(grace * 4 / 3, grace + AGENT_TIME)))
    ):
        yield (
            f"spec.template.spec.terminationGracePeriodSeconds is {period}, which is too short because "
            f"spec.gracePeriodSeconds is {grace}; set it to at least {least}, or remove it"
        )
    # Without a template, the CRD requires an image and a program.
    if spec.template and not (spec.image or worker.get("image")):
        yield f"neither spec.image nor {_CONTAINER} sets an image; set one of them"
    if spec.template and not any(program_of(spec)):
        yield f"neither spec.args nor {_CONTAINER} sets args; set args in one of them"
