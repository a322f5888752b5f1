"""What ties an object to its job: the reference by which Kubernetes removes it with the job, and the labels.

The reference does not say ``blockOwnerDeletion``: where that is enforced, it needs a right on the job's finalizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.constants import ANNOTATION_METRICS_PORT, LABEL_JOB, LABEL_ROLE, MANAGED_BY
from elastic_operator.api.json_access import mapping
from elastic_operator.api.spec import GROUP, KIND, VERSION

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job


ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.7.3"
AGENT_METRICS_PORT: Final = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """What pods are made with where the job does not say.

    Attributes:
        etcd_image: of the etcd that is made for a job; it has ``etcd`` on its PATH.
        agent_metrics_port: where agents serve /metrics; 0 for any free port, which is noted on the pod once its agent
            has told it. So it is in any case on the host's network, where two pods can't share a port.
    """

    etcd_image: str = ETCD_IMAGE
    agent_metrics_port: int = AGENT_METRICS_PORT


def owner_reference(job: Job) -> dict[str, Any]:
    """Says that the job controls an object."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}


def own_labels(job: Job, role: str) -> dict[str, str]:
    """The labels by which an object is found."""
    return {LABEL_JOB: job.name, LABEL_ROLE: role}


def common_labels(job: Job, role: str) -> dict[str, str]:
    """The labels by which tools group what they show; the user may give them other values."""
    return {
        "app.kubernetes.io/name": "elasticjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": MANAGED_BY,
    }


def own_metadata(job: Job, name: str, role: str) -> dict[str, Any]:
    """The metadata of an object of which the user says nothing."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**common_labels(job, role), **own_labels(job, role)},
        "ownerReferences": [owner_reference(job)],
    }


def for_prometheus(port: int) -> dict[str, str]:
    """What a Prometheus that goes by annotations wants to read on a pod."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def metrics_notes(job: Job, port: int) -> dict[str, Any]:
    """The annotations of one of the job's pods whose agent serves on this port; what its template says holds."""
    said = mapping(job.spec.template, "metadata", "annotations")
    missing = {name: value for name, value in for_prometheus(port).items() if name not in said}
    return {**missing, ANNOTATION_METRICS_PORT: str(port)}
