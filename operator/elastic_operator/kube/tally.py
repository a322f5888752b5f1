"""What a status that was written says of restarts, and of how long a job took to run; for the operator's metrics.

A status is written once however often it is tried, and remembers what it has accounted for. So what is read off the
difference between two of them is counted once, also by an operator that was started anew in between.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING, Final

from elastic_operator.model import Fate, JobState
from elastic_operator.names import ConditionType
from elastic_operator.plan.roster import Verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_operator.model import Job, JobStatus, Plan, Pod


class Cause(enum.StrEnum):
    """Why workers, or a pod, were started anew."""

    WORKER_FAILED = "worker_failed"
    """Workers, after a failure that was charged to the job."""
    FREE = "free"
    """Workers, for another reason: members that came or went, failures that the failure policy ignores."""
    POD_DIED = "pod_died"
    """A pod that ended by itself."""
    POD_OUT_OF_MEMORY = "pod_out_of_memory"
    POD_DISRUPTED = "pod_disrupted"
    """A pod that was preempted, drained or evicted."""
    NODE_LOST = "node_lost"
    NOT_ADMITTED = "not_admitted"
    """A pod for which its node had no room."""
    POD_LEFT = "pod_left"
    """A pod that somebody deleted, or whose agent was asked to leave."""


_BY_FATE: Final[Mapping[Fate | None, Cause]] = {
    Fate.OUT_OF_MEMORY: Cause.POD_OUT_OF_MEMORY,
    Fate.DISRUPTED: Cause.POD_DISRUPTED,
    Fate.NODE_LOST: Cause.NODE_LOST,
    Fate.NOT_ADMITTED: Cause.NOT_ADMITTED,
}


def restarts(job: Job, plan: Plan, pods: Iterable[Pod]) -> Mapping[Cause, int]:
    """What a plan whose status was written has accounted for.

    Args:
        job: with the status that it had before.
        plan: what was planned then.
        pods: all that exist, or existed just now.
    """
    if plan.status is None:
        return {}
    before, after = job.status, plan.status
    found = Counter(
        {
            Cause.WORKER_FAILED: after.restarts - before.restarts,
            Cause.FREE: after.free_restarts - before.free_restarts,
        }
    )
    news = after.accounted - before.accounted
    wanted_gone = {removal.uid for removal in plan.remove}
    found.update(_cause(pod) for pod in pods if pod.uid in news and (pod.phase.ended or pod.uid not in wanted_gone))
    return +found


def seconds_to_running(job: Job, status: JobStatus, now: float) -> float | None:
    """How long it took from the job's making until it trained; of one that was suspended first, from its resumption.

    Args:
        job: with the status that it had before.
        status: the one that was written.
        now: seconds since the Unix epoch.

    Returns:
        Seconds; None where it is not this status that says for the first time that it trains.
    """
    if job.status.started is not None or status.started is None or status.state is JobState.SUSPENDED:
        return None
    was_suspended = any(each.type == ConditionType.SUSPENDED for each in status.conditions)
    since = status.active if was_suspended and status.active is not None else job.created
    return max(now - since, 0.0)


def _cause(pod: Pod) -> Cause:
    if (cause := _BY_FATE.get(pod.fate)) is not None:
        return cause
    return Cause.POD_LEFT if verdict(pod) is Verdict.LEFT else Cause.POD_DIED
