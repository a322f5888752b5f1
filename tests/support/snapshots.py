"""Snapshots of a local run, as its control socket sends them."""

from __future__ import annotations

from typing import Any

import msgspec

from elastic_operator.views.job_view import JobView
from tests.support.cluster_objects import START, status

RUN = "digits-20231114-221320-3f2a"
FOLDER = f"/var/lib/elasticjob/runs/{RUN}"


def pod(index: int, suffix: str, **changes: Any) -> dict[str, Any]:
    """Return a pod that trains as the rank of its index."""
    name = f"digits-{index}-{suffix}"
    return {
        "name": name,
        "index": index,
        "uid": f"uid-{suffix}",
        "pid": 48200 + index,
        "phase": "Running",
        "ready": True,
        "terminating": False,
        "created": START,
        "ended": None,
        "exitCode": None,
        "message": "",
        "ranks": [index],
        "logDir": f"{FOLDER}/logs/{name}",
        "metricsUrl": f"http://127.0.0.1:{9000 + index}/metrics",
    } | changes


def event(at: float, message: str, *, reason: str = "Round", warning: bool = False) -> dict[str, Any]:
    """Return an event, ``at`` seconds after the start."""
    return {"time": START + at, "reason": reason, "message": message, "warning": warning}


KILLED = "rank 1 on digits-1-bbbbb was killed by SIGKILL; 3 workers go on from the last checkpoint."


def snapshot(**changes: Any) -> dict[str, Any]:
    """Return a job of three pods, one of which was killed and is being replaced, 72 s after its start.

    Args:
        changes: replaced parts; those of ``status``, ``run`` and ``spec`` are merged with the defaults.
    """
    run = {
        "id": RUN,
        "directory": FOLDER,
        "logs": f"{FOLDER}/logs",
        "checkpoints": f"{FOLDER}/checkpoints",
        "pid": 48100,
        "manifestPath": "/home/ada/examples/digits.yaml",
        "alive": True,
        "ended": None,
    }
    spec = {"minReplicas": 2, "maxReplicas": 3, "replicas": 3, "args": ["digits.py"]}
    whole = {
        "manifest": {
            "apiVersion": "elastic.pytorch.org/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {
                "name": "digits",
                "namespace": "default",
                "uid": "0f4c",
                "generation": 2,
                "creationTimestamp": "2023-11-14T22:13:20Z",
            },
            "spec": spec | changes.pop("spec", {}),
        },
        "status": status(**{"observedGeneration": 2, **changes.pop("status", {})}),
        "pods": [
            pod(0, "aaaaa"),
            pod(1, "bbbbb"),
            pod(2, "ddddd", created=START + 69, ready=False, ranks=[]),
            pod(2, "ccccc", phase="Failed", ready=False, ended=START + 68, exitCode=137, ranks=[]),
        ],
        "events": [
            event(3, "round 1: 3 workers on 3 pods."),
            event(50, KILLED, reason="Round", warning=True),
            event(68, "digits-2-ccccc was killed by SIGKILL.", reason="PodDied", warning=True),
        ],
        "run": run | changes.pop("run", {}),
        "etcd": {"pid": 48105, "endpoint": "127.0.0.1:40123", "restarts": 0},
        "progress": {"line": "epoch 12/120  step 612/1348  loss 0.213  3.1k samples/s", "time": START + 71},
    }
    return whole | changes


def view(**changes: Any) -> JobView:
    """Return the same job as a view for commands."""
    return msgspec.convert(snapshot(**changes), JobView)
