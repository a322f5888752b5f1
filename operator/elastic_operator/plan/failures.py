"""What failed last, for the status: in words, and in fields for machines (the pod, the rank, the exit code)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_operator.model import LastFailure, Pod
from elastic_operator.plan import words
from elastic_operator.plan.roster import Verdict, verdict
from torchelastic.contract import EpochReason, FailureRecord, TerminationMessage, shorten

if TYPE_CHECKING:
    from elastic_operator.model import Job, Observed
    from elastic_operator.plan.toll import Toll

_NAME_LIMIT: Final = 253


def last_failure(job: Job, observed: Observed, toll: Toll, now: float) -> LastFailure | None:
    """What failed last in a job that goes on."""
    if toll.charged:
        last = toll.charged[-1]
        return failure_of(f"{last.name} {words.death(last)}", last, now)
    if stranded := [pod for pod in toll.forgiven if pod.fate is None and verdict(pod) is Verdict.SPARED]:
        last = max(stranded, key=lambda pod: (pod.ended or 0.0, pod.name))
        return failure_of(f"{last.name} {words.death(last)}", last, now)
    epoch = observed.epoch
    if epoch is not None and epoch.restarts > job.status.restarts:
        if epoch.failure is not None:
            return failure_of(words.describe(epoch.failure), epoch.failure, now)
        if epoch.reason is EpochReason.WORKER_FAILED:  # its leader does not say more
            return failure_of(epoch.cause, None, now)
    return job.status.last_failure


def failure_of(message: str, culprit: Pod | FailureRecord | None, now: float) -> LastFailure:
    """A failure.

    Args:
        message: all of it, in words.
        culprit: the pod or the worker that failed; None where it was neither, or nobody knows.
        now: seconds since the Unix epoch.
    """
    message = shorten(message, words.MESSAGE_LIMIT)
    if isinstance(culprit, Pod) and isinstance(culprit.message, TerminationMessage) and culprit.message.failure:
        culprit = culprit.message.failure
    match culprit:
        case Pod(name=pod, exit_code=code, init_exit_code=code_before):
            code = code_before if code is None else code
            rank, signal = None, words.signal_name(code)
        case FailureRecord(rank=rank, exit_code=code):
            pod, signal = words.node_name(culprit), words.signal_name(words.SIGNAL_BASE - code if code < 0 else None)
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
