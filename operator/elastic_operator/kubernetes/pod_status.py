"""Converts a pod's object into the planner's :class:`Pod`.

The state of the container ``worker`` decides, not the pod's phase: a sidecar may still run. Only if the pod as a whole
is over (evicted, rejected by its node, its node lost, deleted before it had one) has it ended in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.constants import (
    ANNOTATION_FAILED,
    ANNOTATION_FAILURES,
    ANNOTATION_METRICS_PORT,
    ANNOTATION_SIZE,
    LABEL_INDEX,
    OWN_PREFIX,
)
from elastic_operator.api.json_access import mapping, mappings, text
from elastic_operator.api.template import WORKER
from elastic_operator.api.validation import Pet
from elastic_operator.controller.model import Pod, PodPhase, TerminationCause
from elastic_operator.kubernetes import pod_messages
from elastic_operator.kubernetes.container_state import (
    OUT_OF_MEMORY,
    ContainerState,
    conditions_of,
    container_states,
    disruption_of,
    is_leaving,
    is_over,
    is_over_its_limit,
    node_is_silent,
    seconds,
)
from torchelastic.errors import MalformedRecord
from torchelastic.protocol import SizeRecord, TerminationMessage, decode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.api.spec import Json

MAX_PORT: Final = 65535

_MAX_NUMBER: Final = 1_000_000
_NODE_LOST: Final = "NodeLost"
_NODE_DELETED: Final = "DeletionByPodGC"
_ENDED_BY_NODE: Final = frozenset({"Evicted", "Preempting", "Terminated", "Shutdown"})
"""Reasons of kubelets that end a pod: lack of a resource, a critical pod, a shutdown."""
_NOT_ADMITTED: Final = frozenset(
    {
        "InvalidNodeInfo",
        "NodeAffinity",
        "NodePorts",
        "NodeShutdown",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
    }
)
"""Reasons of kubelets that reject a scheduled pod, beside ``OutOf<resource>``. Other reasons, such as SysctlForbidden,
would be the same on the next node."""

_SPEC_FIELDS: Final = ("nodeName", "schedulerName", "schedulingGates", "readinessGates")
_METADATA_FIELDS: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
)


def worker_of(pod: Json) -> ContainerState:
    """The state of the worker container."""
    states = container_states(pod)
    return next((state for state in states if state.name == WORKER), ContainerState(WORKER, waiting={}))


def pod_of(body: Json) -> Pod:
    """Convert a pod, whatever its object says."""
    worker = worker_of(body)
    phase = _phase(body, worker)
    annotations = mapping(body, "metadata", "annotations")
    message = pod_messages.last_message(body, worker) if phase.ended else None
    waiting = ""
    if phase is PodPhase.PENDING:
        waiting = pod_messages.why_waiting(body)
    elif not phase.ended:
        waiting = pod_messages.why_not_ready(body, worker)
    return Pod(
        name=text(body, "metadata", "name"),
        uid=text(body, "metadata", "uid"),
        index=_index(body),
        phase=phase,
        ready=worker.ready,
        terminating=is_leaving(body),
        deletion_deadline=seconds(mapping(body, "metadata").get("deletionTimestamp")),
        created=seconds(mapping(body, "metadata").get("creationTimestamp")) or 0.0,
        started=worker.started,
        ended=_ended(body, worker) if phase.ended else None,
        exit_code=worker.exit_code,
        init_exit_code=pod_messages.init_exit_code(body) if phase.ended and worker.terminated is None else None,
        message=message,
        failures=_number(text(annotations, ANNOTATION_FAILURES)) or 0,
        failed=seconds(annotations.get(ANNOTATION_FAILED)),
        size=_size(text(annotations, ANNOTATION_SIZE)),
        waiting=waiting,
        incompatible_image=pod_messages.incompatible_image(body, worker),
        sidecars_running=phase.ended and _sidecars_run(body),
        node=text(body, "spec", "nodeName"),
        termination_cause=termination_cause_of(body, worker, message),
        reasons=reasons_of(body, worker),
        conditions=conditions_of(body),
        metrics_port=_port(text(annotations, ANNOTATION_METRICS_PORT)),
    )


def termination_cause_of(
    pod: Json, worker: ContainerState, message: TerminationMessage | str | None
) -> TerminationCause | None:
    """Why a pod has ended or is leaving, if that is not its agent's doing.

    Kubernetes says it in four places: the reason of the pod's status, the condition DisruptionTarget, the reason of the
    container's end, and, for a pod on a lost node, a condition Ready that no longer follows from the others.
    """
    if worker.exit_code == 0:
        return None
    if worker.terminated is None and not is_over(pod) and not is_leaving(pod):
        return None
    disruption = disruption_of(pod)
    reason = text(pod, "status", "reason")
    if reason == _NODE_LOST or text(disruption, "reason") == _NODE_DELETED or node_is_silent(pod, worker):
        return TerminationCause.NODE_LOST
    if disruption is not None:
        return TerminationCause.DISRUPTED
    if is_over(pod) and worker.started is None and (reason in _NOT_ADMITTED or reason.startswith("OutOf")):
        return TerminationCause.NOT_ADMITTED
    if reason in _ENDED_BY_NODE:
        return TerminationCause.OVER_LIMIT if is_over_its_limit(pod) else TerminationCause.DISRUPTED
    # An old kernel kills a single process only; then the agent restarts it, or says what happened.
    if text(worker.terminated, "reason") == OUT_OF_MEMORY and not isinstance(message, TerminationMessage):
        return TerminationCause.OUT_OF_MEMORY
    return None


def reasons_of(pod: Json, worker: ContainerState) -> frozenset[str]:
    """The reasons for which a pod ended, or is to be removed."""
    ended = text(worker.terminated, "reason")
    reasons = {text(pod, "status", "reason"), text(disruption_of(pod), "reason")}
    if not (worker.exit_code == 0 and ended == OUT_OF_MEMORY):
        reasons.add(ended)
    return frozenset(reasons - {""})


def etcd_address_of(pod: Json) -> str | None:
    """The address at which a pod looks for the job's own etcd."""
    for container in mappings(pod, "spec", "containers"):
        for entry in mappings(container, "env"):
            endpoint = text(entry, "value")
            if container.get("name") == WORKER and entry.get("name") == Pet.RDZV_ENDPOINT and ":" in endpoint:
                return endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]") or None
    return None


