"""The objects that a job owns, except for its worker pods: etcd, the PodGroup and the PodDisruptionBudget.

Because of an owner reference, Kubernetes removes each object with its job. The reference does not set
``blockOwnerDeletion``, because that may require a permission for the job's finalizers.

The etcd of a job without an endpoint is a Deployment with one replica, behind a Service. The loss of its data is
harmless, because the agents write their records again. So etcd writes to the disk of its node without fsync. Only data
on a volume (``spec.etcd.storage``) is synced.

A PodGroup defines how many pods a scheduler starts together or not at all. Two kinds are supported: the PodGroups of
Kubernetes' scheduler plugins and of Volcano. Neither is part of Kubernetes.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api import constants
from elastic_operator.api.json_values import Json, get_dict, get_dicts, get_list, get_str
from elastic_operator.api.spec import GROUP, KIND, VERSION, GangScheduler, SchedulingSpec
from torchelastic.protocol.records import bracketed
from torchelastic.store.api import DEFAULT_PORT
from torchelastic.store.etcd_process import AUTHORITY, CERTIFICATE, KEY, tls_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_operator.controller.model import Job

ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.7.3"
AGENT_METRICS_PORT: Final = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Defaults for the pods of all jobs.

    Attributes:
        etcd_image: the image of the etcd that is created for a job; it has ``etcd`` on its PATH.
        agent_metrics_port: the port of the agents' /metrics; 0 for any free port, which is then annotated on the pod.
            Pods on the host's network use any free port.
        network_policies: whether each job gets a NetworkPolicy.
        metrics_namespaces: the namespaces whose pods may read the metrics of jobs; empty if everyone may.
        operator_namespace: the namespace of the operator's pods; None if the operator runs in no pod.
    """

    etcd_image: str = ETCD_IMAGE
    agent_metrics_port: int = AGENT_METRICS_PORT
    network_policies: bool = True
    metrics_namespaces: tuple[str, ...] = ()
    operator_namespace: str | None = None


def owner_reference(job: Job) -> dict[str, Any]:
    """Return the reference to the job that controls an object."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}


def own_labels(job: Job, role: str) -> dict[str, str]:
    """Return the labels by which the operator finds an object."""
    return {constants.LABEL_JOB: job.name, constants.LABEL_ROLE: role}


def common_labels(job: Job, role: str) -> dict[str, str]:
    """Return the labels by which tools group objects; a template may override them."""
    return {
        "app.kubernetes.io/name": "elasticjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": constants.MANAGED_BY,
    }


def own_metadata(job: Job, name: str, role: str) -> dict[str, Any]:
    """Return the metadata of an object that a job owns."""
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
    given = get_dict(job.spec.template, "metadata", "annotations")
    missing = {name: value for name, value in for_prometheus(port).items() if name not in given}
    return {**missing, constants.ANNOTATION_METRICS_PORT: str(port)}


@dataclass(frozen=True, slots=True)
class _Gang:
    """A gang scheduler.

    Attributes:
        api_version: the API version of its PodGroups.
        scheduler: the name of the scheduler.
        product: the name of the product to install.
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


def gang_marks(job: Job, kind: str) -> dict[str, str]:
    """Return the ``labels`` or ``annotations`` by which a pod belongs to the PodGroup of its job."""
    gang = job.spec.scheduling.gang
    if gang is None or _GANGS[gang].mark[0] != kind:
        return {}
    return {_GANGS[gang].mark[1]: job.name}


def scheduler_of(policy: SchedulingSpec) -> str | None:
    """Return the scheduler of a job's pods; None for the scheduler of the template or of the cluster."""
    return policy.scheduler_name or (_GANGS[policy.gang].scheduler if policy.gang is not None else None)


def pod_group(job: Job, gang: GangScheduler, min_member: int) -> dict[str, Any]:
    """Return the PodGroup object."""
    policy = job.spec.scheduling
    spec: dict[str, Any] = {"minMember": min_member}
    if gang is GangScheduler.VOLCANO:
        volcano = {"queue": policy.queue, "priorityClassName": policy.priority_class}
        spec |= {name: value for name, value in volcano.items() if value}
    return {
        "apiVersion": _GANGS[gang].api_version,
        "kind": "PodGroup",
        "metadata": own_metadata(job, job.name, constants.ROLE_WORKER),
        "spec": spec,
    }


