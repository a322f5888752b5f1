"""What the objects of the API server say, in the words of the plan.

The state of the container ``worker`` decides where a pod stands, not the phase of the pod: a sidecar may go on running.
Only where a pod is over as a whole (evicted, refused by its node, its node lost, deleted before it had one) it has
ended, whatever is said of ``worker``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.archived import modern
from elastic_operator.errors import BadInput
from elastic_operator.kube.advice import with_advice
from elastic_operator.kube.container_state import ContainerState, container_states, is_over, seconds
from elastic_operator.kube.pod_fate import conditions_of, fate_of, reasons_of
from elastic_operator.kube.pod_words import init_exit_code, last_message, why_not_ready, why_unfit, why_waiting
from elastic_operator.kube.spec_shape import misfit_of
from elastic_operator.model import EtcdState, Job, Pod, PodPhase
from elastic_operator.names import (
    ANNOTATION_FAILED,
    ANNOTATION_FAILURES,
    ANNOTATION_METRICS_PORT,
    ANNOTATION_SIZE,
    LABEL_INDEX,
    OWN_PREFIX,
)
from elastic_operator.pods import Pet
from elastic_operator.spec import ElasticJobSpec
from elastic_operator.status_json import status_from_json
from elastic_operator.template import WORKER
from elastic_operator.unchecked import integer, mapping, mappings, text
from torchelastic.contract import SizeRecord, decode
from torchelastic.errors import MalformedRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.spec import Json

_LARGEST: Final = 1_000_000
LAST_PORT: Final = 65535
_SPEC_KEPT: Final = ("nodeName", "schedulerName", "schedulingGates", "readinessGates")
_METADATA_KEPT: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
)


def pod_of(obj: Json) -> Pod:
    """A pod, whatever its object says."""
    worker = _worker(obj)
    phase = _phase(obj, worker)
    annotations = mapping(obj, "metadata", "annotations")
    message = last_message(obj, worker) if phase.ended else None
    return Pod(
        name=text(obj, "metadata", "name"),
        uid=text(obj, "metadata", "uid"),
        index=_index(obj),
        phase=phase,
        ready=worker.ready,
        terminating=bool(text(obj, "metadata", "deletionTimestamp")),
        due_to_go=seconds(mapping(obj, "metadata").get("deletionTimestamp")),
        created=seconds(mapping(obj, "metadata").get("creationTimestamp")) or 0.0,
        started=worker.started,
        ended=_ended(obj, worker) if phase.ended else None,
        exit_code=worker.exit_code,
        init_exit_code=init_exit_code(obj) if phase.ended and worker.terminated is None else None,
        message=message,
        failures=_number(text(annotations, ANNOTATION_FAILURES)) or 0,
        failed=seconds(annotations.get(ANNOTATION_FAILED)),
        size=_size(text(annotations, ANNOTATION_SIZE)),
        waiting="" if phase.ended else why_waiting(obj) if phase is PodPhase.PENDING else why_not_ready(obj, worker),
        unfit=why_unfit(obj, worker),
        lingers=phase.ended and _others_run(obj),
        node=text(obj, "spec", "nodeName"),
        fate=fate_of(obj, worker, message),
        reasons=reasons_of(obj, worker),
        conditions=conditions_of(obj),
        metrics_port=_port(text(annotations, ANNOTATION_METRICS_PORT)),
    )


def job_of(obj: Json) -> Job:
    """A job.

    Raises:
        BadInput: it was stored under another definition than this operator's, or its status is not one that it writes.
    """
    metadata = mapping(obj, "metadata")
    name = text(metadata, "name")
    spec = obj.get("spec")
    misfit = misfit_of(modern(spec) if isinstance(spec, dict) else spec)
    if misfit is not None:
        raise BadInput(
            f"the spec of the job {name} is not as this operator's definition has it ({misfit}); update the definition "
            "(crds/elasticjob.yaml), or the job"
        )
    return Job(
        name=name,
        namespace=text(metadata, "namespace"),
        uid=text(metadata, "uid"),
        generation=integer(metadata, "generation") or 0,
        spec=ElasticJobSpec.of(obj["spec"]),
        status=status_from_json(obj.get("status")),
        created=seconds(metadata.get("creationTimestamp")) or 0.0,
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def etcd_state(service: Json | None, deployment: Json | None) -> EtcdState:
    """Where a job's own etcd stands; one whose deletion has begun, or of which a part is missing, is absent.

    Args:
        service: its service; None where there is none.
        deployment: its deployment; None where there is none.
    """
    for obj in (service, deployment):
        if obj is None or mapping(obj, "metadata").get("deletionTimestamp"):
            return EtcdState.ABSENT
    seen = (integer(deployment, "status", "observedGeneration") or 0) >= (
        integer(deployment, "metadata", "generation") or 0
    )
    ready = (integer(deployment, "status", "readyReplicas") or 0) > 0
    return EtcdState.READY if seen and ready else EtcdState.STARTING


def etcd_hindrance(deployment: Json | None) -> str | None:
    """Why the pod of a job's etcd can't be made for now (a quota, a policy), in the cluster's words; else None."""
    for condition in mappings(deployment, "status", "conditions"):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return with_advice(text(condition, "message") or text(condition, "reason")) or None
    return None