def trimmed_pod(pod: Json) -> dict[str, Any]:
    """The fields of a pod that the operator reads, a tenth of the whole."""
    metadata = mapping(pod, "metadata")
    return {
        "metadata": {
            **_only(metadata, _METADATA_FIELDS),
            "labels": _ours(mapping(metadata, "labels")),
            "annotations": _ours(mapping(metadata, "annotations")),
        },
        "spec": {
            **_only(mapping(pod, "spec"), _SPEC_FIELDS),
            "containers": [_trimmed_container(container) for container in mappings(pod, "spec", "containers")],
            "initContainers": [
                _only(container, ("name", "image", "restartPolicy"))
                for container in mappings(pod, "spec", "initContainers")
            ],
        },
        "status": {
            **_only(mapping(pod, "status"), ("phase", "reason", "message")),
            "conditions": [
                _only(entry, ("type", "status", "reason", "message", "lastTransitionTime"))
                for entry in mappings(pod, "status", "conditions")
            ],
            **{
                kind: [_only(entry, ("name", "state", "lastState", "ready")) for entry in mappings(pod, "status", kind)]
                for kind in ("containerStatuses", "initContainerStatuses")
            },
        },
    }


def _phase(pod: Json, worker: ContainerState) -> PodPhase:
    if worker.terminated is not None:
        return PodPhase.SUCCEEDED if worker.exit_code == 0 else PodPhase.FAILED
    if is_over(pod) or _never_runs(pod):
        # Even if the pod's phase is Succeeded: only the agent says that the run has succeeded.
        return PodPhase.FAILED
    return PodPhase.PENDING if worker.running is None else PodPhase.RUNNING


def _never_runs(pod: Json) -> bool:
    """Whether the pod is being deleted without a node, which it no longer gets; a finalizer may keep it for long."""
    return is_leaving(pod) and not text(pod, "spec", "nodeName")


def _ended(pod: Json, worker: ContainerState) -> float | None:
    """When the worker container ended; if it does not say, when the pod's conditions last changed."""
    if worker.ended is not None:
        return worker.ended
    if _never_runs(pod):
        return seconds(mapping(pod, "metadata").get("deletionTimestamp"))
    changes = (seconds(entry.get("lastTransitionTime")) for entry in mappings(pod, "status", "conditions"))
    return max((time for time in changes if time is not None), default=None)


def _sidecars_run(pod: Json) -> bool:
    """Whether another container still runs; the kubelet itself ends sidecars among the init containers."""
    return any(state.running is not None and state.name != WORKER for state in container_states(pod))


def _index(pod: Json) -> int:
    """The pod's index from its label, or else from its name."""
    index = _number(text(pod, "metadata", "labels", LABEL_INDEX))
    if index is None:
        index = _number(text(pod, "metadata", "name").rpartition("-")[0].rpartition("-")[2])
    return index or 0


def _number(digits: str) -> int | None:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MAX_NUMBER))):
        return None
    return min(int(digits), _MAX_NUMBER)


def _port(digits: str) -> int:
    port = _number(digits) or 0
    return port if port <= MAX_PORT else 0


def _size(record: str) -> SizeRecord | None:
    try:
        return decode(record.encode(errors="replace"), SizeRecord)
    except MalformedRecord:
        return None


def _trimmed_container(container: Json) -> dict[str, Any]:
    endpoint = [entry for entry in mappings(container, "env") if entry.get("name") == Pet.RDZV_ENDPOINT]
    return {**_only(container, ("name", "image")), **({"env": endpoint} if endpoint else {})}


def _only(body: Json, keys: Iterable[str]) -> dict[str, Any]:
    return {key: body[key] for key in keys if key in body}


def _ours(notes: Json) -> dict[str, Any]:
    return {key: value for key, value in notes.items() if str(key).startswith(OWN_PREFIX)}
