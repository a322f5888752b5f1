"""The etcd of a job without an endpoint: a Deployment with one replica, behind a Service.

The loss of its data is harmless, because the agents write their records again. So the data are on the disk of the
node, without fsync. Only data on a volume (``spec.etcd.storage``) are synced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.constants import LABEL_JOB_UID, ROLE_ETCD
from elastic_operator.api.json_values import mapping
from elastic_operator.resources.owned_objects import common_labels, own_labels, own_metadata
from elastic_operator.resources.worker_pod import RESTRICTED, SECCOMP, tolerate_silent_node
from torchelastic.protocol import bracketed
from torchelastic.store.api import DEFAULT_PORT

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json
    from elastic_operator.controller.model import Job
    from elastic_operator.resources.owned_objects import PodSettings

ETCD: Final = "etcd"
"""The name of its container."""

_USER: Final = 65532
_UNPRIVILEGED: Final[Json] = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",
}
_PORT_NAME: Final = "client"
_FOLDER: Final = "/var/lib/etcd"
_RESOURCES: Final[Json] = {"requests": {"cpu": "100m", "memory": "64Mi"}}
_FROM_THE_TEMPLATE: Final = ("imagePullSecrets", "priorityClassName", "tolerations")
"""Fields of the template without which some clusters do not accept or run a pod. Node selectors and affinities are
left out: etcd does not need the nodes of workers."""


def etcd_name(job_name: str) -> str:
    """Return the name of the service and of the deployment of a job's etcd."""
    return f"{job_name}-etcd"


def etcd_endpoint(cluster_ip: str) -> str:
    """Return host:port of the etcd whose service has this address."""
    return f"{bracketed(cluster_ip)}:{DEFAULT_PORT}"


def etcd_service(job: Job, *, cluster_ip: str | None) -> dict[str, Any]:
    """Return the service.

    Args:
        job: the owner.
        cluster_ip: its address, if living pods use it already; None for any.
    """
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "selector": _selector(job),
        "ports": [{"name": _PORT_NAME, "port": DEFAULT_PORT, "targetPort": _PORT_NAME, "protocol": "TCP"}],
    }
    if cluster_ip is not None:
        spec["clusterIP"] = cluster_ip
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def etcd_deployment(job: Job, settings: PodSettings) -> dict[str, Any]:
    """Return the deployment."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(job),
        "spec": {
            "replicas": 1,
            # Two etcds behind one address would be two stores.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _selector(job)},
            "template": {
                "metadata": {"labels": _labels(job)},
                "spec": {
                    **_shared_with_workers(job),
                    "containers": [_container(job, settings)],
                    "volumes": [{"name": "data", **_volume(job)}],
                    "automountServiceAccountToken": False,
                    # Otherwise a service called "etcd" would set variables that etcd reads.
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 5,
                    "securityContext": {**_UNPRIVILEGED, **SECCOMP},
                },
            },
        },
    }


def _container(job: Job, settings: PodSettings) -> dict[str, Any]:
    etcd = job.spec.etcd
    keeps_data = etcd.storage is not None
    client = f":{DEFAULT_PORT}"
    return {
        "name": ETCD,
        "image": etcd.image or settings.etcd_image,
        "command": ["etcd"],
        "args": [
            f"--name={etcd_name(job.name)}",
            f"--data-dir={_FOLDER}/{'data' if keeps_data else '$(POD_IP)'}",
            f"--listen-client-urls=http://0.0.0.0{client}",
            f"--advertise-client-urls=http://{etcd_name(job.name)}.{job.namespace}{client}",
            # Only clients that lost the connection for a moment need its history.
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            f"--quota-backend-bytes={1 << 30}",
        ],
        "env": [] if keeps_data else _CARELESS,
        "ports": [{"name": _PORT_NAME, "containerPort": DEFAULT_PORT, "protocol": "TCP"}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": _PORT_NAME},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": 3,
        },
        "resources": etcd.resources or _RESOURCES,
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "data", "mountPath": _FOLDER}],
    }


_CARELESS: Final = [
    # As a variable: etcd 3.4 has no such flag, and ignores the variable.
    {"name": "ETCD_UNSAFE_NO_FSYNC", "value": "true"},
    # Data of a node that lost power must not be read again. So each address of the pod has its own folder: no sandbox,
    # and no address, outlives a restart of its node.
    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
]


def _volume(job: Job) -> dict[str, Any]:
    storage = job.spec.etcd.storage
    if storage is None:
        return {"emptyDir": {}}
    claim = {"metadata": {"labels": _labels(job)}, "spec": storage}
    return {"ephemeral": {"volumeClaimTemplate": claim}}


def _shared_with_workers(job: Job) -> dict[str, Any]:
    template = mapping(job.spec.template, "spec")
    pod = {key: template[key] for key in _FROM_THE_TEMPLATE if template.get(key) is not None}
    tolerate_silent_node(pod, job.spec.node_loss)
    if job.spec.scheduling.priority_class:
        # The workers wait for it, so they must not preempt it.
        pod["priorityClassName"] = job.spec.scheduling.priority_class
    return pod


def _metadata(job: Job) -> dict[str, Any]:
    return {**own_metadata(job, etcd_name(job.name), ROLE_ETCD), "labels": _labels(job)}


def _labels(job: Job) -> dict[str, str]:
    return {**common_labels(job, ROLE_ETCD), **_selector(job)}


def _selector(job: Job) -> dict[str, str]:
    return {**own_labels(job, ROLE_ETCD), LABEL_JOB_UID: job.uid}