def told_cluster_ip(obj: Json) -> str | None:
    """The address at which a pod looks for the etcd of its own job; None where it was told none."""
    for container in mappings(obj, "spec", "containers"):
        for entry in mappings(container, "env"):
            endpoint = text(entry, "value")
            if container.get("name") == WORKER and entry.get("name") == Pet.RDZV_ENDPOINT and ":" in endpoint:
                return endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]") or None
    return None


def trimmed_pod(obj: Json) -> dict[str, Any]:
    """As much of a pod's object as is read of it here, some tenth of the whole."""
    metadata = mapping(obj, "metadata")
    return {
        "metadata": {
            **_only(metadata, _METADATA_KEPT),
            "labels": _ours(mapping(metadata, "labels")),
            "annotations": _ours(mapping(metadata, "annotations")),
        },
        "spec": {
            **_only(mapping(obj, "spec"), _SPEC_KEPT),
            "containers": [_trimmed_container(container) for container in mappings(obj, "spec", "containers")],
            "initContainers": [
                _only(container, ("name", "image", "restartPolicy"))
                for container in mappings(obj, "spec", "initContainers")
            ],
        },
        "status": {
            **_only(mapping(obj, "status"), ("phase", "reason", "message")),
            "conditions": [
                _only(entry, ("type", "status", "reason", "message", "lastTransitionTime"))
                for entry in mappings(obj, "status", "conditions")
            ],
            **{
                kind: [_only(entry, ("name", "state", "lastState", "ready")) for entry in mappings(obj, "status", kind)]
                for kind in ("containerStatuses", "initContainerStatuses")
            },
        },
    }


def _trimmed_container(container: Json) -> dict[str, Any]:
    told = [entry for entry in mappings(container, "env") if entry.get("name") == Pet.RDZV_ENDPOINT]
    return {**_only(container, ("name", "image")), **({"env": told} if told else {})}


def _only(obj: Json, keys: Iterable[str]) -> dict[str, Any]:
    return {key: obj[key] for key in keys if key in obj}


def _ours(notes: Json) -> dict[str, Any]:
    return {key: value for key, value in notes.items() if str(key).startswith(OWN_PREFIX)}


def _worker(obj: Json) -> ContainerState:
    states = container_states(obj)
    return next((state for state in states if state.name == WORKER), ContainerState(WORKER, waiting={}))


def _phase(obj: Json, worker: ContainerState) -> PodPhase:
    if worker.terminated is not None:
        return PodPhase.SUCCEEDED if worker.exit_code == 0 else PodPhase.FAILED
    if is_over(obj) or _never_runs(obj):
        # Also where the pod is called succeeded: that the run has succeeded is for its agent to say.
        return PodPhase.FAILED
    return PodPhase.PENDING if worker.running is None else PodPhase.RUNNING


def _never_runs(obj: Json) -> bool:
    """Whether the pod is being deleted and has no node, which it gets no more; a finalizer may hold it for long."""
    return bool(text(obj, "metadata", "deletionTimestamp")) and not text(obj, "spec", "nodeName")


def _ended(obj: Json, worker: ContainerState) -> float | None:
    """When the worker container ended; where it doesn't say, when the pod's conditions last changed."""
    if worker.ended is not None:
        return worker.ended
    if _never_runs(obj):
        return seconds(mapping(obj, "metadata").get("deletionTimestamp"))
    changes = (seconds(entry.get("lastTransitionTime")) for entry in mappings(obj, "status", "conditions"))
    return max((time for time in changes if time is not None), default=None)


def _others_run(obj: Json) -> bool:
    """Whether another container goes on; the kubelet itself ends those that stand among the init containers."""
    return any(state.running is not None and state.name != WORKER for state in container_states(obj))


def _index(obj: Json) -> int:
    """The pod's place, from its label; from its name, where somebody has changed the label."""
    index = _number(text(obj, "metadata", "labels", LABEL_INDEX))
    if index is None:
        index = _number(text(obj, "metadata", "name").rpartition("-")[0].rpartition("-")[2])
    return index or 0


def _number(digits: str) -> int | None:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(_LARGEST))):
        return None
    return min(int(digits), _LARGEST)


def _port(digits: str) -> int:
    port = _number(digits) or 0
    return port if port <= LAST_PORT else 0


def _size(record: str) -> SizeRecord | None:
    try:
        return decode(record.encode(errors="replace"), SizeRecord)
    except MalformedRecord:
        return None
