"""The PodDisruptionBudget of a job: drains and other evictions never leave fewer workers than its minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_operator.kube.ownership import own_labels, own_metadata
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
        "metadata": own_metadata(job, budget_name(job), ROLE_WORKER),
        "spec": {
            # A percentage would be one of the scale's replicas, which an elastic job need not have.
            "minAvailable": guarded,
            "selector": {"matchLabels": own_labels(job, ROLE_WORKER)},
            # A worker that does not even run holds up no drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
