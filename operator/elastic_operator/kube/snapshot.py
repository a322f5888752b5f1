"""What is shown of a job on a cluster, made of what its API server says: in the same shape as on one machine.

See :mod:`elastic_operator.local.snapshot` for that shape. Which ranks a pod has is known to the agents alone, so it is
left open here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from elastic_operator.kube.container_state import seconds
from elastic_operator.kube.observation import pod_of
from elastic_operator.unchecked import integer, text
from torchelastic.contract import bracketed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.model import Pod
    from elastic_operator.spec import Json


def snapshot_of(job: Json, pods: Iterable[Json] = (), events: Iterable[Json] = (), etcd: Json | None = None) -> Json:
    """What is known of a job.

    Args:
        job: the object.
        pods: its worker pods.
        events: what was told of it.
        etcd: its store: endpoint and state.
    """
    shown = object_of(job)
    status = shown.pop("status", {})
    return {
        "manifest": shown,
        "status": status,
        "pods": [_pod(pod) for pod in pods],
        "events": sorted((_event(event) for event in events), key=lambda event: float(event["time"])),
        "run": {"alive": True},
        "etcd": etcd,
    }


def object_of(job: Json) -> dict[str, Any]:
    """The object without what servers and tools keep in it for themselves."""
    metadata = {key: value for key, value in job["metadata"].items() if key != "managedFields"}
    return {**job, "metadata": metadata}


def _pod(obj: Json) -> Json:
    pod = pod_of(obj)
    return {
        "name": pod.name,
        "index": pod.index,
        "uid": pod.uid,
        "phase": pod.phase.value,
        "ready": pod.ready,
        "terminating": pod.terminating,
        "created": pod.created,
        "ended": pod.ended,
        "exitCode": pod.exit_code,
        "message": msgspec.to_builtins(pod.message),
        "ranks": None,
        "metricsUrl": _metrics_url(obj, pod),
        "node": text(obj, "spec", "nodeName"),
        "address": text(obj, "status", "podIP"),
        "note": _note(pod),
    }


def _metrics_url(obj: Json, pod: Pod) -> str | None:
    """Where the pod's agent shows metrics; None where that is not known, or not yet."""
    address = text(obj, "status", "podIP")
    return f"http://{bracketed(address)}:{pod.metrics_port}/metrics" if address and pod.metrics_port else None


def _note(pod: Pod) -> str:
    if pod.unfit is not None:
        return pod.unfit.message
    if pod.lingers:
        return "another container of it still runs"
    return pod.waiting


def _event(obj: Json) -> Json:
    times = (
        text(obj, "series", "lastObservedTime"),
        text(obj, "lastTimestamp"),
        text(obj, "eventTime"),
        text(obj, "firstTimestamp"),
        text(obj, "metadata", "creationTimestamp"),
    )
    return {
        "time": next((at for time in times if (at := seconds(time)) is not None), 0.0),
        "reason": text(obj, "reason"),
        "message": text(obj, "message"),
        "warning": text(obj, "type") == "Warning",
        "count": integer(obj, "series", "count") or integer(obj, "count") or 1,
    }
