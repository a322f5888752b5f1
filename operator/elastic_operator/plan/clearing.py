"""What is cleared away of a job that has finished, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.model import PodPhase
from elastic_operator.names import ConditionType, Reason
from elastic_operator.spec import CleanPodPolicy

if TYPE_CHECKING:
    from elastic_operator.model import JobStatus, Pod
    from elastic_operator.plan.roster import Roster
    from elastic_operator.spec import ElasticJobSpec

FAREWELL: Final = 30.0
"""Seconds in which agents that know of the run's end may end by themselves: a pod that ended keeps its log, one that is
removed loses it."""


@dataclass(frozen=True, slots=True)
class Clearance:
    """What is cleared away of a finished job.

    Attributes:
        remove: pods.
        etcd: whether the store is still needed.
        job: whether the job itself goes.
        wake_at: when there will be more to clear away.
    """

    remove: tuple[Pod, ...]
    etcd: bool
    job: bool
    wake_at: float | None


def clear_away(spec: ElasticJobSpec, status: JobStatus, roster: Roster, now: float) -> Clearance:
    """What to clear away of a job with this status, now.

    Agents that know of the end get a while to end by themselves, and can read it in the store until then. Of pods that
    have ended the policy decides, for their logs go with them. What is to go with the job waits for the agents, too.
    """
    completed = status.completed or 0.0
    patience_ends = completed + FAREWELL
    # A time that is still to come is by another clock, and nobody knows how long to wait.
    patient = completed <= now < patience_ends
    waiting = patient and bool(roster.unfinished)
    expires = None if spec.ttl_after_finished is None else completed + spec.ttl_after_finished
    expired = expires is not None and now >= expires
    later = [time for time in (patience_ends if waiting else None, None if expired else expires) if time is not None]
    return Clearance(
        remove=_to_remove(spec.clean_pod_policy, roster, patient=patient and _agents_know(status)),
        etcd=waiting,
        job=expired and not waiting,
        wake_at=min(later, default=None),
    )


def _to_remove(policy: CleanPodPolicy, roster: Roster, *, patient: bool) -> tuple[Pod, ...]:
    if policy is CleanPodPolicy.NONE:
        return ()
    remains = roster.ended if policy is CleanPodPolicy.ALL else roster.lingering
    return (*(pod for pod in roster.live if not (patient and pod.phase is PodPhase.RUNNING)), *remains)


def _agents_know(status: JobStatus) -> bool:
    return any(
        condition.type == ConditionType.FINISHED and condition.reason in (Reason.RUN_SUCCEEDED, Reason.RUN_FAILED)
        for condition in status.conditions
    )
