"""Whether the run may have ended without the operator knowing, and how long to wait for the store to tell.

While the store has not been read, no pod is created for a run without pods, no unread store is deleted, and no pod
failure or deadline ends the job: the run may have ended before. A store that stays unreadable delays failures,
deadlines and suspensions by :data:`PATIENCE` at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import EtcdState

if TYPE_CHECKING:
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Observed
    from elastic_operator.controller.pods import Snapshot

PATIENCE: Final = 60.0
"""Seconds to wait for a store that cannot be read."""


def outcome_unknown(snapshot: Snapshot) -> bool:
    """Whether the job had pods, has none, and its store has not been read.

    A store that is forbidden to the operator is not waited for: the agents will read it. Nor is one that has an error,
    if no pod was ever seen.
    """
    before, observed = snapshot.before, snapshot.observed
    if snapshot.pods.live or not _is_unread(observed):
        return False
    if before.size_generation > 0 or any(pod.uid not in before.counted_pod_uids for pod in snapshot.pods.gone):
        return True
    errors = (observed.rejected, observed.blocked, observed.store_error)
    may_have_had_pods = before.applied_spec is not None  # the operator may have stopped before it saw them
    return may_have_had_pods and observed.etcd is EtcdState.READY and errors == (None, None, None)


def store_may_tell(snapshot: Snapshot, since: float) -> bool:
    """Whether to wait for the store before deciding on something that happened at ``since``.

    A store that is being read is waited for, another one for :data:`PATIENCE`. One that is starting has nothing to
    tell of a job that has not trained.
    """
    before, observed = snapshot.before, snapshot.observed
    if not _is_unread(observed) or observed.etcd is EtcdState.ABSENT:
        return False
    has_trained = before.started is not None or before.round > 0
    if observed.etcd is EtcdState.STARTING and not has_trained:
        return False
    is_being_read = observed.etcd is EtcdState.READY and observed.store_error is None
    return is_being_read or since <= snapshot.now < since + PATIENCE


def never_read(observed: Observed) -> bool:
    """Whether nothing is known of the run from its store."""
    return _is_unread(observed) and observed.round is None


def store_needed_until(snapshot: Snapshot) -> float | None:
    """Until when the store of a suspended job without agents is kept to be read; None if it need not be."""
    if snapshot.pods.unfinished or not outcome_unknown(snapshot):
        return None
    since = _waiting_since(snapshot.before, snapshot.now)
    return since + PATIENCE if store_may_tell(snapshot, since) else None


def _waiting_since(before: JobStatus, now: float) -> float:
    waiting = before.condition(ConditionType.WAITING) if before.state is JobState.SUSPENDED else None
    if waiting is not None and waiting.status and waiting.reason == Reason.STORE_UNREADABLE:
        return waiting.since
    return now


def _is_unread(observed: Observed) -> bool:
    return not observed.store_read and not observed.store_forbidden
