"""A worker's pod: the job's template, completed with the agent, its environment, and defaults that it may override.

Defaults: memory on /dev/shm (a container gets 64 MiB otherwise); an empty folder on /tmp, so that the root file system
may be read-only; annotations for a Prometheus without an operator; no environment variables of services, which can
prevent containers in large namespaces from starting; no token for the API server; the rights of an ordinary process; a
grace period in which workers can save; a short toleration of silent nodes. There is no probe: the store says at once
whether an agent serves, and no service sends anything to these pods.
"""

from __future__ import annotations

import copy
import itertools
import posixpath
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.constants import (
    ANNOTATION_FAILED,
    ANNOTATION_FAILURES,
    ANNOTATION_METRICS_PORT,
    ANNOTATION_PROTOCOL,
    ANNOTATION_SIZE,
    CHECKPOINT_FOLDER,
    ETCD_TLS_FOLDER,
    LABEL_INDEX,
    METRICS_PORT,
    ROLE_WORKER,
    hostname,
)
from elastic_operator.api.json_values import listing, mapping, mappings, rfc3339, text
from elastic_operator.api.legacy import WORKER
from elastic_operator.api.spec import NEVER, mounted_folders, user_env
from elastic_operator.resources.agent_command import LAUNCHER, agent_arguments, agent_variables, ending_of
from elastic_operator.resources.owned_objects import (
    common_labels,
    for_prometheus,
    gang_marks,
    own_labels,
    owner_reference,
    scheduler_of,
)
from torchelastic.protocol import PROTOCOL_VERSION, Env, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from elastic_operator.api.spec import ElasticJobSpec, Json
    from elastic_operator.controller.model import Job, NewPod
    from elastic_operator.resources.owned_objects import PodSettings


RESTRICTED: Final[Json] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""A container's security context. With :data:`SECCOMP` this is the pod security standard ``restricted``, except for
a user that is not root: only the author of an image knows that."""

SECCOMP: Final[Json] = {"seccompProfile": {"type": "RuntimeDefault"}}
"""A pod's security context."""


def completed(given: object, defaults: Json) -> object:
    """Return a mapping with defaults for missing and null values, recursively; another value is returned unchanged."""
    return given if given is not None and not isinstance(given, dict) else completed_mapping(given or {}, defaults)


def completed_mapping(given: Json, defaults: Json) -> dict[str, Any]:
    """Like :func:`completed`, for a value that is a mapping."""
    result = dict(given)
    for key, default in defaults.items():
        if isinstance(default, dict):
            result[key] = completed(result.get(key), default)
        elif result.get(key) is None:
            result[key] = copy.deepcopy(default)
    return result


def extended(given: object, more: Sequence[object]) -> object:
    """Return a list with more at its end; another value is returned unchanged."""
    return given if given is not None and not isinstance(given, list) else [*listing(given), *more]


def mount(
    pod: dict[str, Any], container: dict[str, Any], folder: str, name: str, source: Json, *, read_only: bool = False
) -> None:
    """Mount a volume in a container of a pod's spec, unless the folder is mounted already.

    The volume's name gets a number if the template uses it.
    """
    if posixpath.normpath(folder) in mounted_folders(container):
        return
    taken = {text(volume, "name") for volume in mappings(pod, "volumes")}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    unused = next(each for each in names if each not in taken)
    pod["volumes"] = extended(pod.get("volumes"), [{**source, "name": unused}])
    mounted = {"name": unused, "mountPath": folder, **({"readOnly": True} if read_only else {})}
    container["volumeMounts"] = extended(container.get("volumeMounts"), [mounted])


def restricted(context: object) -> object:
    """Return a container's security context with defaults for what it leaves out."""
    defaults = dict(RESTRICTED)
    asked = mapping(context)
    # The API server rejects these together with the default.
    if asked.get("privileged") is True or "CAP_SYS_ADMIN" in listing(asked, "capabilities", "add"):
        del defaults["allowPrivilegeEscalation"]
    return completed(context, defaults)


_SILENT: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The taints of a node that does not respond."""
_NO_EXECUTE: Final = "NoExecute"
_NAME: Final = "metadata.name"
"""The field that identifies a node; the label with its host name may differ."""


def schedule(pod: dict[str, Any], spec: ElasticJobSpec, *, excluded: Collection[str] = ()) -> None:
    """Complete the spec of a worker's pod; the template's own values take precedence."""
    tolerate_silent_node(pod, spec.node_loss)
    scheduler = scheduler_of(spec.scheduling)
    for field, value in (("schedulerName", scheduler), ("priorityClassName", spec.scheduling.priority_class)):
        if value and pod.get(field) is None:
            pod[field] = value
    if excluded:
        _exclude(pod, excluded)


def tolerate_silent_node(pod: dict[str, Any], seconds: int) -> None:
    """Evict a pod this number of seconds after its node became silent. Kubernetes waits five minutes by default.

    The user's own tolerations of these taints take precedence.
    """
    there = mappings(pod, "tolerations")
    ours = [
        {"key": taint, "operator": "Exists", "effect": _NO_EXECUTE, "tolerationSeconds": seconds}
        for taint in _SILENT
        if not any(text(each, "key") in ("", taint) and text(each, "effect") in ("", _NO_EXECUTE) for each in there)
    ]
    if ours:
        pod["tolerations"] = extended(pod.get("tolerations"), ours)


def _exclude(pod: dict[str, Any], nodes: Collection[str]) -> None:
    """Exclude nodes, in addition to the pod's own node affinity."""
    # The API server takes one value each.
    demands = [{"key": _NAME, "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    part: Any = pod
    for step in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        if part.get(step) is None:
            part[step] = {}
        part = part[step]
        if not isinstance(part, dict):
            return  # the API server reports it
    terms = part.get("nodeSelectorTerms")
    if terms is None:
        part["nodeSelectorTerms"] = [{"matchFields": demands}]
    for term in listing(terms):
        # An empty term matches no node; with this requirement it would match all other nodes.
        if isinstance(term, dict) and (term.get("matchExpressions") or term.get("matchFields")):
            term["matchFields"] = extended(term.get("matchFields"), demands)


_TERMINATION_LOG: Final = "/dev/termination-log"
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"


def worker_pod(job: Job, new: NewPod, settings: PodSettings, *, store: str) -> dict[str, Any]:
    """Return the pod, ready to be created; it shares no data with the job.

    Args:
        job: the job of the pod.
        new: the pod of the plan.
        settings: the defaults for pods.
        store: host:port of the store, several with commas.
    """
    template = copy.deepcopy(dict(job.spec.template))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, new, template.get("metadata"), _metrics_port(job, settings)),
        "spec": _spec(job, new, settings, store, template.get("spec")),
    }


