"""How a job ends.

The outcome that the agents commit to the store decides; if it cannot be read, their exit codes say the same. The
operator itself ends a job only if its agents cannot run: an image without an agent or with an incompatible one, bad
input, too many failed pods or one that the failure policy makes fatal, and the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.api.constants import Reason
from elastic_operator.api.status import JobState
from elastic_operator.controller import messages
from elastic_operator.controller.failures import failure_of, is_fatal
from elastic_operator.controller.model import PodEnd
from torchelastic.protocol import OutcomeState

if TYPE_CHECKING:
    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.api.status import JobStatus, LastFailure
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import Pod
    from elastic_operator.controller.snapshot import Snapshot
    from torchelastic.protocol import FailureRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How the job ended.

    Attributes:
        reason: in a word.
        failure: why it failed; None if it succeeded.
        counts_pods: whether failed pods or the deadline ended it, so that the pods that failed last are counted.
        restarts: failures of workers that were charged, as far as this tells.
        round: the last round, as far as this tells.
    """

    reason: Reason
    failure: LastFailure | None = None
    counts_pods: bool = False
    restarts: int = 0
    round: int = 0

    @property
    def state(self) -> JobState:
        """Succeeded or failed."""
        return JobState.SUCCEEDED if self.failure is None else JobState.FAILED


def find_completion(snapshot: Snapshot, count: FailureCount) -> Completion | None:
    """How the job has ended; None if it has not."""
    return _by_outcome(snapshot) or _by_exit_codes(snapshot, count) or _by_limits(snapshot, count)


def deadline_of(status: JobStatus, spec: ElasticJobSpec) -> float | None:
    """When the job's time is up; None for never, and while it is suspended."""
    if status.active is None or spec.active_deadline is None or spec.suspend:
        return None
    return status.active + spec.active_deadline


def _by_outcome(snapshot: Snapshot) -> Completion | None:
    outcome = snapshot.observed.outcome
    if outcome is None:
        return None
    failure, reason = None, Reason.RUN_SUCCEEDED
    if outcome.state is not OutcomeState.SUCCEEDED:
        failure = failure_of(messages.run_failure(outcome), outcome.failure, snapshot.now)
        reason = Reason.RUN_FAILED
    return Completion(reason=reason, failure=failure, restarts=outcome.restarts, round=outcome.round)


def _by_exit_codes(snapshot: Snapshot, count: FailureCount) -> Completion | None:
    ends = {each.end: each.pod for each in reversed(count.judged)}
    if PodEnd.RUN_SUCCEEDED in ends:
        return Completion(reason=Reason.RUN_SUCCEEDED)
    if (failed := ends.get(PodEnd.RUN_FAILED)) is not None:
        return _failed(snapshot, Reason.RUN_FAILED, messages.last_message(failed), failed)
    incompatible = [pod for pod in snapshot.live if pod.incompatible_image is not None]
    # Pods that cannot start know nothing of the run's end: if the store is being read, it comes first.
    if incompatible and snapshot.never_read and snapshot.store_may_tell(0.0):
        incompatible = []
    if PodEnd.INCOMPATIBLE in ends:
        incompatible.append(ends[PodEnd.INCOMPATIBLE])
    for pod in incompatible:
        if (image := pod.incompatible_image) is not None:
            return _failed(snapshot, image.reason, image.message, pod)
    if (refused := ends.get(PodEnd.BAD_INPUT)) is not None:
        message = messages.last_message(refused)
        message = message or "the agent cannot honour its command line or environment; its log says why"
        return _failed(snapshot, Reason.BAD_INPUT, message, refused)
    return None


def _by_limits(snapshot: Snapshot, count: FailureCount) -> Completion | None:
    """By the failure policy, the backoff limit, or the deadline."""
    spec, status = snapshot.job.spec, snapshot.job.status
    for each in count.ended:
        if is_fatal(each):
            rule = f"spec.failurePolicy.rules[{each.position}]"
            message = f"{each.pod.name} {messages.pod_death(each.pod)}, and {rule} fails the job then"
            return _failed(snapshot, Reason.POD_FAILURE_POLICY, message, each.pod, counts_pods=True)
    charged = [each.pod for each in count.ended if each.charged]
    if charged and count.pod_failures > spec.backoff_limit:
        message = (
            f"{messages.count(count.pod_failures, 'pod')} died by themselves, and backoffLimit allows "
            f"{spec.backoff_limit}; the last was {charged[-1].name}, which {messages.pod_death(charged[-1])}"
        )
        return _failed(snapshot, Reason.POD_FAILURES, message, charged[-1], counts_pods=True)
    deadline = deadline_of(status, spec)
    unknown = snapshot.never_read or snapshot.outcome_unknown
    if deadline is None or snapshot.now < deadline or (unknown and snapshot.store_may_tell(deadline)):
        return None
    seconds = messages.count(spec.active_deadline or 0, "second")
    message = f"the job has not come to its end within the {seconds} that activeDeadlineSeconds allows"
    return _failed(snapshot, Reason.DEADLINE_EXCEEDED, message, None, counts_pods=True)


def _failed(
    snapshot: Snapshot, reason: Reason, message: str, culprit: Pod | FailureRecord | None, *, counts_pods: bool = False
) -> Completion:
    failure = failure_of(message, culprit, snapshot.now)
    return Completion(reason=reason, failure=failure, counts_pods=counts_pods)
