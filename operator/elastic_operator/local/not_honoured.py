"""What of a manifest a process can't honour: named in one warning, so that nothing is left out silently.

Of the image nothing is said: every manifest has one, and here the program always runs with the Python that runs
``elasticjob``. Nor of labels and annotations, which nobody reads here. Nor of what only takes rights away from a
container, to protect a cluster from it: here a program has the rights of whoever types ``elasticjob``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_operator.template import WORKER
from elastic_operator.unchecked import mapping, mappings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.spec import Json

_POD_FIELDS_WITHOUT_MEANING_HERE: Final = frozenset({"containers", "restartPolicy", "terminationGracePeriodSeconds"})
_CONTAINER_FIELDS_HONOURED: Final = frozenset({"name", "image", "command", "args", "env"})
_SECURITY: Final = "securityContext"
_RESTRICTIONS: Final = frozenset({"appArmorProfile", "readOnlyRootFilesystem", "runAsNonRoot", "seccompProfile"})
_RIGHTS: Final = frozenset(
    {
        "allowPrivilegeEscalation",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "privileged",
    }
)
"""What false takes away."""


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
    template = mapping(spec.get("template"), "spec")
    yield from _fields("template.spec", template, _POD_FIELDS_WITHOUT_MEANING_HERE)
    for container in mappings(template, "containers"):
        yield from _of_container(container)


def _of_container(container: Json) -> Iterator[str]:
    name = container.get("name")
    if name != WORKER:
        yield f"the container {name!r} of template.spec.containers"
        return
    where = f"template.spec.containers[{name}]"
    yield from _fields(where, container, _CONTAINER_FIELDS_HONOURED)
    yield from _values_from(f"{where}.env", container.get("env"))


def _fields(where: str, given: Json, passed_over: frozenset[str]) -> Iterator[str]:
    for field, value in given.items():
        if field == _SECURITY and isinstance(value, dict):
            yield from (f"{where}.{field}.{asked}" for asked in value if not _only_restricts(asked, value[asked]))
        elif field not in passed_over and not _only_restricts(field, value):
            yield f"{where}.{field}"


def _only_restricts(field: str, value: object) -> bool:
    if field == "capabilities":
        return not mapping(value).get("add")
    return value is None or field in _RESTRICTIONS or (field in _RIGHTS and value is False)


def _values_from(where: str, variables: object) -> Iterator[str]:
    for variable in mappings(variables):
        if "valueFrom" in variable:
            name = variable.get("name")
            yield f"{where}[{name}].valueFrom (set {name} where you type elasticjob)"
