"""Reads what was written for other launchers: their command lines, and manifests of the first ElasticJob controller.

The rules for a command line are the same for torchrun and ``torchelastic-run``. The agent checks the flags; the
operator only has to know which ones are given, to find settings that are given twice.

The first controller, of the same group and version, was archived in 2022; its manifests have ``rdzvEndpoint`` and
``replicaSpecs.Worker``. The CRD accepts both forms, but not a mixture. The conversion:

* A pod ran the image's launcher with the controller's flags and the container's ``args``, which begin with more flags
  of the launcher (``--nproc_per_node=1``). The operator sets the launcher and those flags now, so they are removed, and
  so is a ``command`` that is a launcher. Any other command starts a launcher in its own way and is rejected.
* Flags that have a field in today's spec become that field; if the field has another value, the manifest is rejected.
* The container may have any name.
* Names and restart policies inside the template had no effect, and neither does the template's ``kind``.
* ``replicas`` was the number of pods, and the default of each bound. (The default of the lower bound is 1 here.)
* With ``restartPolicy: Never`` the job failed when a pod did; otherwise the pod was replaced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.json_values import integer, listing, mapping, shown, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WORKER: Final = "worker"
"""The name of the job's own container in today's template."""

_FORMER_WORKER: Final = "elasticjob-worker"
"""Its name in the first controller's examples."""

_ARCHIVED: Final = ("rdzvEndpoint", "replicaSpecs", "RunPolicy")
_POLICIES: Final = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
_WITHOUT_EFFECT: Final = ("name", "generateName", "namespace")

_OPERATORS: Final = frozenset(
    {
        "master-addr",
        "master-port",
        "nnodes",
        "node-rank",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "standalone",
        "use-env",
    }
)
"""Flags of the launcher that the operator sets, or that are obsolete."""

_FILLED_IN: Final = {"nprocPerNode": 1, "maxRestarts": 100}
"""The CRD's defaults of these fields."""

_MOST_WORKERS: Final = 4096
_MOST_RESTARTS: Final = 1_000_000


def modern(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """A spec that has passed the CRD's validation in today's form; unchanged if it has that form already."""
    if "replicaSpecs" not in spec:
        return spec
    worker = mapping(spec, "replicaSpecs", "Worker")
    today = {key: value for key, value in spec.items() if key not in _ARCHIVED}
    today |= {key: value for key, value in mapping(spec, "RunPolicy").items() if key in _POLICIES}
    if endpoint := text(spec, "rdzvEndpoint"):
        today["etcd"] = {"endpoint": endpoint}
    if (replicas := integer(worker, "replicas")) is not None:
        today = {"replicas": replicas, "maxReplicas": replicas, **today}
    if text(worker, "restartPolicy") == "Never":
        today = {"backoffLimit": 0, **today}
    template = mapping(worker, "template")
    metadata = {key: value for key, value in mapping(template, "metadata").items() if key not in _WITHOUT_EFFECT}
    pod = {key: value for key, value in mapping(template, "spec").items() if key != "restartPolicy"}
    if (position := _worker_position(pod)) is not None:
        containers = [*listing(pod, "containers")]
        container, lifted = _of_launcher(mapping(containers[position]))
        containers[position] = container
        pod["containers"] = containers
        today |= lifted
    today["template"] = {"metadata": metadata, "spec": pod} if metadata else {"spec": pod}
    return today


def objection(spec: Mapping[str, Any]) -> str | None:
    """What in an archived manifest cannot be honoured, in a sentence; None for nothing."""
    pod = mapping(spec, "replicaSpecs", "Worker", "template", "spec")
    if (position := _worker_position(pod)) is None:
        return None
    container = mapping(listing(pod, "containers")[position])
    where = f"the container {text(container, 'name')} of spec.replicaSpecs.Worker"
    command = _texts(container.get("command"))
    if command and after_launcher(command) is None:
        return (
            f"{where} has the command {shown(list(command))}, which got the launcher's flags from the first "
            "controller; here each pod is the launcher itself: remove the command, and name the program in args"
        )
    for field, value in _of_launcher(container)[1].items():
        if spec.get(field, value) not in (value, _FILLED_IN[field]):
            return f"spec.{field} is {shown(spec[field])}, but a flag of {where} says {value}; remove one of the two"
    return None


def _worker_position(pod: Mapping[str, Any]) -> int | None:
    """The position of the job's own container; None if there is none."""
    containers = listing(pod, "containers")
    if not all(isinstance(container, dict) for container in containers):
        return None
    names = [text(container, "name") for container in containers]
    for name in (WORKER, _FORMER_WORKER):
        if name in names:
            return names.index(name)
    return 0 if names else None


def _of_launcher(container: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The container in today's form, and the fields of the spec that replace its flags."""
    today = {**container, "name": WORKER}
    command, args = _texts(container.get("command")), _texts(container.get("args"))
    if command is None or args is None:  # invalid values, which the validation reports
        return today, {}
    before = after_launcher(command)
    if command and before is None:
        return today, {}
    today.pop("command", None)
    kept, lifted = _without_operators_flags((*(before or ()), *args))
    return today | {"args": kept}, lifted


def _without_operators_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The launcher's arguments without the flags that the operator sets, and the fields that replace other flags."""
    kept: list[str] = []
    lifted: dict[str, Any] = {}
    seen = 0
    for flag in launcher_flags(words):
        seen += len(flag.words)
        if (field := _as_field(flag.name, flag.value)) is not None:
            lifted |= field
        elif flag.name not in _OPERATORS:
            kept += flag.words
    return [*kept, *words[seen:]], lifted


def _as_field(flag: str, value: str) -> dict[str, Any] | None:
    """The field of the spec that replaces a flag; None if there is none."""
    number = int(value) if value.isascii() and value.isdecimal() and len(value) <= len(str(_MOST_RESTARTS)) else None
    if flag == "nproc-per-node":
        if number is not None and 1 <= number <= _MOST_WORKERS:
            return {"nprocPerNode": number}
        return {"nprocPerNode": value} if value in ("auto", "cpu", "gpu") else None
    if flag == "max-restarts" and number is not None and number <= _MOST_RESTARTS:
        return {"maxRestarts": number}
    return None


def _texts(value: object) -> tuple[str, ...] | None:
    """A list of texts as a tuple; None if it is something else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    return tuple(value)


_SWITCHES: Final = frozenset({"m", "module", "no-python", "run-path", "standalone", "use-env"})
"""Flags without a value."""

_OLD_NAMES: Final = {"nnode": "nnodes"}

_LAUNCHERS: Final = frozenset({"torchrun", "torchelastic-run"})
_LAUNCHER_MODULES: Final = frozenset(
    {"torch.distributed.launch", "torch.distributed.run", "torchelastic.distributed.launch", "torchelastic.run"}
)
_MODULE: Final = "|".join(map(re.escape, sorted(_LAUNCHER_MODULES)))
_PYTHON: Final = re.compile(r"python[0-9.]*")
_MODULE_FLAG: Final = re.compile(r"-[bBdEiIOPqsSuvx]*m(.*)")
"""Python's own flags in one word, the last of which is followed by a module."""

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})
_SCRIPT_FLAG: Final = re.compile(r"-[A-Za-z]*c")
"""A shell's flags in one word, the last of which is followed by a script."""
_LAUNCHER_IN_SCRIPT: Final = re.compile(
    r"(?:^|[;&|\n{]|(?<!\$)\()\s*"  # a command in $( ) is run for its output; it does not train
    r"(?:(?:!|do|else|exec|if|nohup|then|time|while)\s+|[A-Za-z_]\w*=\S*\s+)*"
    rf"(?:\S*/)?(?:torchrun|torchelastic-run|python[0-9.]*\s+(?:-\w+\s+)*-m\s*(?:{_MODULE}))(?:\s|;|$)"
)
"""A launcher at the start of a command, approximately: quotes and escapes are not interpreted."""