def _metrics_port(job: Job, settings: PodSettings) -> int:
    """Return the port of the agent's /metrics; 0 for any free port."""
    if job.spec.metrics_port is not None:
        return job.spec.metrics_port
    # Pods on the host's network share its ports.
    on_the_host = mapping(job.spec.template.get("spec")).get("hostNetwork") is True
    return 0 if on_the_host else settings.agent_metrics_port


def _metadata(job: Job, new: NewPod, given: object, metrics_port: int) -> object:
    defaults = {_DEFAULT_CONTAINER: WORKER}
    if metrics_port:
        defaults |= for_prometheus(metrics_port)
    metadata = completed(given, {"labels": common_labels(job, ROLE_WORKER), "annotations": defaults})
    if not isinstance(metadata, dict):
        return metadata
    own = {**own_labels(job, ROLE_WORKER), LABEL_INDEX: str(new.index), **gang_marks(job, "labels")}
    notes = {
        **gang_marks(job, "annotations"),
        ANNOTATION_PROTOCOL: str(PROTOCOL_VERSION),
        ANNOTATION_FAILURES: str(new.failures),
        **({} if new.failed is None else {ANNOTATION_FAILED: rfc3339(new.failed)}),
        ANNOTATION_SIZE: encode(new.size).decode(),
        **({ANNOTATION_METRICS_PORT: str(metrics_port)} if metrics_port else {}),
    }
    for key, ours in (("labels", own), ("annotations", notes)):
        if isinstance(metadata[key], dict):
            metadata[key] |= ours
    return {
        **metadata,
        "name": new.name,
        "namespace": job.namespace,
        "ownerReferences": extended(metadata.get("ownerReferences"), [owner_reference(job)]),
    }


def _spec(job: Job, new: NewPod, settings: PodSettings, store: str, given: object) -> object:
    defaults = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": SECCOMP,
        "terminationGracePeriodSeconds": ending_of(job.spec)[0],
    }
    pod = completed(given, defaults)
    if not isinstance(pod, dict):
        return pod
    pod |= {"restartPolicy": NEVER, "hostname": hostname(job.name, new.index)}
    schedule(pod, job.spec, excluded=new.excluded)
    containers = pod.get("containers")
    if containers is None or isinstance(containers, list):
        pod["containers"] = _containers(containers or [], _worker_in(pod, job, new, settings, store))
    return pod


def _containers(given: list[Any], worker: dict[str, Any]) -> list[Any]:
    """Return the template's containers; ours replaces the one with its name, or becomes the first."""
    for position, container in enumerate(given):
        if mapping(container).get("name") == WORKER:
            return [*given[:position], worker, *given[position + 1 :]]
    return [worker, *given]


def _worker_in(pod: dict[str, Any], job: Job, new: NewPod, settings: PodSettings, store: str) -> dict[str, Any]:
    """Return the worker container, and add the volumes that it needs to the pod."""
    given: Json = next((entry for entry in mappings(pod, "containers") if entry.get("name") == WORKER), {})
    container = completed_mapping(
        given, {"terminationMessagePath": _TERMINATION_LOG, "terminationMessagePolicy": "FallbackToLogsOnError"}
    )
    metrics_port = _metrics_port(job, settings)
    variables = agent_variables(
        job,
        new,
        store=store,
        checkpoints=f"{CHECKPOINT_FOLDER}/{job.name}/{new.index}",
        termination_log=str(container["terminationMessagePath"]),
        metrics_port=metrics_port,
    )
    container |= {
        "name": WORKER,
        "image": job.spec.image or given.get("image"),
        "command": [LAUNCHER],
        "args": list(agent_arguments(job.spec)),
        # The user's come last, so that they may refer to ours.
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": Env.NODE_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *copy.deepcopy([dict(entry) for entry in user_env(job.spec)]),
        ],
        "securityContext": restricted(given.get("securityContext")),
    }
    if metrics_port:
        port = {"name": METRICS_PORT, "containerPort": metrics_port, "protocol": "TCP"}
        container["ports"] = extended(given.get("ports"), [port])
    if (secret := job.spec.etcd.tls_secret) is not None:  # the agent reads them, and the workers may
        mount(pod, container, ETCD_TLS_FOLDER, "etcd-tls", {"secret": {"secretName": secret}}, read_only=True)
    mount(pod, container, "/dev/shm", "dshm", {"emptyDir": {"medium": "Memory"}})  # noqa: S108 - in a container
    mount(pod, container, "/tmp", "tmp", {"emptyDir": {}})  # noqa: S108
    checkpoints: Json = job.spec.checkpoint.volume or {"emptyDir": {}}
    mount(pod, container, CHECKPOINT_FOLDER, "checkpoints", copy.deepcopy(checkpoints))
    return container
