"""Classifies ended pods, counts failed pods exactly once, and determines whether the job has ended.

The agents apply the failure policy's rules on exit codes, to workers. This module applies its rules on pods, to pods
that failed and to pods that were disrupted. The status that counts a pod is written before the pod is deleted,
and contains the pod's UID until the pod is gone. So a crash of the operator loses no failure and counts none twice.

The outcome that the agents commit to the store defines how the job ends. If no outcome is known, the agents' exit codes
define it. The operator itself ends a job because of an image without a compatible agent, bad input, a failed pod that
the failure policy makes fatal, too many failed pods, or the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import Reason
from elastic_operator.api.spec import FailureAction, FailureRule
from elastic_operator.api.status import LastFailure
from elastic_operator.controller import messages
from elastic_operator.controller.model import (
    STORE_TIMEOUT,
    EndedPod,
    FailureCount,
    Pod,
    PodEnd,
    PodPhase,
    Snapshot,
    TerminationCause,
)
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.pod import LEFT_CODES, ExitCode, TerminationMessage
from torchelastic.protocol.records import FailureRecord, OutcomeState, RoundReason, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence


EXCLUDED_NODES_KEPT: Final = 100
"""Maximum number of excluded nodes; the oldest are dropped."""

_NAME_LIMIT: Final = 253
_POD_DEADLINE: Final = "DeadlineExceeded"
"""The kubelet's reason for ending a pod whose template has activeDeadlineSeconds."""

_NOT_ITS_FAULT: Final = (TerminationCause.DISRUPTED, TerminationCause.NODE_LOST, TerminationCause.NOT_ADMITTED)


def count_failures(snapshot: Snapshot) -> FailureCount:
    """Classify the ended pods, and count those that have not been counted yet."""
    spec, status = snapshot.job.spec, snapshot.job.status
    classified: list[EndedPod] = []
    counted: list[EndedPod] = []
    pending: list[EndedPod] = []
    pod_failures = status.pod_failures
    at_worst = False
    for pod in sorted(snapshot.gone, key=lambda pod: (pod.ended or 0.0, pod.name)):
        each = classify(pod, spec.failure_policy.rules)
        if pod.uid in status.counted_pod_uids:
            classified.append(each)
            continue
        hopeless = each.end in (PodEnd.BAD_INPUT, PodEnd.INCOMPATIBLE)
        # The run may have ended before the pod.
        must_wait = pod.phase.ended and snapshot.never_read and snapshot.must_wait_for_store(pod.ended or 0.0)
        if (each.charged or hopeless) and must_wait:
            pending.append(each)
            at_worst = at_worst or hopeless or is_fatal(each)
        else:
            classified.append(each)
            counted.append(each)
            pod_failures += each.charged
    excluded: dict[str, Pod] = {}
    for each in counted:
        node = each.pod.node
        if each.rule is not None and each.rule.exclude_node and node and node not in status.excluded_nodes:
            excluded.setdefault(node, each.pod)
    over_limit = pod_failures + sum(each.charged for each in pending) > spec.backoff_limit
    return FailureCount(
        classified=tuple(classified),
        ended=tuple(counted),
        pending=frozenset([each.pod.uid for each in pending]),
        pod_failures=pod_failures,
        last_failure=_last_failure(snapshot, counted),
        excluded_nodes=(*status.excluded_nodes, *excluded)[-EXCLUDED_NODES_KEPT:],
        newly_excluded=tuple(excluded.items()),
        may_be_fatal=bool(pending) and (over_limit or at_worst),
        next_due=min(((each.pod.ended or 0.0) + STORE_TIMEOUT for each in pending), default=None),
    )


def classify(pod: Pod, rules: Sequence[FailureRule]) -> EndedPod:
    """Return the consequences of the end of a pod; the first rule that matches applies."""
    end = pod_end(pod)
    has_cause = pod.termination_cause is not None and end is PodEnd.LEFT
    if end in (PodEnd.FAILED, PodEnd.DISRUPTED) or has_cause:
        for position, rule in enumerate(rules):
            if rule.pod_reasons & pod.reasons or any(
                pod.conditions.get(condition.type) == condition.status for condition in rule.pod_conditions
            ):
                return EndedPod(pod, end, rule.action is not FailureAction.IGNORE, rule, position)
    return EndedPod(pod, end, charged=end is PodEnd.FAILED)