def not_installed(gang: GangScheduler) -> str:
    """Return the message for a cluster without the PodGroup's definition."""
    group = _GANGS[gang].api_version.partition("/")[0]
    return (
        f"this cluster has no PodGroup of {group}, which spec.schedulingPolicy.gang requires: install "
        f"{_GANGS[gang].product}, or remove gang from the job"
    )


def disruption_budget(job: Job, min_available: int) -> dict[str, Any]:
    """Return the PodDisruptionBudget object: drains and other evictions leave at least ``min_available`` workers."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": own_metadata(job, f"{job.name}-workers", constants.ROLE_WORKER),
        "spec": {
            # A percentage would refer to the replicas of the scale, which an elastic job may not reach.
            "minAvailable": min_available,
            "selector": {"matchLabels": own_labels(job, constants.ROLE_WORKER)},
            # A worker that does not run does not delay a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


RESTRICTED: Final[Json] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""The security context of a container. Together with :data:`SECCOMP`, it satisfies the pod security standard
``restricted``, except that it does not forbid root: only the author of an image knows whether the image needs root."""

SECCOMP: Final[Json] = {"seccompProfile": {"type": "RuntimeDefault"}}
"""A pod's security context."""

_SILENT_NODE_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The taints of a node that does not respond."""
_NO_EXECUTE: Final = "NoExecute"


def extended(given: object, more: Sequence[object]) -> object:
    """Return a list with more items at its end; return any other value unchanged."""
    return given if given is not None and not isinstance(given, list) else [*get_list(given), *more]


def tolerate_unreachable_node(pod: dict[str, Any], seconds: int) -> None:
    """Let Kubernetes evict a pod this number of seconds after its node became unreachable, instead of five minutes.

    The user's own tolerations of these taints take precedence.
    """
    given = get_dicts(pod, "tolerations")
    added = [
        {"key": taint, "operator": "Exists", "effect": _NO_EXECUTE, "tolerationSeconds": seconds}
        for taint in _SILENT_NODE_TAINTS
        if not any(
            get_str(each, "key") in ("", taint) and get_str(each, "effect") in ("", _NO_EXECUTE) for each in given
        )
    ]
    if added:
        pod["tolerations"] = extended(pod.get("tolerations"), added)


ETCD: Final = "etcd"
"""The name of etcd's container."""

_USER: Final = 65532
_UNPRIVILEGED: Final[Json] = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",
}
_PORT_NAME: Final = "client"
_HEALTH_PORT: Final = 2381
"""The port of /health and /metrics, which needs no certificate."""
_FOLDER: Final = "/var/lib/etcd"
_RESOURCES: Final[Json] = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
"""The default resources. etcd keeps its last writes in memory, so an etcd that is filled up to its quota of 1 GiB uses
1.6 GiB if Go's garbage collector respects a limit."""
_TEMPLATE_FIELDS: Final = ("imagePullSecrets", "priorityClassName", "tolerations")
"""Fields that etcd's pod copies from the template, because some clusters do not accept or run a pod without them. Node
selectors and affinities are not copied: etcd does not need the nodes of workers."""


def etcd_name(job_name: str) -> str:
    """Return the name of the service and of the deployment of a job's etcd."""
    return f"{job_name}-etcd"


def etcd_hosts(job: Job, cluster_ip: str) -> tuple[str, ...]:
    """Return the names and addresses at which clients reach a job's own etcd: agents, the operator and etcdctl."""
    service = f"{etcd_name(job.name)}.{job.namespace}"
    return cluster_ip, service, f"{service}.svc", "localhost", "127.0.0.1"


def etcd_secret(job: Job, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret with the certificates of a job's own etcd and its clients.

    Its type cannot be changed, so this Secret never replaces one that does not belong to the operator.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job),
        "type": f"{GROUP}/etcd-certificates",
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def tls_secret(job: Job) -> str | None:
    """Return the name of the Secret with a job's certificates for etcd; None if there is none."""
    return etcd_name(job.name) if job.spec.etcd.has_certificates else job.spec.etcd.tls_secret


def etcd_endpoint(cluster_ip: str) -> str:
    """Return host:port of the etcd whose service has this address."""
    return f"{bracketed(cluster_ip)}:{DEFAULT_PORT}"


