"""Problems of a manifest, and the checks that the CRD cannot make.

The checks find contradictions within a spec, and problems in the parts of the pod template that the operator reads.
Everything else in a template is checked by the API server when pods are created.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import CHECKPOINT_FOLDER, ETCD_TLS_FOLDER, METRICS_PORT, OWN_PREFIX
from elastic_operator.api.json_values import at, integer, listing, mapping, mappings, shown
from elastic_operator.api.legacy import WORKER, launcher_flags, program_is_launcher, starts_launcher
from elastic_operator.api.spec import NEVER, FailureAction, mounted_folders, program_of, user_env, worker_container
from torchelastic.errors import SettingsError
from torchelastic.protocol import Env
from torchelastic.store.endpoints import parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from elastic_operator.api.spec import ElasticJobSpec, FailureRule, Json


Location = tuple[str | int, ...]
"""The path of a value: keys and list indices from the root."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that has to be changed before the manifest can be accepted.

    Attributes:
        location: the path of the value.
        message: what is wrong with it and what to change; follows ``spec.field: ``.
    """

    location: Location
    message: str

    @property
    def path(self) -> str:
        """The location as text: ``spec.args[0]``, ``metadata.labels[app.kubernetes.io/name]``."""
        return dotted(self.location)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.location else self.message


def dotted(location: Location) -> str:
    """A location as text."""
    path = ""
    for step in location:
        if isinstance(step, int) or not _PLAIN_KEY.fullmatch(step):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def in_words(problems: Sequence[str | Problem]) -> str:
    """The first problem as a sentence; if there are more, their number and a line for each."""
    first, *others = [str(problem) for problem in problems]
    if not others:
        return first
    count = "1 more problem" if len(others) == 1 else f"{len(others)} more problems"
    return "\n".join([f"{first}; and {count}:", *(f"  {other}" for other in others)])


class Pet:
    """Environment variables of torchrun that the operator sets, each from a field of the spec or the job."""

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
        Env.PROTOCOL,
    }
)
"""Variables that only the operator sets."""

_NOBODYS: Final = frozenset(
    {"PET_METRICS_PORT", "PET_NODE_NAME", "PET_RDZV_BACKEND", "PET_STANDALONE", "PET_TERMINATION_LOG"}
)
"""Variables that agents read and that would break what the operator expects of them."""

_FLAGS_OF_OPERATOR: Final = {
    name.removeprefix("PET_").lower().replace("_", "-"): name
    for name in (RESERVED | _NOBODYS) - {Pet.NPROC_PER_NODE}
    if name.startswith("PET_")
}
"""Flags with the same effect, with their variables; --nproc-per-node is the user's to set."""

_INSTEAD_OF_TRAINING: Final = frozenset({"h", "help", "version"})

_ONE_WORKER: Final = 1
"""The default of spec.nprocPerNode."""

_ALL_CODES: Final = range(1, 256)
"""Exit codes of failed programs; 128 + n stands for the signal n."""

_LONGEST: Final = 131_071
"""Bytes that Linux allows for one argument, or for one variable with its name."""

_TOO_LONG: Final = f"each may have {_LONGEST} bytes, its name included: put it into a file"

_LARGEST: Final = 512 << 10
"""Bytes of a spec. etcd allows 1.5 MiB in one request, which holds the spec and the applied spec."""

_NUL: Final = "\0"

_EACH_ITS_OWN: Final = {
    "name": "each pod has a name of its own",
    "generateName": "each pod has a name of its own",
    "namespace": "pods live in the namespace of their job",
    "ownerReferences": "pods belong to their job alone",
    "finalizers": "pods go with their job",
}

AROUND: Final = 25.0
"""Seconds that a pod has beyond notice and grace: for leaving the store and for final messages."""


def problem_of(spec: ElasticJobSpec) -> str | None:
    """What is wrong with a spec, in a sentence; None for nothing."""
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
    """Values that Linux or an API server does not accept."""
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
    """The approximate size of the spec in bytes."""
    long = (spec.command, spec.args, spec.env, spec.template, spec.checkpoint.volume)
    return sum(len(part) for each in long for part in json.JSONEncoder(default=str).iterencode(each))


