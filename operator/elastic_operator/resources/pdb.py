"""The PodDisruptionBudget of a job: drains and other evictions never leave fewer workers than its minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_operator.api.constants import ROLE_WORKER
from elastic_operator.resources.metadata import own_labels, own_metadata

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job


def budget_name(job: Job) -> str:
    """What the disruption budget of a job is called."""
    return f"{job.name}-workers"


def disruption_budget(job: Job, min_available: int) -> dict[str, Any]:
    """The PodDisruptionBudget object."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": own_metadata(job, budget_name(job), ROLE_WORKER),
        "spec": {
            # A percentage would be one of the scale's replicas, which an elastic job need not have.
            "minAvailable": min_available,
            "selector": {"matchLabels": own_labels(job, ROLE_WORKER)},
            # A worker that does not even run holds up no drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
