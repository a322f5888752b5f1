"""What of a manifest a process can't honour: named in one warning, so that nothing is left out silently.

Of the image nothing is said: every manifest has one, and here the program always runs with the Python that runs
``elasticjob``. Nor of labels and annotations, which nobody reads here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Json = Mapping[str, Any]

WORKER: Final = "worker"
"""The container of a pod that is ours; every other one is the user's."""

_POD_FIELDS_WITHOUT_MEANING_HERE: Final = frozenset({"containers", "restartPolicy", "terminationGracePeriodSeconds"})
_CONTAINER_FIELDS_HONOURED: Final = frozenset({"name", "image", "command", "args", "env"})


def warning_of(spec: Json) -> str | None:
    """The warning for a spec that has passed the CRD's validation; None where all of it is honoured."""
    fields = tuple(not_honoured(spec))
    if not fields:
        return None
    return "not honoured on this machine, where pods are processes: " + ", ".join(fields)


def not_honoured(spec: Json) -> Iterator[str]:
    """The fields that have no effect here, by their path below ``spec``."""
    yield from _values_from("env", spec.get("env"))
    etcd = spec.get("etcd") or {}
    yield from (f"etcd.{field}" for field in ("image", "resources", "storage") if field in etcd)
    if (spec.get("checkpoint") or {}).get("volume"):
        yield "checkpoint.volume (checkpoints are in the run's folder)"
    pod = _mapping((_mapping(spec.get("template"))).get("spec"))
    yield from (f"template.spec.{field}" for field in pod if field not in _POD_FIELDS_WITHOUT_MEANING_HERE)
    containers = pod.get("containers")
    for container in containers if isinstance(containers, list) else ():
        yield from _of_container(_mapping(container))


def _of_container(container: Json) -> Iterator[str]:
    name = container.get("name")
    if name != WORKER:
        yield f"the container {name!r} of template.spec.containers"
        return
    where = f"template.spec.containers[{name}]"
    yield from (f"{where}.{field}" for field in container if field not in _CONTAINER_FIELDS_HONOURED)
    yield from _values_from(f"{where}.env", container.get("env"))


def _values_from(where: str, variables: object) -> Iterator[str]:
    for variable in variables if isinstance(variables, list) else ():
        if "valueFrom" in _mapping(variable):
            name = variable.get("name")
            yield f"{where}[{name}].valueFrom (set {name} where you type elasticjob)"


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}
