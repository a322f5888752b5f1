"""What a plan starts from: the job, its pods by state, and what its store may still tell.

While the store has not been read, no pod is created for a run without pods, no unread store is deleted, and no pod
failure or deadline ends the job: the run may have ended before. A store that stays unreadable delays failures,
deadlines and suspensions by :data:`PATIENCE` at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import EtcdState, TerminationCause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.controller.model import Job, Observed, Pod

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
