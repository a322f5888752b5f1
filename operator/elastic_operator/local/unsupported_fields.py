"""The fields of a manifest that have no effect where pods are processes.

They are named in one warning. The image is not among them: every manifest has one, and the program always runs with
the Python that runs ``elasticjob``. Nor are labels, annotations and fields that only take rights away from a
container: here a program has the rights of the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from elastic_operator.api.json_access import mapping, mappings
from elastic_operator.api.legacy import modern
from elastic_operator.api.spec import MANAGER, CleanPodPolicy, FailurePolicy, SchedulingSpec
from elastic_operator.api.template import WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.api.spec import ElasticJobSpec, Json

_IGNORED_POD_FIELDS: Final = frozenset({"containers", "restartPolicy", "terminationGracePeriodSeconds"})
_CONTAINER_FIELDS: Final = frozenset({"name", "image", "command", "args", "env"})
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
_NODE_LOSS_DEFAULT: Final = 15


def supported(spec: ElasticJobSpec) -> ElasticJobSpec:
    """Return the spec without the fields that would have another effect here."""
    return replace(
        spec,
        managed_by=MANAGER,
        ttl_after_finished=None,
        clean_pod_policy=CleanPodPolicy.RUNNING,
        failure_policy=FailurePolicy(tuple(rule for rule in spec.failure_rules if rule.exit_codes is not None)),
        scheduling=SchedulingSpec(),
        rendezvous=replace(spec.rendezvous, ports=None),
        etcd=replace(spec.etcd, tls_secret=None),
        disruption_budget=False,
    )


def warning_of(spec: Json) -> str | None:
    """Return the warning for a spec that has passed the CRD's validation; None if it has no unsupported field."""
    fields = tuple(unsupported_fields(spec))
    if not fields:
        return None
    return "without effect on this machine, where pods are processes: " + ", ".join(fields)


def unsupported_fields(spec: Json) -> Iterator[str]:
    """Yield the paths below ``spec`` of the fields without effect; an archived spec is converted first."""
    spec = modern(spec)
    yield from _values_from("env", spec.get("env"))
    if spec.get("managedBy", MANAGER) != MANAGER:
        yield "managedBy (a job here is managed by `elasticjob run`)"
    if "ttlSecondsAfterFinished" in spec:
        yield "ttlSecondsAfterFinished (a run's directory stays)"
    if spec.get("cleanPodPolicy", CleanPodPolicy.RUNNING) != CleanPodPolicy.RUNNING:
        yield "cleanPodPolicy (no process outlives its run, and all logs stay)"
    for position, rule in enumerate(mappings(spec.get("failurePolicy"), "rules")):
        fields = ("onPodReasons", "onPodConditions")
        yield from (f"failurePolicy.rules[{position}].{field}" for field in fields if field in rule)
    yield from (f"schedulingPolicy.{field}" for field in spec.get("schedulingPolicy") or {})
    if "ports" in (spec.get("rendezvous") or {}):
        yield "rendezvous.ports (all pods share this machine's)"
    if spec.get("nodeLossSeconds", _NODE_LOSS_DEFAULT) != _NODE_LOSS_DEFAULT:
        yield "nodeLossSeconds"
    if spec.get("disruptionBudget"):
        yield "disruptionBudget"
    if spec.get("metricsPort"):
        yield "metricsPort (each pod takes a free one)"
    etcd = spec.get("etcd") or {}
    yield from (f"etcd.{field}" for field in ("tlsSecret", "image", "resources", "storage") if field in etcd)
    if (spec.get("checkpoint") or {}).get("volume"):
        yield "checkpoint.volume (checkpoints are in the run's directory)"
    yield from _of_pod(mapping(spec.get("template"), "spec"))


def _of_pod(pod: Json) -> Iterator[str]:
    yield from _fields("template.spec", pod, _IGNORED_POD_FIELDS)
    for container in mappings(pod, "containers"):
        name = container.get("name")
        if name != WORKER:
            yield f"the container {name!r} of template.spec.containers"
            continue
        path = f"template.spec.containers[{name}]"
        yield from _fields(path, container, _CONTAINER_FIELDS)
        yield from _values_from(f"{path}.env", container.get("env"))


def _fields(path: str, given: Json, ignored: frozenset[str]) -> Iterator[str]:
    for field, value in given.items():
        if field == "securityContext" and isinstance(value, dict):
            yield from (f"{path}.{field}.{below}" for below in value if not _only_restricts(below, value[below]))
        elif field not in ignored and not _only_restricts(field, value):
            yield f"{path}.{field}"


def _only_restricts(field: str, value: object) -> bool:
    if field == "capabilities":
        return not mapping(value).get("add")
    return value is None or field in _RESTRICTIONS or (field in _RIGHTS and value is False)


def _values_from(path: str, variables: object) -> Iterator[str]:
    for variable in mappings(variables):
        if "valueFrom" in variable:
            name = variable.get("name")
            yield f"{path}[{name}].valueFrom (set {name} in the environment of elasticjob)"
