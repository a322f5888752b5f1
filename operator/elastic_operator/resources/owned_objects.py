"""The owner references and labels of a job's objects, the PodGroup and the PodDisruptionBudget.

The owner reference, by which Kubernetes removes an object with its job, does not set ``blockOwnerDeletion``, which may
require a permission for the job's finalizers.

A PodGroup defines how many pods a scheduler starts together or not at all. Two kinds are supported: that of Kubernetes'
scheduler plugins, and Volcano's. Neither is part of Kubernetes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any, Final

from kubernetes.utils.quantity import parse_quantity

from elastic_operator.api.constants import ANNOTATION_METRICS_PORT, LABEL_JOB, LABEL_ROLE, MANAGED_BY, ROLE_WORKER
from elastic_operator.api.json_values import mapping, mappings
from elastic_operator.api.spec import GROUP, KIND, VERSION, GangScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.api.spec import Json, SchedulingSpec
    from elastic_operator.controller.model import Job

ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.7.3"
AGENT_METRICS_PORT: Final = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Defaults for the pods of all jobs.

    Attributes:
        etcd_image: the image of the etcd that is created for a job; it has ``etcd`` on its PATH.
        agent_metrics_port: the port of the agents' /metrics; 0 for any free port, which is then annotated on the pod.
            On the host's network any free port is used.
    """

    etcd_image: str = ETCD_IMAGE
    agent_metrics_port: int = AGENT_METRICS_PORT


def owner_reference(job: Job) -> dict[str, Any]:
    """Return the reference to the job that controls an object."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}


def own_labels(job: Job, role: str) -> dict[str, str]:
    """Return the labels by which an object is found."""
    return {LABEL_JOB: job.name, LABEL_ROLE: role}


def common_labels(job: Job, role: str) -> dict[str, str]:
    """Return the labels by which tools group objects; a template may override them."""
    return {
        "app.kubernetes.io/name": "elasticjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": MANAGED_BY,
    }


def own_metadata(job: Job, name: str, role: str) -> dict[str, Any]:
    """Return the metadata of an object."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**common_labels(job, role), **own_labels(job, role)},
        "ownerReferences": [owner_reference(job)],
    }


def for_prometheus(port: int) -> dict[str, str]:
    """Return the annotations by which Prometheus finds a pod."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def metrics_notes(job: Job, port: int) -> dict[str, Any]:
    """Return the annotations of a pod whose agent serves on this port; those of the template take precedence."""
    said = mapping(job.spec.template, "metadata", "annotations")
    missing = {name: value for name, value in for_prometheus(port).items() if name not in said}
    return {**missing, ANNOTATION_METRICS_PORT: str(port)}


@dataclass(frozen=True, slots=True)
class _Gang:
    """A scheduler of gangs.

    Attributes:
        api_version: the API version of its PodGroups.
        scheduler: its name.
        product: the product to install.
        mark: where a pod names its PodGroup: ``labels`` or ``annotations``, and the key.
    """

    api_version: str
    scheduler: str
    product: str
    mark: tuple[str, str]


_GANGS: Final[Mapping[GangScheduler, _Gang]] = {
    GangScheduler.SCHEDULER_PLUGINS: _Gang(
        "scheduling.x-k8s.io/v1alpha1",
        "scheduler-plugins-scheduler",
        "the scheduler plugins of Kubernetes (sigs.k8s.io/scheduler-plugins)",
        ("labels", "scheduling.x-k8s.io/pod-group"),
    ),
    GangScheduler.VOLCANO: _Gang(
        "scheduling.volcano.sh/v1beta1",
        "volcano",
        "Volcano (volcano.sh)",
        ("annotations", "scheduling.k8s.io/group-name"),
    ),
}
_TOO_MUCH: Final = Decimal(10) ** 20
"""A limit for requests, because Kubernetes counts in 64 bits."""


def gang_marks(job: Job, kind: str) -> dict[str, str]:
    """Return the ``labels`` or ``annotations`` by which a pod belongs to the PodGroup of its job."""
    gang = job.spec.scheduling.gang
    if gang is None or _GANGS[gang].mark[0] != kind:
        return {}
    return {_GANGS[gang].mark[1]: job.name}


def scheduler_of(policy: SchedulingSpec) -> str | None:
    """Return the scheduler of a job's pods; None for that of the template, or of the cluster."""
    return policy.scheduler_name or (_GANGS[policy.gang].scheduler if policy.gang is not None else None)


def pod_group(job: Job, gang: GangScheduler, min_member: int) -> dict[str, Any]:
    """Return the PodGroup object."""
    policy = job.spec.scheduling
    spec: dict[str, Any] = {"minMember": min_member}
    if requests := _requests_of(mapping(job.spec.template, "spec")):
        spec["minResources"] = {name: _written(amount * min_member) for name, amount in sorted(requests.items())}
    if gang is GangScheduler.VOLCANO:
        volcano = {"queue": policy.queue, "priorityClassName": policy.priority_class}
        spec |= {name: value for name, value in volcano.items() if value}
    return {
        "apiVersion": _GANGS[gang].api_version,
        "kind": "PodGroup",
        "metadata": own_metadata(job, job.name, ROLE_WORKER),
        "spec": spec,
    }


def not_installed(gang: GangScheduler) -> str:
    """Return the message for a cluster that does not know the PodGroup."""
    group = _GANGS[gang].api_version.partition("/")[0]
    return (
        f"this cluster knows no PodGroup of {group}, which spec.schedulingPolicy.gang asks for: install "
        f"{_GANGS[gang].product}, or remove gang from the job"
    )


def disruption_budget(job: Job, min_available: int) -> dict[str, Any]:
    """Return the PodDisruptionBudget object: drains and other evictions never leave fewer workers than this."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": own_metadata(job, f"{job.name}-workers", ROLE_WORKER),
        "spec": {
            # A percentage would refer to the replicas of the scale, which an elastic job may not reach.
            "minAvailable": min_available,
            "selector": {"matchLabels": own_labels(job, ROLE_WORKER)},
            # A worker that does not run does not delay a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _requests_of(pod: Json) -> dict[str, Decimal]:
    """Return the sum of the requests of a pod's containers; a limit counts if there is no request.

    Invalid quantities are ignored: the API server rejects them when pods are created.
    """
    total: dict[str, Decimal] = {}
    for container in mappings(pod, "containers"):
        for name, quantity in {
            **mapping(container, "resources", "limits"),
            **mapping(container, "resources", "requests"),
        }.items():
            with contextlib.suppress(ValueError, ArithmeticError, TypeError):
                amount = parse_quantity(quantity)
                if 0 < amount < _TOO_MUCH:
                    total[name] = total.get(name, Decimal(0)) + amount
    return total


def _written(amount: Decimal) -> str:
    """Format an amount as in Kubernetes: a whole number, or thousandths."""
    if amount == amount.to_integral_value():
        return f"{amount:f}".partition(".")[0]
    return f"{(amount * 1000).to_integral_value(ROUND_CEILING):f}m"
