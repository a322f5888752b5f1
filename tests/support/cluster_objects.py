"""Objects as an API server returns them: a job, its pods and its events."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

START = 1_700_000_000.0
"""When the job was created; 2023-11-14T22:13:20Z."""

NAMESPACE = "team"
JOB_UID = "0b0c7a52-8f0e-4c61-9a4e-6f0d5b0a9a11"


def timestamp(seconds: float) -> str:
    """Return the time this many seconds after the start, as Kubernetes writes it."""
    return datetime.fromtimestamp(START + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status(**changes: Any) -> dict[str, Any]:
    """Return the status of a job with three pods, one of which has just been created."""
    return {
        "state": "Running",
        "observedGeneration": 1,
        "replicas": 3,
        "readyReplicas": 2,
        "desired": 3,
        "readyDesired": "2/3",
        "selector": "elastic.pytorch.org/job=digits,elastic.pytorch.org/role=worker",
        "round": 4,
        "worldSize": 2,
        "restarts": 1,
        "podFailures": 1,
        "startTime": timestamp(3),
        "lastFailure": {"message": "rank 1 on digits-1-bbbbb was killed by SIGKILL"},
        "conditions": [
            {
                "type": "Running",
                "status": "True",
                "reason": "Training",
                "message": "2 workers train in round 4.",
                "lastTransitionTime": timestamp(4),
                "observedGeneration": 1,
            }
        ],
    } | changes


def job(name: str = "digits", **changes: Any) -> dict[str, Any]:
    """Return the ElasticJob. ``spec`` and ``status`` override default fields; ``status=None`` omits the status."""
    spec = {"minReplicas": 2, "maxReplicas": 3, "replicas": 3, "image": "elastic-agent:dev", "args": ["digits.py"]}
    status_changes = changes.pop("status", {})
    whole = {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": JOB_UID,
            "generation": 1,
            "creationTimestamp": timestamp(0),
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": spec | changes.pop("spec", {}),
    }
    return whole | ({} if status_changes is None else {"status": status(**status_changes)}) | changes


def pod(index: int, suffix: str, *, state: dict[str, Any] | None = None, **status_fields: Any) -> dict[str, Any]:
    """Return a worker pod of the job ``digits``.

    Args:
        index: the index of the pod.
        suffix: the suffix of its name.
        state: the state of its container ``worker``; None if the container runs.
        status_fields: fields of its status.
    """
    state = {"running": {"startedAt": timestamp(2)}} if state is None else state
    phase = "Running" if "running" in state else "Failed" if "terminated" in state else "Pending"
    worker = {"name": "worker", "image": "elastic-agent:dev", "ready": "running" in state, "state": state}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"digits-{index}-{suffix}",
            "namespace": NAMESPACE,
            "uid": f"uid-{suffix}",
            "creationTimestamp": timestamp(1),
            "labels": {
                "elastic.pytorch.org/job": "digits",
                "elastic.pytorch.org/role": "worker",
                "elastic.pytorch.org/index": str(index),
            },
            "ownerReferences": [{"kind": "ElasticJob", "name": "digits", "uid": JOB_UID, "controller": True}],
        },
        "spec": {"nodeName": "node-a", "containers": [{"name": "worker", "image": "elastic-agent:dev"}]},
        "status": {"phase": phase, "podIP": f"10.1.0.{index}", "containerStatuses": [worker], **status_fields},
    }


def terminated_state(code: int, message: str, *, after: float = 68) -> dict[str, Any]:
    """Return the state of a terminated container."""
    return {"terminated": {"exitCode": code, "reason": "Error", "message": message, "finishedAt": timestamp(after)}}


def event(after: float, message: str, **changes: Any) -> dict[str, Any]:
    """Return an event of the job, this many seconds after the start."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"digits.{after}", "namespace": NAMESPACE, "uid": f"event-{after}"},
        "involvedObject": {"kind": "ElasticJob", "name": "digits", "uid": JOB_UID},
        "type": "Normal",
        "reason": "Round",
        "message": message,
        "firstTimestamp": timestamp(after),
        "lastTimestamp": timestamp(after),
        "count": 1,
    } | changes