def etcd_service(job: Job, *, cluster_ip: str | None) -> dict[str, Any]:
    """Return the Service of a job's own etcd.

    Args:
        job: the owner.
        cluster_ip: the address that live pods use; None for any address.
    """
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "selector": _selector(job),
        "ports": [{"name": _PORT_NAME, "port": DEFAULT_PORT, "targetPort": _PORT_NAME, "protocol": "TCP"}],
    }
    if cluster_ip is not None:
        spec["clusterIP"] = cluster_ip
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def etcd_deployment(job: Job, settings: PodSettings, certificate: str = "") -> dict[str, Any]:
    """Return the Deployment of a job's own etcd; `certificate` is the value of its annotation."""
    storage = job.spec.etcd.storage
    claim = {"metadata": {"labels": _labels(job)}, "spec": storage}
    volume: Json = {"emptyDir": {}} if storage is None else {"ephemeral": {"volumeClaimTemplate": claim}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            **_metadata(job),
            **({"annotations": {constants.ANNOTATION_CERTIFICATE: certificate}} if certificate else {}),
        },
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
                    "volumes": [{"name": "data", **volume}, *_certificates(job)],
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
    scheme = "https" if etcd.has_certificates else "http"
    return {
        "name": ETCD,
        "image": etcd.image or settings.etcd_image,
        "command": ["etcd"],
        "args": [
            f"--name={etcd_name(job.name)}",
            f"--data-dir={_FOLDER}/{'data' if keeps_data else '$(POD_IP)'}",
            f"--listen-client-urls={scheme}://0.0.0.0{client}",
            f"--advertise-client-urls={scheme}://{etcd_name(job.name)}.{job.namespace}{client}",
            f"--listen-metrics-urls=http://0.0.0.0:{_HEALTH_PORT}",
            *(tls_flags(constants.ETCD_TLS_FOLDER) if etcd.has_certificates else ()),
            # Only clients that lost the connection for a moment need the history of the keys.
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            f"--quota-backend-bytes={1 << 30}",
        ],
        "env": [
            _MEMORY_LIMIT,
            *([] if keeps_data else _WITHOUT_FSYNC),
            # For `kubectl exec deployment/<job>-etcd -- etcdctl …`.
            {"name": "ETCDCTL_ENDPOINTS", "value": f"{scheme}://127.0.0.1{client}"},
            *({"name": f"ETCDCTL_{name}", "value": path} for name, path in _etcdctl_files(job).items()),
        ],
        "ports": [
            {"name": _PORT_NAME, "containerPort": DEFAULT_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": _HEALTH_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "health"},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": 3,
        },
        "resources": etcd.resources or _RESOURCES,
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "data", "mountPath": _FOLDER},
            *({"name": each["name"], "mountPath": constants.ETCD_TLS_FOLDER} for each in _certificates(job)),
        ],
    }


def _certificates(job: Job) -> list[Json]:
    """Return the volume with the certificates of a job's own etcd, which its group can read; empty without TLS."""
    source = {"secretName": etcd_name(job.name), "defaultMode": 0o440}
    return [{"name": "certificates", "secret": source}] if job.spec.etcd.has_certificates else []


def _etcdctl_files(job: Job) -> dict[str, str]:
    files = {"CACERT": AUTHORITY, "CERT": CERTIFICATE, "KEY": KEY} if job.spec.etcd.has_certificates else {}
    return {name: f"{constants.ETCD_TLS_FOLDER}/{file}" for name, file in files.items()}


_MEMORY_LIMIT: Final = {"name": "GOMEMLIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}}
_WITHOUT_FSYNC: Final = [
    # A variable, because etcd 3.4 has no such flag and would reject it, but ignores the variable.
    {"name": "ETCD_UNSAFE_NO_FSYNC", "value": "true"},
    # Unsynced data must not be read after a power failure. So each address of the pod has its own folder, because a pod
    # gets a new address after a restart of its node.
    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
]


def _shared_with_workers(job: Job) -> dict[str, Any]:
    template = get_dict(job.spec.template, "spec")
    pod = {key: template[key] for key in _TEMPLATE_FIELDS if template.get(key) is not None}
    tolerate_unreachable_node(pod, job.spec.node_loss)
    if job.spec.scheduling.priority_class:
        # The workers wait for etcd, so they must not preempt it.
        pod["priorityClassName"] = job.spec.scheduling.priority_class
    return pod


def _metadata(job: Job) -> dict[str, Any]:
    return {**own_metadata(job, etcd_name(job.name), constants.ROLE_ETCD), "labels": _labels(job)}


def _labels(job: Job) -> dict[str, str]:
    return {**common_labels(job, constants.ROLE_ETCD), **_selector(job)}


def _selector(job: Job) -> dict[str, str]:
    return {**own_labels(job, constants.ROLE_ETCD), constants.LABEL_JOB_UID: job.uid}
