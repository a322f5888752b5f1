"""What a plan starts from: the job, its pods by state, the spec in effect, and what its store may still tell.

The pods of a job are made from the spec that was applied when the job was started or resumed. A change of the template
would otherwise reach only the pods that are created after it, and two kinds of pods would train together. The applied
spec is fixed once there is a pod, or training has begun. A change takes effect when the job is suspended and resumed.

While the store has not been read, no pod is created for a run without pods, no unread store is deleted, and no pod
failure or deadline ends the job: the run may have ended before. A store that stays unreadable delays failures,
deadlines and suspensions by :data:`PATIENCE` at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import changed_fields
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import EtcdState, TerminationCause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.api.spec import AppliedSpec, ElasticJobSpec
    from elastic_operator.controller.model import Job, Observed, Plan, Pod

PATIENCE: Final = 60.0
"""Seconds to wait for a store that cannot be read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of a plan.

    Attributes:
        job: the job, with the spec in effect and the status that was written last.
        observed: what was observed of it.
        now: seconds since the Unix epoch.
        live: the pods that neither have ended nor terminate.
        gone: the others: those that are being deleted, ended or not, and then those that ended.
        ended: those that ended and are kept, for their log or until a successor exists.
        unfinished: those whose agent may still run; a terminating pod on a lost node does not count.
        never_read: whether nothing is known of the run from its store.
        outcome_unknown: whether the run may have ended without the operator knowing: the job had pods, has none, and
            its store has not been read.
        store_wait: seconds for which to wait for the store before deciding on something that happened.
    """

    job: Job
    observed: Observed
    now: float
    live: tuple[Pod, ...]
    gone: tuple[Pod, ...]
    ended: tuple[Pod, ...]
    unfinished: tuple[Pod, ...]
    never_read: bool
    outcome_unknown: bool
    store_wait: float

    @classmethod
    def of(cls, job: Job, observed: Observed, now: float) -> Self:
        """Sort what was observed."""
        live: list[Pod] = []
        terminating: list[Pod] = []
        ended: list[Pod] = []
        for pod in sorted(observed.pods, key=lambda pod: (pod.index, pod.created, pod.uid)):
            (terminating if pod.terminating else ended if pod.phase.ended else live).append(pod)
        leaving = [pod for pod in terminating if pod.termination_cause is not TerminationCause.NODE_LOST]
        # A store that is forbidden to the operator is not waited for: the agents will read it.
        unread = not observed.store_read and not observed.store_forbidden
        return cls(
            job,
            observed,
            now,
            live=tuple(live),
            gone=(*terminating, *ended),
            ended=tuple(ended),
            unfinished=(*live, *(pod for pod in leaving if not pod.phase.ended)),
            never_read=unread and observed.round is None,
            outcome_unknown=unread and not live and _had_pods(job, observed),
            store_wait=_store_wait(job, observed) if unread else 0.0,
        )

    def store_may_tell(self, since: float) -> bool:
        """Whether to wait for the store before deciding on something that happened at ``since``."""
        return self.store_wait == math.inf or since <= self.now < since + self.store_wait

    def store_needed_until(self) -> float | None:
        """Until when the store of a suspended job without agents is kept to be read; None if it need not be."""
        if self.unfinished or not self.outcome_unknown:
            return None
        status, since = self.job.status, self.now
        waiting = status.condition(ConditionType.WAITING) if status.state is JobState.SUSPENDED else None
        if waiting is not None and waiting.status and waiting.reason == Reason.STORE_UNREADABLE:
            since = waiting.since
        return since + PATIENCE if self.store_may_tell(since) else None


@dataclass(frozen=True, slots=True)
class SpecInEffect:
    """The spec that applies to a job.

    Attributes:
        spec: the user's spec with the applied values.
        applied: what the status is to keep; None if nothing is applied.
        changes: the fields in which the user's spec differs from it.
        problem: why no pod can be made of it; None if one can.
        later_problem: why the user's spec could not be applied on a resumption; None if it could.
    """

    spec: ElasticJobSpec
    applied: AppliedSpec | None
    changes: tuple[str, ...] = ()
    problem: str | None = None
    later_problem: str | None = None


def spec_in_effect(snapshot: Snapshot, *, suspended: bool, unknown: bool) -> SpecInEffect:
    """The spec that applies to a job that has not finished.

    Args:
        snapshot: with the job as the user has it now.
        suspended: whether it is suspended, or resumed before its pods were gone.
        unknown: whether its store, which the applied spec names, has still to be read.
    """
    job, spec, applied = snapshot.job, snapshot.job.spec, snapshot.job.status.applied_spec
    if suspended:
        applied = applied if snapshot.unfinished or unknown else None
        return SpecInEffect(spec=spec.with_applied(applied), applied=applied, problem=job.problem)
    had_pods = bool(snapshot.gone) or job.status.size_generation > 0
    is_fixed = bool(snapshot.live) or (had_pods and not is_resumed(job))
    if applied is None or not is_fixed:
        return SpecInEffect(spec=spec, applied=None if job.problem else spec.applied, problem=job.problem)
    # What is applied was valid when it was applied; beside it, only the bounds can be wrong.
    problem = None if 1 <= spec.min_replicas <= spec.max_replicas else job.problem
    changes = changed_fields(spec, applied)
    later = job.problem if changes or problem is None else None
    return SpecInEffect(spec.with_applied(applied), applied, changes=changes, problem=problem, later_problem=later)


def must_stop_first(snapshot: Snapshot) -> bool:
    """Whether a job was resumed before it came to a stop.

    Its former pods and their store go first: new agents would take agents that leave for dead, and the store may have
    still to be read, or not be the one that the spec names now.
    """
    job = snapshot.job
    return is_resumed(job) and not snapshot.live and not job.status.holds(ConditionType.SUSPENDED)


def is_resumed(job: Job) -> bool:
    """Whether the user has just resumed the job."""
    return job.status.state is JobState.SUSPENDED and not job.spec.suspend


def with_applied_spec(job: Job, plan: Plan | None = None) -> Job:
    """The job with the spec that its pods and its store are made from.

    Args:
        job: as it was observed.
        plan: the plan that is carried out, whose status may apply another spec; None before there is one.
    """
    status = job.status if plan is None or plan.status is None else plan.status
    return job if status.applied_spec is None else replace(job, spec=job.spec.with_applied(status.applied_spec))


def without(pods: Iterable[Pod], others: Iterable[Pod]) -> tuple[Pod, ...]:
    """The pods that are not among the others."""
    uids = {pod.uid for pod in others}
    return tuple(pod for pod in pods if pod.uid not in uids)


def _had_pods(job: Job, observed: Observed) -> bool:
    """Whether a job without live pods had some."""
    status = job.status
    if status.size_generation > 0 or any(pod.uid not in status.counted_pod_uids for pod in observed.pods):
        return True
    errors = (observed.rejected, observed.blocked, observed.store_error)
    # The operator may have stopped before it saw them. A store with an error is not waited for if none was ever seen.
    return status.applied_spec is not None and observed.etcd is EtcdState.READY and errors == (None, None, None)


def _store_wait(job: Job, observed: Observed) -> float:
    """Without end for a store that is being read; a starting one has nothing to tell of a job that has not trained."""
    has_trained = job.status.started is not None or job.status.round > 0
    if observed.etcd is EtcdState.ABSENT or (observed.etcd is EtcdState.STARTING and not has_trained):
        return 0.0
    return math.inf if observed.etcd is EtcdState.READY and observed.store_error is None else PATIENCE
