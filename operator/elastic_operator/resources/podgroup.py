"""The PodGroup of a job: at least a minimum of its pods is scheduled together, or none is.

Two kinds are supported: that of Kubernetes' scheduler plugins, and Volcano's. Neither is part of Kubernetes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any, Final

from kubernetes.utils.quantity import parse_quantity

from elastic_operator.api.constants import ROLE_WORKER
from elastic_operator.api.json_access import mapping, mappings
from elastic_operator.api.spec import GangScheduler
from elastic_operator.resources.metadata import own_labels, own_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.api.spec import Json, SchedulingSpec
    from elastic_operator.controller.model import Job


def budget_name(job: Job) -> str:
    """What the disruption budget of a job is called."""
    return f"{job.name}-workers"


def disruption_budget(job: Job, min_available: int) -> dict[str, Any]:
    """The PodDisruptionBudget object."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": own_metadata(job, budget_name(job), ROLE_WORKER),
        "spec": {
            # A percentage would be one of the scale's replicas, which an elastic job need not have.
            "minAvailable": min_available,
            "selector": {"matchLabels": own_labels(job, ROLE_WORKER)},
            # A worker that does not even run holds up no drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


API_VERSIONS: Final = {
    GangScheduler.SCHEDULER_PLUGINS: "scheduling.x-k8s.io/v1alpha1",
    GangScheduler.VOLCANO: "scheduling.volcano.sh/v1beta1",
}
"""The API version of each scheduler's PodGroups."""

_SCHEDULERS: Final = {
    GangScheduler.SCHEDULER_PLUGINS: "scheduler-plugins-scheduler",
    GangScheduler.VOLCANO: "volcano",
}
_INSTALL: Final = {
    GangScheduler.SCHEDULER_PLUGINS: "the scheduler plugins of Kubernetes (sigs.k8s.io/scheduler-plugins)",
    GangScheduler.VOLCANO: "Volcano (volcano.sh)",
}
_LABEL: Final = "scheduling.x-k8s.io/pod-group"
_ANNOTATION: Final = "scheduling.k8s.io/group-name"

_TOO_MUCH: Final = Decimal(10) ** 20
"""Kubernetes counts in 64 bits."""

Amounts = dict[str, Decimal]


@dataclass(frozen=True, slots=True)
class Marks:
    """By what a scheduler knows the PodGroup of a pod.

    Attributes:
        labels: of the pod.
        annotations: of the pod.
    """

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


def group_name(job: Job) -> str:
    """What the PodGroup of a job is called."""
    return job.name


def gang_marks(job: Job) -> Marks:
    """What the pods of a job carry so that they belong to its PodGroup; nothing where there is none."""
    match job.spec.scheduling.gang:
        case GangScheduler.SCHEDULER_PLUGINS:
            return Marks(labels={_LABEL: group_name(job)})
        case GangScheduler.VOLCANO:
            return Marks(annotations={_ANNOTATION: group_name(job)})
        case None:
            return Marks()


def scheduler_of(policy: SchedulingSpec) -> str | None:
    """The scheduler of a job's pods; None for that of the template, or of the cluster."""
    return policy.scheduler_name or (_SCHEDULERS[policy.gang] if policy.gang is not None else None)


def pod_group(job: Job, gang: GangScheduler, min_member: int) -> dict[str, Any]:
    """The PodGroup object."""
    policy = job.spec.scheduling
    spec: dict[str, Any] = {"minMember": min_member}
    if requests := requests_of(mapping(job.spec.template, "spec")):
        spec["minResources"] = {name: _written(amount * min_member) for name, amount in sorted(requests.items())}
    if gang is GangScheduler.VOLCANO:
        if policy.queue:
            spec["queue"] = policy.queue
        if policy.priority_class:
            spec["priorityClassName"] = policy.priority_class
    return {
        "apiVersion": API_VERSIONS[gang],
        "kind": "PodGroup",
        "metadata": own_metadata(job, group_name(job), ROLE_WORKER),
        "spec": spec,
    }


def not_installed(gang: GangScheduler) -> str:
    """What to do if a cluster does not know the PodGroup."""
    group = API_VERSIONS[gang].partition("/")[0]
    return (
        f"this cluster knows no PodGroup of {group}, which spec.schedulingPolicy.gang asks for: install "
        f"{_INSTALL[gang]}, or remove gang from the job"
    )


def requests_of(pod: Json) -> Amounts:
    """What a pod takes of a node, as schedulers count it: the sum of its containers, or what it needs to begin with.

    What cannot be read counts for nothing: the API server has the word on it, when pods are made.

    Args:
        pod: a pod's spec.
    """
    running = _sum(_asked(container) for container in mappings(pod, "containers"))
    beginning: Amounts = {}
    beside: Amounts = {}
    for container in mappings(pod, "initContainers"):
        at_once = _sum((beside, _asked(container)))
        beginning = _larger(beginning, at_once)
        if container.get("restartPolicy") == "Always":  # it stays, beside all that follow
            running = _sum((running, _asked(container)))
            beside = at_once
    # What is said of the pod as a whole takes the place of that.
    needed = {**_larger(running, beginning), **_asked(pod)}
    return {name: amount for name, amount in _sum((needed, _amounts(mapping(pod, "overhead")))).items() if amount > 0}


def _asked(whole: Json) -> Amounts:
    """What a container, or a pod as a whole, asks for: its requests, or where it has none, its limits."""
    resources = mapping(whole, "resources")
    return {**_amounts(mapping(resources, "limits")), **_amounts(mapping(resources, "requests"))}


def _amounts(given: Json) -> Amounts:
    amounts: Amounts = {}
    for name, quantity in given.items():
        if isinstance(quantity, str | int | float):
            with contextlib.suppress(ValueError, ArithmeticError):
                amount = parse_quantity(quantity)
                if 0 <= amount < _TOO_MUCH:
                    amounts[name] = amount
    return amounts


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _larger(one: Amounts, other: Amounts) -> Amounts:
    names = one.keys() | other.keys()
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in names}


def _written(amount: Decimal) -> str:
    """As Kubernetes writes it: a whole number, or thousandths."""
    if amount == amount.to_integral_value():
        return f"{amount:f}".partition(".")[0]
    return f"{(amount * 1000).to_integral_value(ROUND_CEILING):f}m"