def pod_end(pod: Pod) -> PodEnd:
    """Return the meaning of the end of an ended or terminating pod.

    An agent's report that the run has ended takes precedence. Otherwise, a deleted pod has not failed.
    """
    code = ExitCode.SUCCEEDED if pod.exit_code is None and pod.phase is PodPhase.SUCCEEDED else pod.exit_code
    if pod.phase.ended and code == ExitCode.SUCCEEDED:
        return PodEnd.RUN_SUCCEEDED
    if pod.phase.ended and code == ExitCode.FAILED and isinstance(pod.message, TerminationMessage):
        return PodEnd.RUN_FAILED
    # If the pod exceeded its own limits or deadline, it caused its termination itself.
    over_limit = pod.termination_cause is TerminationCause.OVER_LIMIT or _POD_DEADLINE in pod.reasons
    if over_limit and not pod.terminating:
        return PodEnd.FAILED
    if pod.terminating or code in LEFT_CODES:
        return PodEnd.LEFT
    cause = pod.termination_cause
    if cause in _NOT_ITS_FAULT or (cause is None and code == ExitCode.STORE_UNAVAILABLE):
        return PodEnd.DISRUPTED
    if pod.incompatible_image is not None:
        return PodEnd.INCOMPATIBLE
    return PodEnd.BAD_INPUT if code == ExitCode.BAD_INPUT else PodEnd.FAILED


def is_fatal(ended: EndedPod) -> bool:
    """Return whether the failure policy fails the job because of this pod."""
    return ended.rule is not None and ended.rule.action is FailureAction.FAIL_JOB


def failure_of(message: str, culprit: Pod | FailureRecord | None, now: float) -> LastFailure:
    """Return a failure for the status.

    Args:
        message: a sentence.
        culprit: the pod or the worker that failed; None if there is none, or if it is unknown.
        now: seconds since the Unix epoch.
    """
    message = shorten(message, messages.MESSAGE_LIMIT)
    if isinstance(culprit, Pod) and isinstance(culprit.message, TerminationMessage) and culprit.message.failure:
        culprit = culprit.message.failure
    rank: int | None = None
    match culprit:
        case Pod(name=pod, exit_code=code, init_exit_code=init_code):
            code = init_code if code is None else code
            signal = messages.signal_name(code)
        case FailureRecord(rank=rank, exit_code=code):
            pod = name_of(culprit.node)
            signal = messages.signal_name(messages.SIGNAL_BASE - code if code < 0 else None)
        case None:
            return LastFailure(message, time=now)
    return LastFailure(
        message,
        pod=shorten(pod, _NAME_LIMIT),
        rank=rank,
        exit_code=None if signal is not None else code,
        signal=signal or "",
        time=now,
    )


