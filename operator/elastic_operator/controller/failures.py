"""Counts failed pods, each exactly once, and says what failed last.

The failure policy's rules on exit codes apply to workers, and the agents apply them. Its rules on pods apply here, to
pods that failed and to pods that were disrupted. The status that counts a pod is written before the pod is deleted,
and remembers its UID until it is gone: a crash between the two neither loses a failure nor counts it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.spec import FailureAction
from elastic_operator.api.status import LastFailure
from elastic_operator.controller import messages
from elastic_operator.controller.model import Pod
from elastic_operator.controller.outcome_unknown import PATIENCE, never_read, store_may_tell
from elastic_operator.controller.pods import PodEnd, pod_end
from torchelastic.protocol import FailureRecord, RoundReason, TerminationMessage, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.api.spec import FailureRule
    from elastic_operator.controller.pods import Snapshot

EXCLUDED_NODES_KEPT: Final = 100
"""Nodes that are excluded at most; the oldest are dropped."""

_NAME_LIMIT: Final = 253


@dataclass(frozen=True, slots=True)
class JudgedPod:
    """What follows from the end of a pod.

    Attributes:
        pod: the pod.
        end: what its end means.
        charged: whether it counts against the backoff limit.
        rule: the rule of the failure policy that matches; None for none.
        position: of that rule, from 0.
    """

    pod: Pod
    end: PodEnd
    charged: bool
    rule: FailureRule | None = None
    position: int = 0

    @property
    def fatal(self) -> bool:
        """Whether the failure policy fails the job."""
        return self.rule is not None and self.rule.action is FailureAction.FAIL_JOB

    @property
    def hopeless(self) -> bool:
        """Whether another pod would end in the same way, which ends the job."""
        return self.end in (PodEnd.BAD_INPUT, PodEnd.INCOMPATIBLE)


def judge(pod: Pod, rules: Sequence[FailureRule]) -> JudgedPod:
    """What follows from the end of a pod; the first rule that matches applies."""
    end = pod_end(pod)
    has_cause = pod.termination_cause is not None and end is PodEnd.LEFT
    if end in (PodEnd.FAILED, PodEnd.DISRUPTED) or has_cause:
        for position, rule in enumerate(rules):
            if rule.pod_reasons & pod.reasons or any(
                pod.conditions.get(condition.type) == condition.status for condition in rule.pod_conditions
            ):
                return JudgedPod(pod, end, rule.action is not FailureAction.IGNORE, rule, position)
    return JudgedPod(pod, end, charged=end is PodEnd.FAILED)


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The pods that ended since the last status.

    Attributes:
        charged: pods that count against the backoff limit, the last one last.
        ignored: failed pods that the failure policy ignores.
        not_counted: pods that left, were deleted, or were disrupted.
        pod_failures: the job's count, these included.
        fatal: the first pod for which the failure policy fails the job.
        excluded_nodes: nodes that later pods keep away from, the new ones included.
        newly_excluded: the new ones, each with its pod.
        pending: pods that would be charged or end the job, unless the store says that the run had ended before.
        may_be_fatal: whether the job fails once they are counted.
    """

    charged: tuple[Pod, ...]
    ignored: tuple[Pod, ...]
    not_counted: tuple[Pod, ...]
    pod_failures: int
    fatal: JudgedPod | None
    excluded_nodes: tuple[str, ...]
    newly_excluded: tuple[tuple[str, Pod], ...]
    pending: tuple[Pod, ...] = ()
    may_be_fatal: bool = False

    @property
    def next_due(self) -> float | None:
        """When the next pending pod is counted in any case; None if there is none."""
        return min(((pod.ended or 0.0) + PATIENCE for pod in self.pending), default=None)


def count_failures(snapshot: Snapshot) -> FailureCount:
    """Count the pods that have not been counted."""
    before, spec = snapshot.before, snapshot.spec
    judged = [judge(pod, spec.failure_rules) for pod in snapshot.pods.gone if pod.uid not in before.counted_pod_uids]
    pending = [each for each in judged if (each.charged or each.hopeless) and _must_wait(snapshot, each.pod)]
    waiting = {each.pod.uid for each in pending}
    counted = [each for each in judged if each.pod.uid not in waiting]
    by_time = sorted(counted, key=lambda each: (each.pod.ended or 0.0, each.pod.name))
    charged = tuple(each.pod for each in by_time if each.charged)
    excluded: dict[str, Pod] = {}
    for each in by_time:
        node = each.pod.node
        if each.rule is not None and each.rule.exclude_node and node and node not in before.excluded_nodes:
            excluded.setdefault(node, each.pod)
    pod_failures = before.pod_failures + len(charged)
    at_worst = pod_failures + sum(each.charged for each in pending)
    blameless = (PodEnd.LEFT, PodEnd.DISRUPTED)
    return FailureCount(
        charged=charged,
        ignored=tuple(each.pod for each in by_time if each.end is PodEnd.FAILED and not each.charged),
        not_counted=tuple(each.pod for each in counted if each.end in blameless and not each.charged),
        pod_failures=pod_failures,
        fatal=next((each for each in by_time if each.fatal), None),
        excluded_nodes=(*before.excluded_nodes, *excluded)[-EXCLUDED_NODES_KEPT:],
        newly_excluded=tuple(excluded.items()),
        pending=tuple(each.pod for each in pending),
        may_be_fatal=bool(pending)
        and (at_worst > spec.backoff_limit or any(each.fatal or each.hopeless for each in pending)),
    )


def last_failure(snapshot: Snapshot, count: FailureCount) -> LastFailure | None:
    """What failed last in a job that has not finished."""
    now, round = snapshot.now, snapshot.observed.round
    failed = list(count.charged[-1:])
    if not failed:
        stranded = [
            pod for pod in count.not_counted if pod.termination_cause is None and pod_end(pod) is PodEnd.DISRUPTED
        ]
        failed = sorted(stranded, key=lambda pod: (pod.ended or 0.0, pod.name))[-1:]
    for pod in failed:
        return failure_of(f"{pod.name} {messages.pod_death(pod)}", pod, now)
    if round is not None and round.restarts > snapshot.before.restarts:
        if round.failure is not None:
            return failure_of(messages.worker_failure(round.failure), round.failure, now)
        if round.reason is RoundReason.WORKER_FAILED:  # its leader says no more
            return failure_of(round.cause, None, now)
    return snapshot.before.last_failure


def failure_of(message: str, culprit: Pod | FailureRecord | None, now: float) -> LastFailure:
    """A failure for the status.

    Args:
        message: in words.
        culprit: the pod or the worker that failed; None if neither did, or if it is unknown.
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
            pod = messages.node_name(culprit)
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


def _must_wait(snapshot: Snapshot, pod: Pod) -> bool:
    """Whether the run may have ended before the pod did."""
    return pod.phase.ended and never_read(snapshot.observed) and store_may_tell(snapshot, pod.ended or 0.0)
