"""How a job ends, and which of its objects are deleted afterwards.

The outcome that the agents commit to the store decides; if it cannot be read, their exit codes say the same. The
operator itself ends a job only if its agents cannot run: an image without an agent or with an incompatible one, bad
input, too many failed pods or one that the failure policy makes fatal, and the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import CleanPodPolicy
from elastic_operator.api.status import JobState
from elastic_operator.controller import messages
from elastic_operator.controller.model import PodPhase
from elastic_operator.controller.outcome_unknown import never_read, outcome_unknown, store_may_tell
from elastic_operator.controller.pods import PodEnd, pod_end, without
from torchelastic.protocol import OutcomeState

if TYPE_CHECKING:
    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import Observed, Pod
    from elastic_operator.controller.pods import Snapshot
    from torchelastic.protocol import FailureRecord

EXIT_PERIOD: Final = 30.0
"""Seconds in which agents that know of the run's end may end by themselves: a deleted pod loses its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How the job ended.

    Attributes:
        state: succeeded or failed.
        reason: in a word.
        message: why it failed; empty if it succeeded.
        culprit: the pod or the worker that made it fail; None for neither.
        restarts: failures of workers that were charged, as far as this tells.
        round: the last round, as far as this tells.
    """

    state: JobState = JobState.FAILED
    reason: Reason
    message: str = ""
    culprit: Pod | FailureRecord | None = None
    restarts: int = 0
    round: int = 0

    @property
    def counts_pods(self) -> bool:
        """Whether failed pods or the deadline ended it, so that the pods that failed last are counted."""
        return self.reason in (Reason.POD_FAILURES, Reason.POD_FAILURE_POLICY, Reason.DEADLINE_EXCEEDED)


def find_completion(snapshot: Snapshot, count: FailureCount) -> Completion | None:
    """How the job has ended; None if it has not."""
    return (
        _by_outcome(snapshot.observed)
        or _by_exit_codes(snapshot, count)
        or _by_failure_policy(count)
        or _by_backoff_limit(snapshot.spec, count)
        or _by_deadline(snapshot)
    )


def deadline_of(status: JobStatus, spec: ElasticJobSpec) -> float | None:
    """When the job's time is up; None for never, and while it is suspended."""
    if status.active is None or spec.active_deadline is None or spec.suspend:
        return None
    return status.active + spec.active_deadline


def _by_outcome(observed: Observed) -> Completion | None:
    outcome = observed.outcome
    if outcome is None:
        return None
    succeeded = outcome.state is OutcomeState.SUCCEEDED
    return Completion(
        state=JobState.SUCCEEDED if succeeded else JobState.FAILED,
        reason=Reason.RUN_SUCCEEDED if succeeded else Reason.RUN_FAILED,
        message="" if succeeded else messages.run_failure(outcome),
        culprit=None if succeeded else outcome.failure,
        restarts=outcome.restarts,
        round=outcome.round,
    )


def _by_exit_codes(snapshot: Snapshot, count: FailureCount) -> Completion | None:
    ends: dict[PodEnd, Pod] = {}
    for pod in without(snapshot.pods.by_end, count.pending):
        ends.setdefault(pod_end(pod), pod)
    if PodEnd.RUN_SUCCEEDED in ends:
        return Completion(state=JobState.SUCCEEDED, reason=Reason.RUN_SUCCEEDED)
    if (failed := ends.get(PodEnd.RUN_FAILED)) is not None:
        return Completion(reason=Reason.RUN_FAILED, message=messages.last_message(failed), culprit=failed)
    # Pods that cannot start know nothing of the run's end: if the store is being read, it comes first.
    wait = never_read(snapshot.observed) and store_may_tell(snapshot, 0.0)
    ended = ends.get(PodEnd.INCOMPATIBLE)
    for pod in (*(() if wait else snapshot.pods.live), *(() if ended is None else (ended,))):
        if (image := pod.incompatible_image) is not None:
            return Completion(reason=image.reason, message=image.message, culprit=pod)
    if (refused := ends.get(PodEnd.BAD_INPUT)) is not None:
        message = messages.last_message(refused)
        message = message or "the agent cannot honour its command line or environment; its log says why"
        return Completion(reason=Reason.BAD_INPUT, message=message, culprit=refused)
    return None


def _by_failure_policy(count: FailureCount) -> Completion | None:
    if (fatal := count.fatal) is None:
        return None
    pod = fatal.pod
    return Completion(
        reason=Reason.POD_FAILURE_POLICY,
        message=f"{pod.name} {messages.pod_death(pod)}, and spec.failurePolicy.rules[{fatal.position}] fails the job "
        "then",
        culprit=pod,
    )


def _by_backoff_limit(spec: ElasticJobSpec, count: FailureCount) -> Completion | None:
    if not count.charged or count.pod_failures <= spec.backoff_limit:
        return None
    last = count.charged[-1]
    return Completion(
        reason=Reason.POD_FAILURES,
        message=f"{messages.count(count.pod_failures, 'pod')} died by themselves, and backoffLimit allows "
        f"{spec.backoff_limit}; the last was {last.name}, which {messages.pod_death(last)}",
        culprit=last,
    )


def _by_deadline(snapshot: Snapshot) -> Completion | None:
    deadline = deadline_of(snapshot.before, snapshot.spec)
    if deadline is None or snapshot.now < deadline:
        return None
    unknown = never_read(snapshot.observed) or outcome_unknown(snapshot)
    if unknown and store_may_tell(snapshot, deadline):
        return None
    seconds = messages.count(snapshot.spec.active_deadline or 0, "second")
    return Completion(
        reason=Reason.DEADLINE_EXCEEDED,
        message=f"the job has not come to its end within the {seconds} that activeDeadlineSeconds allows",
    )


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What is deleted of a finished job.

    Attributes:
        delete: pods.
        etcd: whether the store is still needed.
        job: whether the job itself is deleted.
        wake_at: when there will be more to delete.
    """

    delete: tuple[Pod, ...]
    etcd: bool
    job: bool
    wake_at: float | None


def clean_up(snapshot: Snapshot, status: JobStatus) -> Cleanup:
    """What to delete of a job that finished with this status.

    Agents that know of the end may end by themselves within :data:`EXIT_PERIOD`, and read it in the store until then.
    The policy decides on the pods that have ended. The job itself is not deleted before its agents have ended.
    """
    spec, pods, now = snapshot.spec, snapshot.pods, snapshot.now
    completed = status.completed or 0.0
    exit_by = completed + EXIT_PERIOD
    # A completion in the future is by another clock: it is unknown how long to wait.
    exiting = completed <= now < exit_by
    waiting = exiting and bool(pods.unfinished)
    expires = None if spec.ttl_after_finished is None else completed + spec.ttl_after_finished
    expired = expires is not None and now >= expires
    later = [time for time in (exit_by if waiting else None, None if expired else expires) if time is not None]
    finished = status.condition(ConditionType.FINISHED)
    agents_know = finished is not None and finished.reason in (Reason.RUN_SUCCEEDED, Reason.RUN_FAILED)
    delete: tuple[Pod, ...] = ()
    if spec.clean_pod_policy is not CleanPodPolicy.NONE:
        stay = exiting and agents_know
        ended = pods.ended if spec.clean_pod_policy is CleanPodPolicy.ALL else pods.with_sidecars
        delete = (*(pod for pod in pods.live if not (stay and pod.phase is PodPhase.RUNNING)), *ended)
    return Cleanup(delete=delete, etcd=waiting, job=expired and not waiting, wake_at=min(later, default=None))
