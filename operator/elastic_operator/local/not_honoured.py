"""What of a manifest processes can't honour: named in one warning, so that nothing is left out silently.

Of the image nothing is said: every manifest has one, and here the program always runs with the Python that runs
``elasticjob``. Nor of labels and annotations, which nobody reads here. Nor of what only takes rights away from a
container, to protect a cluster from it: here a program has the rights of whoever types ``elasticjob``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.archived import modern
from elastic_operator.spec import MANAGER, CleanPodPolicy, SchedulingSpec
from elastic_operator.template import WORKER
from elastic_operator.unchecked import mapping, mappings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.spec import ElasticJobSpec, Json

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

_SECONDS_OF_NODE_LOSS: Final = 15
"""What the CRD fills in."""


def honoured(spec: ElasticJobSpec) -> ElasticJobSpec:
    """The spec without those fields that would have an effect of their own where pods are processes, and not theirs."""
    return replace(
        spec,
        managed_by=MANAGER,
        ttl_after_finished=None,
        clean_pod_policy=CleanPodPolicy.RUNNING,
        failure_rules=tuple(rule for rule in spec.failure_rules if rule.exit_codes is not None),
        scheduling=SchedulingSpec(),
        rendezvous=replace(spec.rendezvous, ports=None),
        etcd=replace(spec.etcd, tls_secret=None),
        disruption_budget=False,
    )


def warning_of(spec: Json) -> str | None:
    """The warning for a spec that has passed the CRD's validation; None where all of it is honoured."""
    fields = tuple(not_honoured(spec))
    if not fields:
        return None
    return "not honoured on this machine, where pods are processes: " + ", ".join(fields)


def not_honoured(spec: Json) -> Iterator[str]:
    """The fields that have no effect here, by their path below ``spec``; those of an archived manifest by today's."""
    spec = modern(spec)
    yield from _values_from("env", spec.get("env"))
    yield from _of_the_life(spec)
    etcd = spec.get("etcd") or {}
    yield from (f"etcd.{field}" for field in ("tlsSecret", "image", "resources", "storage") if field in etcd)
    if (spec.get("checkpoint") or {}).get("volume"):
        yield "checkpoint.volume (checkpoints are in the run's folder)"
    template = mapping(spec.get("template"), "spec")
    yield from _fields("template.spec", template, _POD_FIELDS_WITHOUT_MEANING_HERE)
    for container in mappings(template, "containers"):
        yield from _of_container(container)


def _of_the_life(spec: Json) -> Iterator[str]:
    """Those that say how the job and its pods get on with a cluster."""
    if spec.get("managedBy", MANAGER) != MANAGER:
        yield "managedBy (who runs a job here looks after it)"
    if "ttlSecondsAfterFinished" in spec:
        yield "ttlSecondsAfterFinished (a run's folder stays)"
    if spec.get("cleanPodPolicy", CleanPodPolicy.RUNNING) != CleanPodPolicy.RUNNING:
        yield "cleanPodPolicy (no process outlives its run, and all logs stay)"
    for position, rule in enumerate(mappings(spec.get("failurePolicy"), "rules")):
        for field in ("onPodReasons", "onPodConditions"):
            if field in rule:
                yield f"failurePolicy.rules[{position}].{field}"
    yield from (f"schedulingPolicy.{field}" for field in spec.get("schedulingPolicy") or {})
    if "ports" in (spec.get("rendezvous") or {}):
        yield "rendezvous.ports (all pods share this machine's)"
    if spec.get("nodeLossSeconds", _SECONDS_OF_NODE_LOSS) != _SECONDS_OF_NODE_LOSS:
        yield "nodeLossSeconds"
    if spec.get("disruptionBudget"):
        yield "disruptionBudget"
    if spec.get("metricsPort"):
        yield "metricsPort (each pod takes a free one)"


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