def _is_too_long(text: str) -> bool:
    """Whether an argument, or a variable with its name, exceeds the limit."""
    return len(text) > _LONGEST // 4 and len(text.encode(errors="replace")) > _LONGEST


def _said_twice(spec: ElasticJobSpec, variables: Collection[str]) -> Iterator[str]:
    """Settings that are given in the spec and again in a variable or a flag."""
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
    """What to do instead of setting a variable or its flag."""
    return f"use {_FIELD_OF[variable]} instead" if variable in _FIELD_OF else "remove it"


def _given_fields(spec: ElasticJobSpec) -> dict[str, str]:
    """Variables that the operator sets for this job only, with their fields."""
    fields = {
        Pet.FINAL_EXIT_CODES: "spec.failurePolicy",
        Pet.FREE_EXIT_CODES: "spec.failurePolicy",
        Pet.PORT_RANGE: "spec.rendezvous.ports",
        Pet.RDZV_CONF: "spec.etcd.tlsSecret" if spec.etcd.tls_secret is not None else "spec.rendezvous",
    }
    given = {variable: fields[variable] for variable in optional_variables(spec)}
    if any(rule.exit_codes is not None for rule in spec.failure_rules):
        given |= {variable: fields[variable] for variable in (Pet.FINAL_EXIT_CODES, Pet.FREE_EXIT_CODES)}
    if spec.grace_period is not None:
        given[Pet.STOP_GRACE] = "spec.gracePeriodSeconds"
    if spec.nproc_per_node != _ONE_WORKER:
        given[Pet.NPROC_PER_NODE] = _FIELD_OF[Pet.NPROC_PER_NODE]
    return given


def optional_variables(spec: ElasticJobSpec) -> dict[str, str]:
    """Variables for optional settings that the spec gives."""
    rendezvous = spec.rendezvous
    conf = {
        "last_call_timeout": rendezvous.joining_window,
        "join_timeout": rendezvous.join_timeout,
        "lease": rendezvous.lease,
        "tls": None if spec.etcd.tls_secret is None else ETCD_TLS_FOLDER,
    }
    final, free = (_exit_codes(spec.failure_rules, action) for action in (FailureAction.FAIL_JOB, FailureAction.IGNORE))
    found = {
        Pet.FINAL_EXIT_CODES: final,
        Pet.FREE_EXIT_CODES: free,
        Pet.PORT_RANGE: "" if rendezvous.ports is None else f"{rendezvous.ports.first}-{rendezvous.ports.last}",
        Pet.RDZV_CONF: ",".join(f"{key}={value}" for key, value in conf.items() if value is not None),
    }
    return {variable: value for variable, value in found.items() if value}


@functools.lru_cache(maxsize=256)
def _exit_codes(rules: tuple[FailureRule, ...], action: FailureAction) -> str:
    """The workers' exit codes with this action in the failure policy, as ranges: 3,64-70,137."""
    of_workers = [(rule.exit_codes, rule.action) for rule in rules if rule.exit_codes is not None]
    codes = {code for code in _ALL_CODES if next((does for of, does in of_workers if code in of), None) is action}
    firsts = sorted(code for code in codes if code - 1 not in codes)
    lasts = sorted(code for code in codes if code + 1 not in codes)
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def template_problem(spec: ElasticJobSpec) -> str | None:
    """What is wrong with the pod template, in a sentence; None for nothing."""
    for source, said in (spec.checkpoint.volume or {}).items():
        if source == "name" or not isinstance(said, dict):
            return (
                f"spec.checkpoint.volume has {shown(source)} with {shown(said)}, which is no source of a volume, such "
                "as persistentVolumeClaim with its claimName"
            )
    if not spec.template:
        return None
    return next(_problems(spec, worker_container(spec)), None)


