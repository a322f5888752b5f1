"""What the store would say if it were read, and how long that is waited for.

The run may have ended while nobody looked, and a pod that dies afterwards, or a deadline that passes, means nothing any
more. So as long as the store has not been read, no pod is made for a run that nobody takes part in, nothing that was
never read is thrown away, and no death and no deadline ends the job. But a store that cannot be read for a while keeps
neither of them from being judged, and no job from being suspended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_operator.model import EtcdState, JobState
from elastic_operator.names import ConditionType, Reason

if TYPE_CHECKING:
    from elastic_operator.model import Job, JobStatus, Observed
    from elastic_operator.plan.roster import Roster

PATIENCE: Final = 60.0
"""Seconds for which a store that cannot be read is waited for."""


def is_in_doubt(job: Job, observed: Observed, roster: Roster) -> bool:
    """Whether the run may have ended while nobody looked: it had pods and has none, and only the store knows.

    A store that is closed to us will never say anything: there the newcomers learn it. So do they where nobody knows
    of any pod, and the store does not say at once whether there was one.
    """
    if roster.live or not _is_unread(observed):
        return False
    if _had_pods(job, roster):
        return True
    troubles = (observed.refusal, observed.hindrance, observed.store_trouble)
    may_have_had_pods = job.status.pinned is not None  # and the operator ended before it saw them
    return may_have_had_pods and observed.etcd is EtcdState.READY and troubles == (None, None, None)


def _had_pods(job: Job, roster: Roster) -> bool:
    """Whether anybody has ever seen a pod of the job, since it was resumed if it was suspended."""
    return job.status.size_generation > 0 or any(pod.uid not in job.status.accounted for pod in roster.past)


def may_yet_tell(job: Job, observed: Observed, since: float, now: float) -> bool:
    """Whether the store is waited for before something is judged that its word would change.

    It is as long as nobody has found it away, and otherwise for a while; but one that is only just coming up has
    nothing to tell of a job that has not trained yet.

    Args:
        job: the job.
        observed: what was observed.
        since: when what is to be judged happened.
        now: seconds since the Unix epoch.
    """
    if not _is_unread(observed) or observed.etcd is EtcdState.ABSENT:
        return False
    has_trained = job.status.started is not None or job.status.epoch > 0
    if observed.etcd is EtcdState.STARTING and not has_trained:
        return False
    is_being_read = observed.etcd is EtcdState.READY and observed.store_trouble is None
    return is_being_read or since <= now < since + PATIENCE


def was_never_read(observed: Observed) -> bool:
    """Whether nothing is known of the run from its store."""
    return _is_unread(observed) and observed.epoch is None


def keeps_from_rest(job: Job, observed: Observed, roster: Roster, now: float) -> float | None:
    """Until when the store of a suspended job is kept to be read once no agent runs; None where it need not be."""
    if roster.unfinished or not is_in_doubt(job, observed, roster):
        return None
    since = _waits_since(job.status, now)
    return since + PATIENCE if may_yet_tell(job, observed, since, now) else None


def _waits_since(status: JobStatus, now: float) -> float:
    for condition in status.conditions if status.state is JobState.SUSPENDED else ():
        said = condition.type, condition.status, condition.reason
        if said == (ConditionType.WAITING, True, Reason.STORE_UNREADABLE):
            return condition.since
    return now


def _is_unread(observed: Observed) -> bool:
    return not observed.store_read and not observed.store_closed