def _last_failure(snapshot: Snapshot, ended: Sequence[EndedPod]) -> LastFailure | None:
    """Return the failure of the last counted pod, else of the worker that caused the round, else the former one."""
    status, round, now = snapshot.job.status, snapshot.observed.round, snapshot.now
    stranded = [each for each in ended if each.end is PodEnd.DISRUPTED and each.pod.termination_cause is None]
    for each in reversed([each for each in ended if each.charged] or stranded):
        return failure_of(f"{each.pod.name} {messages.pod_death(each.pod)}", each.pod, now)
    if round is not None and round.restarts > status.restarts:
        if round.failure is not None:
            return failure_of(messages.worker_failure(round.failure), round.failure, now)
        if round.reason is RoundReason.WORKER_FAILED:  # the leader gives no details
            return failure_of(round.cause, None, now)
    return status.last_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How the job ended.

    Attributes:
        reason: the reason for the end, one word.
        failure: why the job failed; None if it succeeded.
        counts_pods: whether failed pods or the deadline ended the job, so that the last failed pods are counted.
        restarts: the number of worker failures that count, as far as known.
        round: the number of the last round, as far as known.
    """

    reason: Reason
    failure: LastFailure | None = None
    counts_pods: bool = False
    restarts: int = 0
    round: int = 0


def find_completion(snapshot: Snapshot, failures: FailureCount) -> Completion | None:
    """Return how the job has ended; None if it has not."""
    return _by_outcome(snapshot) or _by_exit_codes(snapshot, failures) or _by_limits(snapshot, failures)


def _by_outcome(snapshot: Snapshot) -> Completion | None:
    outcome = snapshot.observed.outcome
    if outcome is None:
        return None
    failure, reason = None, Reason.RUN_SUCCEEDED
    if outcome.state is not OutcomeState.SUCCEEDED:
        why = messages.worker_failure(outcome.failure) if outcome.failure else "the agents gave no reason"
        failure = failure_of(outcome.message or why, outcome.failure, snapshot.now)
        reason = Reason.RUN_FAILED
    return Completion(reason=reason, failure=failure, restarts=outcome.restarts, round=outcome.round)


def _by_exit_codes(snapshot: Snapshot, failures: FailureCount) -> Completion | None:
    ends = {each.end: each.pod for each in reversed(failures.classified)}
    if PodEnd.RUN_SUCCEEDED in ends:
        return Completion(reason=Reason.RUN_SUCCEEDED)
    if (failed := ends.get(PodEnd.RUN_FAILED)) is not None:
        return _failed(snapshot, Reason.RUN_FAILED, messages.last_message(failed), failed)
    incompatible = [pod for pod in snapshot.live if pod.incompatible_image is not None]
    # Pods that cannot start do not show whether the run has ended, so a store that may show it is read first.
    if incompatible and snapshot.never_read and snapshot.must_wait_for_store(0.0):
        incompatible = []
    if PodEnd.INCOMPATIBLE in ends:
        incompatible.append(ends[PodEnd.INCOMPATIBLE])
    for pod in incompatible:
        if (image := pod.incompatible_image) is not None:
            return _failed(snapshot, image.reason, image.message, pod)
    if (refused := ends.get(PodEnd.BAD_INPUT)) is not None:
        message = messages.last_message(refused)
        message = message or "the agent cannot use its command line or environment; its log says why"
        return _failed(snapshot, Reason.BAD_INPUT, message, refused)
    return None


def _by_limits(snapshot: Snapshot, failures: FailureCount) -> Completion | None:
    """Return the completion by the failure policy, the backoff limit, or the deadline; None without one."""
    spec, status = snapshot.job.spec, snapshot.job.status
    for each in failures.ended:
        if is_fatal(each):
            rule = f"spec.failurePolicy.rules[{each.position}]"
            message = f"{each.pod.name} {messages.pod_death(each.pod)}, and {rule} fails the job"
            return _failed(snapshot, Reason.POD_FAILURE_POLICY, message, each.pod, counts_pods=True)
    charged = [each.pod for each in failures.ended if each.charged]
    if charged and failures.pod_failures > spec.backoff_limit:
        message = (
            f"{messages.count(failures.pod_failures, 'pod')} failed, and backoffLimit allows "
            f"{spec.backoff_limit}; the last was {charged[-1].name}, which {messages.pod_death(charged[-1])}"
        )
        return _failed(snapshot, Reason.POD_FAILURES, message, charged[-1], counts_pods=True)
    if status.active is None or spec.active_deadline is None or spec.suspend:
        return None
    deadline = status.active + spec.active_deadline
    unknown = snapshot.never_read or snapshot.outcome_unknown
    if snapshot.now < deadline or (unknown and snapshot.must_wait_for_store(deadline)):
        return None
    seconds = messages.count(spec.active_deadline, "second")
    message = f"the job has not finished within the {seconds} that activeDeadlineSeconds allows"
    return _failed(snapshot, Reason.DEADLINE_EXCEEDED, message, None, counts_pods=True)


def _failed(
    snapshot: Snapshot, reason: Reason, message: str, culprit: Pod | FailureRecord | None, *, counts_pods: bool = False
) -> Completion:
    failure = failure_of(message, culprit, snapshot.now)
    return Completion(reason=reason, failure=failure, counts_pods=counts_pods)