@dataclass(frozen=True, slots=True)
class LauncherFlag:
    """A flag before the program.

    Attributes:
        name: without leading dashes, and with inner dashes: nproc-per-node, m; the current name of a renamed flag.
        value: its value; empty for a switch, or if it is missing.
        words: the words as given, one or two.
    """

    name: str
    value: str
    words: tuple[str, ...]


def launcher_flags(words: Sequence[str]) -> Iterator[LauncherFlag]:
    """The flags at the beginning of a launcher's arguments; the program, or ``--``, follows them."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        word = words[position]
        long = word.startswith("--")
        written, equals, value = word.partition("=") if long else (word[:2], word[2:], word[2:].removeprefix("="))
        name = written.lstrip("-").replace("_", "-")
        name = _OLD_NAMES.get(name, name)
        taken = words[position : position + 1 if equals or name in _SWITCHES else position + 2]
        if len(taken) > 1:
            value = taken[1]
        yield LauncherFlag(name, value, tuple(taken))
        position += len(taken)


def after_launcher(command: Sequence[str]) -> tuple[str, ...] | None:
    """What follows the launcher in a command that begins with one; None if it does not."""
    name = command[0].rpartition("/")[2] if command else ""
    if name in _LAUNCHERS:
        return tuple(command[1:])
    if not _PYTHON.fullmatch(name):
        return None
    module, after = _module_of(command[1:])
    return after if module in _LAUNCHER_MODULES else None


def starts_launcher(command: Sequence[str]) -> bool:
    """Whether a command is a launcher, or starts one by ``env`` or in the script of a shell."""
    words = list(command)
    if words and words[0].rpartition("/")[2] == "env":
        words.pop(0)
        while words and (words[0].startswith("-") or _ASSIGNMENT.fullmatch(words[0])):
            if words.pop(0) in ("-u", "-C"):
                del words[:1]
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return after_launcher(words) is not None
    for position, word in enumerate(words[1:], 2):
        if _SCRIPT_FLAG.fullmatch(word):
            return any(_LAUNCHER_IN_SCRIPT.search(script) for script in words[position : position + 1])
        if not word.startswith(("-", "+")):
            break
    return False


def program_is_launcher(args: Sequence[str]) -> bool:
    """Whether a launcher with these arguments would start another launcher."""
    flags = list(launcher_flags(args))
    program = list(args[sum(len(flag.words) for flag in flags) :])
    if program[:1] == ["--"]:
        program.pop(0)
    if any(flag.name in ("m", "module") for flag in flags):
        return bool(program) and program[0] in _LAUNCHER_MODULES
    return starts_launcher(program)


def _module_of(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The module that Python runs with these arguments, and what follows it; None if it runs something else."""
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-c":
        flag = left.pop(0)
        if (module := _MODULE_FLAG.fullmatch(flag)) is not None:
            return (module[1] or (left.pop(0) if left else "")), tuple(left)
        if flag in ("-W", "-X"):
            del left[:1]
    return None, ()