def _problems(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    yield from _shapes(spec, worker)
    yield from _of_metadata(mapping(spec.template, "metadata"))
    pod = mapping(spec.template, "spec")
    yield from _of_restarts(pod, worker)
    if pod.get("hostname") is not None:
        yield "hostname of the template is given, but each pod has one of its own, <job>-<index>; remove it"
    period = integer(pod, "terminationGracePeriodSeconds")
    if period is not None and spec.grace_period is not None and period < (least := least_period(spec.grace_period)):
        yield (
            f"spec.gracePeriodSeconds is {spec.grace_period}, but terminationGracePeriodSeconds of the template gives "
            f"the whole pod {period}; remove that, or make it {least} or more"
        )
    if any(port.get("name") == METRICS_PORT for port in mappings(worker, "ports")):
        yield (
            f"the template's container {WORKER} has a port named {METRICS_PORT}, which is the agent's own; give it "
            "another name"
        )
    for field, given, folder in (
        ("spec.checkpoint.volume", spec.checkpoint.volume, CHECKPOINT_FOLDER),
        ("spec.etcd.tlsSecret", spec.etcd.tls_secret, ETCD_TLS_FOLDER),
    ):
        if given and folder in mounted_folders(worker):
            yield (
                f"{field} and a mount of the template's container {WORKER} at {folder} are both given; "
                "remove one of the two"
            )
    for field, said, name in (
        ("spec.schedulingPolicy.schedulerName", spec.scheduling.scheduler_name, "schedulerName"),
        ("spec.schedulingPolicy.gang, whose scheduler it is,", spec.scheduling.gang, "schedulerName"),
        ("spec.schedulingPolicy.priorityClassName", spec.scheduling.priority_class, "priorityClassName"),
    ):
        if said and pod.get(name):
            yield f"{field} and {name} of the template are both given; remove one of the two"
    if not (spec.image or worker.get("image")):
        yield f"neither spec.image nor the template's container {WORKER} names an image; give one of the two"
    if not (spec.command or spec.args or worker.get("command") or worker.get("args")):
        yield f"neither spec.args nor the template's container {WORKER} names a program; give args in one of the two"


def _of_restarts(pod: Json, worker: Json) -> Iterator[str]:
    for where, restarts in (("template", pod), (f"template's container {WORKER}", worker)):
        if restarts.get("restartPolicy") not in (None, NEVER):
            yield (
                f"restartPolicy of the {where} is {shown(restarts['restartPolicy'])}, but pods are replaced and never "
                "restarted; remove it"
            )
    if worker.get("restartPolicyRules"):
        yield (
            f"restartPolicyRules of the template's container {WORKER} are given, but pods are replaced and never "
            "restarted; remove them"
        )


def _shapes(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    """Values of unexpected types in what the operator reads."""
    containers = at(spec.template, "spec", "containers")
    if not _is_list_of(containers, dict):
        yield f"containers of the template's spec must be a list of containers, and not {shown(containers)}"
    if not _is_list_of(worker.get("env"), dict):
        yield (
            f"env of the template's container {WORKER} must be a list of names with values, and not "
            f"{shown(worker['env'])}"
        )
    for name in ("command", "args"):
        value = worker.get(name)
        if not _is_list_of(value, object):
            yield f"{name} of the template's container {WORKER} must be a list of texts, and not {shown(value)}"
        for position, item in enumerate(listing(value)):
            if not isinstance(item, str):
                yield (
                    f"{name}[{position}] of the template's container {WORKER} is {shown(item)} and not a text; put it "
                    "in quotes"
                )


def _of_metadata(metadata: Json) -> Iterator[str]:
    for field, why in _EACH_ITS_OWN.items():
        if metadata.get(field):
            yield f"metadata.{field} of the template is given, but {why}; remove it"
    for kind in ("labels", "annotations"):
        for key in mapping(metadata, kind):
            if str(key).startswith(OWN_PREFIX):
                yield f"{kind} of the template name {key}, which only the operator sets; remove it"


def _is_list_of(value: object, kind: type) -> bool:
    """Whether it is a list of this kind; None counts as one."""
    return value is None or (isinstance(value, list) and all(isinstance(item, kind) for item in value))


def least_period(grace: int) -> int:
    """The shortest period of a pod, in seconds, in which its workers have this grace."""
    return math.ceil(min(grace * 4 / 3, grace + AROUND))
