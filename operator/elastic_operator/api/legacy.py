"""Reads input for other launchers: their command lines, and manifests of the first ElasticJob controller.

The rules for a command line are the same for torchrun and ``torchelastic-run``. The agent checks the flags; the
operator only has to know which ones are given, to reject those that only it may set.

The first controller, of the same group and version, was archived in 2022; its manifests have ``rdzvEndpoint`` and
``replicaSpecs.Worker``. The CRD accepts both forms, but not a mixture. The conversion:

* A pod ran the image's launcher with the controller's flags and the container's ``args``, which begin with more flags
  of the launcher (``--nproc_per_node=1``). The operator sets the launcher and those flags now, so they are removed, and
  so is a ``command`` that is a launcher. Any other command starts a launcher in its own way and is rejected.
* Flags that have a field in today's spec become that field.
* The container may have any name.
* Names and restart policies inside the template had no effect, and neither does the template's ``kind``.
* ``replicas`` was the number of pods, and the default of each bound. (The default of the lower bound is 1 here.)
* With ``restartPolicy: Never`` the job failed when a pod did; otherwise the pod was replaced.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.json_values import integer, listing, mapping, mappings, shown, text

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

_FIELDS: Final = {"nproc-per-node": "nprocPerNode", "max-restarts": "maxRestarts"}
"""Flags with a number that are fields of the spec now."""


def modern(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a spec that has passed the CRD's validation in today's form; unchanged if it has that form already.

    If the spec is not supported, the field ``objection`` says why, in a sentence.
    """
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
    if containers := mappings(pod, "containers"):
        named = {text(container, "name"): container for container in containers}
        own = named.get(WORKER) or named.get(_FORMER_WORKER) or containers[0]
        container, fields = _of_launcher(own)
        pod["containers"] = [container if each is own else each for each in containers]
        today |= fields
    today["template"] = {"metadata": metadata, "spec": pod} if metadata else {"spec": pod}
    return today


def _of_launcher(own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job's own container in today's form, and the spec's fields for its flags, or an objection."""
    today = {**own, "name": WORKER}
    command, args = ([str(word) for word in listing(own, key)] for key in ("command", "args"))
    before = after_launcher(command) if command else ()
    if before is None:
        return today, {
            "objection": f"the container {text(own, 'name')} of spec.replicaSpecs.Worker has the command "
            f"{shown(command)}, which got the launcher's flags from the first controller; here each pod is the "
            "launcher itself: remove the command, and name the program in args"
        }
    today.pop("command", None)
    words = [*before, *args]
    kept: list[str] = []
    fields: dict[str, Any] = {}
    seen = 0
    for flag in launcher_flags(words):
        seen += len(flag.words)
        if flag.name in _FIELDS and re.fullmatch("[0-9]{1,6}", flag.value):
            fields[_FIELDS[flag.name]] = int(flag.value)
        elif flag.name == "nproc-per-node" and flag.value in ("auto", "cpu", "gpu"):
            fields["nprocPerNode"] = flag.value
        elif flag.name not in _OPERATORS:
            kept += flag.words
    return {**today, "args": [*kept, *words[seen:]]}, fields


_SWITCHES: Final = frozenset({"m", "module", "no-python", "run-path", "standalone", "use-env"})
"""Flags without a value."""

_OLD_NAMES: Final = {"nnode": "nnodes"}

_KNOWN: Final = (
    _SWITCHES
    | _OPERATORS
    | _FIELDS.keys()
    | {"help", "metrics-port", "node-name", "notice", "stop-grace", "termination-log", "version"}
)
"""Flags that the operator looks for. Launchers accept each unambiguous beginning of a flag."""

_LONGEST_START: Final = 8
"""Number of words of a command that are searched for a launcher."""

_LAUNCHER_MODULES: Final = frozenset(
    {"torch.distributed.launch", "torch.distributed.run", "torchelastic.distributed.launch", "torchelastic.run"}
)
_LAUNCHER: Final = re.compile(
    r"(?:\S*/)?(?:torchrun|torchelastic-run|python[0-9.]*\s+(?:-\w+\s+)*-\w*m\s*"
    rf"(?:{'|'.join(map(re.escape, sorted(_LAUNCHER_MODULES)))}))"
)
_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})
_SCRIPT_FLAG: Final = re.compile(r"-[A-Za-z]*c")
"""A shell's flags in one word, the last of which is followed by a script."""
_COMMANDS: Final = re.compile(r"[;&|\n]|(?<!\$)[({]")  # a command in $( ) is run for its output; it does not train
"""What separates the commands of a script, approximately: quotes and escapes are not interpreted."""

_STARTS_LAUNCHER: Final = re.compile(
    r"\s*(?:(?:!|do|else|exec|if|nohup|then|time|while)\s+|[A-Za-z_]\w*=\S*\s+)*"
    rf"{_LAUNCHER.pattern}(?:\s|$)"
)
"""A launcher at the start of a command. Scripts may be long, so nothing here may take more than linear time."""


@dataclass(frozen=True, slots=True)
class LauncherFlag:
    """A flag before the program.

    Attributes:
        name: without leading dashes, and with inner dashes: nproc-per-node, m; the whole and current name of a
            flag that is shortened or was renamed.
        value: the value; empty for a switch, or if it is missing.
        words: the words as given, one or two.
    """

    name: str
    value: str
    words: tuple[str, ...]


def launcher_flags(words: Sequence[str]) -> Iterator[LauncherFlag]:
    """Yield the flags at the beginning of a launcher's arguments; the program, or ``--``, follows them."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        word = words[position]
        long = word.startswith("--")
        written, equals, value = word.partition("=") if long else (word[:2], word[2:], word[2:].removeprefix("="))
        name = written.lstrip("-").replace("_", "-")
        name = _OLD_NAMES.get(name, name)
        if long and name not in _KNOWN:
            begun = [known for known in _KNOWN if known.startswith(name)]
            name = begun[0] if len(begun) == 1 else name
        taken = words[position : position + 1 if equals or name in _SWITCHES else position + 2]
        if len(taken) > 1:
            value = taken[1]
        yield LauncherFlag(name, value, tuple(taken))
        position += len(taken)


def after_launcher(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words after the launcher in a command that begins with one; None for other commands."""
    for end in range(1, min(len(command), _LONGEST_START) + 1):
        if _LAUNCHER.fullmatch(" ".join(command[:end])):
            return tuple(command[end:])
    return None


def starts_launcher(command: Sequence[str]) -> bool:
    """Return whether a command is a launcher, or a shell with a script that starts one."""
    if command and command[0].rpartition("/")[2] in _SHELLS:
        for flag, script in itertools.pairwise(command[1:]):
            if _SCRIPT_FLAG.fullmatch(flag):
                return any(map(_STARTS_LAUNCHER.match, _COMMANDS.split(script)))
    return after_launcher(command) is not None


def program_is_launcher(args: Sequence[str]) -> bool:
    """Return whether a launcher with these arguments would start another launcher."""
    flags = list(launcher_flags(args))
    program = list(args[sum(len(flag.words) for flag in flags) :])
    if program[:1] == ["--"]:
        program.pop(0)
    if any(flag.name in ("m", "module") for flag in flags):
        return bool(program) and program[0] in _LAUNCHER_MODULES
    return starts_launcher(program)
