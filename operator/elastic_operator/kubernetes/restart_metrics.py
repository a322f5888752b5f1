"""Counts restarts, and the time until a job trains, from the difference of two written statuses.

A status is written once and remembers what it counts, so nothing is counted twice, even across operator restarts.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import TerminationCause
from elastic_operator.controller.pods import PodEnd, pod_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, Plan, Pod


class Cause(enum.StrEnum):
    """Why workers, or a pod, were restarted."""

    WORKER_FAILED = "worker_failed"
    """Workers, after a failure that counts."""
    FREE = "free"
    """Workers, for another reason: members that came or went, failures that the failure policy ignores."""
    POD_DIED = "pod_died"
    POD_OUT_OF_MEMORY = "pod_out_of_memory"
    POD_DISRUPTED = "pod_disrupted"
    """A pod that was preempted, drained or evicted."""
    NODE_LOST = "node_lost"
    NOT_ADMITTED = "not_admitted"
    """A pod for which its node had no room."""
    POD_LEFT = "pod_left"
    """A pod that somebody deleted, or whose agent was asked to leave."""


_BY_TERMINATION: Final[Mapping[TerminationCause | None, Cause]] = {
    TerminationCause.OUT_OF_MEMORY: Cause.POD_OUT_OF_MEMORY,
    TerminationCause.DISRUPTED: Cause.POD_DISRUPTED,
    TerminationCause.NODE_LOST: Cause.NODE_LOST,
    TerminationCause.NOT_ADMITTED: Cause.NOT_ADMITTED,
}


def restarts(job: Job, plan: Plan, pods: Iterable[Pod]) -> Mapping[Cause, int]:
    """Count the restarts that a written status accounts for.

    Args:
        job: with the status that it had before.
        plan: with the new status.
        pods: all that exist, or existed just now.
    """
    if plan.status is None:
        return {}
    before, after = job.status, plan.status
    found = Counter(
        {
            Cause.WORKER_FAILED: after.restarts - before.restarts,
            Cause.FREE: after.uncharged_restarts - before.uncharged_restarts,
        }
    )
    counted = after.counted_pod_uids - before.counted_pod_uids
    removed = {removal.uid for removal in plan.remove}
    found.update(_cause(pod) for pod in pods if pod.uid in counted and (pod.phase.ended or pod.uid not in removed))
    return +found


def seconds_to_running(job: Job, status: JobStatus, now: float) -> float | None:
    """Seconds from a job's creation, or from the resumption of one created suspended, until it trained.

    Args:
        job: with the status that it had before.
        status: the new one.
        now: seconds since the Unix epoch.

    Returns:
        None if it is not this status that says so for the first time.
    """
    if job.status.started is not None or status.started is None or status.state is JobState.SUSPENDED:
        return None
    was_suspended = any(each.type == ConditionType.SUSPENDED for each in status.conditions)
    since = status.active if was_suspended and status.active is not None else job.created
    return max(now - since, 0.0)


def _cause(pod: Pod) -> Cause:
    if (cause := _BY_TERMINATION.get(pod.termination_cause)) is not None:
        return cause
    return Cause.POD_LEFT if pod_end(pod) is PodEnd.LEFT else Cause.POD_DIED
