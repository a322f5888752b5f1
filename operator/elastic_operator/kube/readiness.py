"""Which of a job's pods are ready, where Kubernetes says that they run: those whose agents serve."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_operator.model import PodPhase

if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_operator.model import Job, Pod
    from elastic_operator.store_mirror import StoreMirror


def serving(job: Job, mirror: StoreMirror | None) -> Collection[str] | None:
    """The pods whose agents serve, by name; None: all that run.

    Where the store can't be read, those whose agents have ever been there are taken for serving: training goes on
    without the store. Where nothing is known of them at all, all are, once training has started.
    """
    if mirror is not None and mirror.readable:
        return {node.name for node in mirror.nodes.values()}
    if mirror is not None and mirror.names:
        return set(mirror.names.values())
    return None if job.status.started is not None else ()


def if_serving(pod: Pod, names: Collection[str] | None) -> Pod:
    """A pod, which is ready only if its agent serves; ``names`` are as :func:`serving` gives them."""
    return replace(pod, ready=False) if pod.ready and names is not None and pod.name not in names else pod


def explained(pod: Pod, trouble: str | None) -> Pod:
    """A pod that runs and is not ready, with what may keep it from that: its agent looks for the same store."""
    if trouble is None or pod.ready or pod.phase is not PodPhase.RUNNING:
        return pod
    return replace(pod, waiting=pod.waiting or trouble)
