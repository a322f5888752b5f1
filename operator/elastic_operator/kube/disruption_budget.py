"""The PodDisruptionBudget of a job: drains and other evictions never leave fewer workers than its minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_operator.kube.ownership import common_labels, own_labels, owner_reference
from elastic_operator.kube.resources import DISRUPTION_BUDGETS
from elastic_operator.names import ROLE_WORKER

if TYPE_CHECKING:
    from elastic_operator.model import Job


def budget_name(job: Job) -> str:
    """What the disruption budget of a job is called."""
    return f"{job.name}-workers"


def disruption_budget(job: Job, guarded: int) -> dict[str, Any]:
    """The disruption budget, ready to be applied.

    Args:
        job: to which it belongs.
        guarded: how many of its workers no eviction may touch.
    """
    return {
        "apiVersion": DISRUPTION_BUDGETS.api_version,
        "kind": DISRUPTION_BUDGETS.kind,
        "metadata": {
            "name": budget_name(job),
            "namespace": job.namespace,
            "labels": {**common_labels(job, ROLE_WORKER), **own_labels(job, ROLE_WORKER)},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            # A percentage would be one of the scale's replicas, which an elastic job need not have.
            "minAvailable": guarded,
            "selector": {"matchLabels": own_labels(job, ROLE_WORKER)},
            # A worker that does not even run holds up no drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
