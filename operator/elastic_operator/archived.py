"""Turns the spec of a manifest that was written for the first ElasticJob controller into today's.

That controller, of the same group and version, was archived in 2022; its manifests name ``rdzvEndpoint`` and
``replicaSpecs.Worker``. The CRD knows both forms, and refuses a mixture of them. What such a manifest meant:

* Its pods' command line was the image's launcher, then flags of the controller's own, then the container's ``args``,
  which begin with more flags for the launcher (``--nproc_per_node=1``). The launcher is ours now. Flags that say where
  the pods meet and how many there are were the controller's, and are the operator's now, so they are left out where a
  manifest has them too. So is a ``command`` that is a launcher. Any other command was something that starts a launcher
  in its own way: in place of the program it would start as many launchers as there are workers, so it is refused.
* Flags for which today's spec has fields become these fields; where such a field says something else, it is refused.
* The container had any name.
* Names and restart policies inside the template had no effect, nor has the template's own ``kind``.
* ``replicas`` was the number of pods, and each bound where that was left out. (A lower bound that is left out is 1
  here, as in every other manifest.)
* ``restartPolicy: Never`` had the job fail when a pod did; with the others the pod was replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.launcher_words import after_launcher, launcher_flags
from elastic_operator.problem import shown
from elastic_operator.unchecked import integer, listing, mapping, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORKER: Final = "worker"
"""The container that is ours, as today's template names it."""

_FORMER_WORKER: Final = "elasticjob-worker"
"""What the first controller's own examples call it."""

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
"""Flags of the launcher that are the operator's to give, or need not be given any more."""

_FILLED_IN: Final = {"nprocPerNode": 1, "maxRestarts": 100}
"""What the CRD says in these fields where nobody says anything."""

_MOST_WORKERS: Final = 4096
_MOST_RESTARTS: Final = 1_000_000


def modern(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Today's form of a spec that has passed the CRD's validation; one that has it already as it is."""
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
    """What in an archived manifest cannot mean here what it meant there, in a sentence; None where there is nothing."""
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
    """Which of the containers is the job's own; None where there is none."""
    containers = listing(pod, "containers")
    if not all(isinstance(container, dict) for container in containers):
        return None
    names = [text(container, "name") for container in containers]
    for name in (WORKER, _FORMER_WORKER):
        if name in names:
            return names.index(name)
    return 0 if names else None


def _of_launcher(container: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The container as today's template has it, and the fields of the spec that say what its flags said."""
    today = {**container, "name": WORKER}
    command, args = _texts(container.get("command")), _texts(container.get("args"))
    if command is None or args is None:  # not what these fields take, which the operator says in words
        return today, {}
    before = after_launcher(command)
    if command and before is None:
        return today, {}
    today.pop("command", None)
    kept, lifted = _without_operators_flags((*(before or ()), *args))
    return today | {"args": kept}, lifted


def _without_operators_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The launcher's arguments without the flags that the operator gives, and with the spec's fields for others."""
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
    """The field of the spec that says what a flag says; None where there is none."""
    number = int(value) if value.isascii() and value.isdecimal() and len(value) <= len(str(_MOST_RESTARTS)) else None
    if flag == "nproc-per-node":
        if number is not None and 1 <= number <= _MOST_WORKERS:
            return {"nprocPerNode": number}
        return {"nprocPerNode": value} if value in ("auto", "cpu", "gpu") else None
    if flag == "max-restarts" and number is not None and number <= _MOST_RESTARTS:
        return {"maxRestarts": number}
    return None


def _texts(value: object) -> tuple[str, ...] | None:
    """A list of texts; None where it is something else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    return tuple(value)
