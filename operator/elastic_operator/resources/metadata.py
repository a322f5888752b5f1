"""What ties an object to its job: the reference by which Kubernetes removes it with the job, and the labels.

The reference does not say ``blockOwnerDeletion``: if that is enforced, it needs a permission for the job's finalizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.constants import ANNOTATION_METRICS_PORT, LABEL_JOB, LABEL_ROLE, MANAGED_BY
from elastic_operator.api.json_values import mapping
from elastic_operator.api.spec import GROUP, KIND, VERSION

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job


ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.7.3"
AGENT_METRICS_PORT: Final = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Defaults for the pods of all jobs.

    Attributes:
        etcd_image: of the etcd that is created for a job; it has ``etcd`` on its PATH.
        agent_metrics_port: where agents serve /metrics; 0 for any free port, which is then written on the pod. On the
            host's network any free port is used.
    """

    etcd_image: str = ETCD_IMAGE
    agent_metrics_port: int = AGENT_METRICS_PORT


def owner_reference(job: Job) -> dict[str, Any]:
    """The reference to the job that controls an object."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}


def own_labels(job: Job, role: str) -> dict[str, str]:
    """The labels by which an object is found."""
    return {LABEL_JOB: job.name, LABEL_ROLE: role}


def common_labels(job: Job, role: str) -> dict[str, str]:
    """The labels by which tools group objects; a template may override them."""
    return {
        "app.kubernetes.io/name": "elasticjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": MANAGED_BY,
    }


def own_metadata(job: Job, name: str, role: str) -> dict[str, Any]:
    """The metadata of an object."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**common_labels(job, role), **own_labels(job, role)},
        "ownerReferences": [owner_reference(job)],
    }


def for_prometheus(port: int) -> dict[str, str]:
    """The annotations by which Prometheus finds a pod."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def metrics_notes(job: Job, port: int) -> dict[str, Any]:
    """The annotations of a pod whose agent serves on this port; those of the template take precedence."""
    said = mapping(job.spec.template, "metadata", "annotations")
    missing = {name: value for name, value in for_prometheus(port).items() if name not in said}
    return {**missing, ANNOTATION_METRICS_PORT: str(port)}
