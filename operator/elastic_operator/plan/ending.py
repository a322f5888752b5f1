"""How a job ends.

The outcome that the agents commit to the store decides. Where it cannot be read, their exit codes say the same. Only
what keeps agents from running at all is decided here: images without one, or with one that cannot be understood, input
that none of them can honour, pods that die again and again or as the failure policy does not suffer it, and the time
that the job may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.model import JobState
from elastic_operator.names import Reason
from elastic_operator.plan import words
from elastic_operator.plan.doubt import is_in_doubt, may_yet_tell, was_never_read
from elastic_operator.plan.roster import Verdict, verdict
from torchelastic.contract import OutcomeState

if TYPE_CHECKING:
    from elastic_operator.model import Job, JobStatus, Observed, Pod
    from elastic_operator.plan.roster import Roster
    from elastic_operator.plan.toll import Toll
    from elastic_operator.spec import ElasticJobSpec
    from torchelastic.contract import FailureRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the job ended.

    Attributes:
        state: succeeded or failed.
        reason: in a word.
        message: why it failed, in words; empty where it succeeded.
        culprit: the pod or the worker for which it failed; None for neither.
        restarts: failures of workers that were charged, as far as the ending tells.
        epoch: the last epoch, as far as the ending tells.
    """

    state: JobState = JobState.FAILED
    reason: Reason
    message: str = ""
    culprit: Pod | FailureRecord | None = None
    restarts: int = 0
    epoch: int = 0

    @property
    def told_by_agents(self) -> bool:
        """Whether the agents brought it about, or what keeps them from running: pods that died have no part in it."""
        return self.reason not in (Reason.POD_FAILURES, Reason.POD_FAILURE_POLICY, Reason.DEADLINE_EXCEEDED)


def find_ending(job: Job, observed: Observed, roster: Roster, toll: Toll, now: float) -> Ending | None:
    """How the job has ended; None where it has not."""
    return (
        _by_outcome(observed)
        or _by_the_word_of_pods(job, observed, roster, toll, now)
        or _by_policy(toll)
        or _by_budget(job.spec, toll)
        or _by_deadline(job, observed, roster, now)
    )


def deadline_of(status: JobStatus, spec: ElasticJobSpec) -> float | None:
    """When the job has taken as long as it may; None for never, or where that is not counted now."""
    if status.active is None or spec.active_deadline is None or spec.suspend:
        return None
    return status.active + spec.active_deadline


def _by_outcome(observed: Observed) -> Ending | None:
    outcome = observed.outcome
    if outcome is None:
        return None
    if outcome.state is OutcomeState.SUCCEEDED:
        return Ending(
            state=JobState.SUCCEEDED, reason=Reason.RUN_SUCCEEDED, restarts=outcome.restarts, epoch=outcome.epoch
        )
    return Ending(
        reason=Reason.RUN_FAILED,
        message=words.root_cause(outcome),
        culprit=outcome.failure,
        restarts=outcome.restarts,
        epoch=outcome.epoch,
    )


def _by_the_word_of_pods(job: Job, observed: Observed, roster: Roster, toll: Toll, now: float) -> Ending | None:
    said: dict[Verdict, Pod] = {}
    unjudged = {pod.uid for pod in toll.unjudged}
    for pod in sorted(roster.past, key=lambda pod: (pod.ended or 0.0, pod.name)):
        if pod.uid not in unjudged:
            said.setdefault(verdict(pod), pod)
    if Verdict.RUN_SUCCEEDED in said:
        return Ending(state=JobState.SUCCEEDED, reason=Reason.RUN_SUCCEEDED)
    if (herald := said.get(Verdict.RUN_FAILED)) is not None:
        return Ending(reason=Reason.RUN_FAILED, message=words.last_words(herald), culprit=herald)
    # Of the end of the run, pods that cannot start know nothing: first the store that is just being read is heard.
    live = () if was_never_read(observed) and may_yet_tell(job, observed, 0.0, now) else roster.live
    for pod in (*live, *((said[Verdict.UNFIT],) if Verdict.UNFIT in said else ())):
        if pod.unfit is not None:
            return Ending(reason=Reason(pod.unfit.reason.value), message=pod.unfit.message, culprit=pod)
    if (refused := said.get(Verdict.BAD_INPUT)) is not None:
        refusal = (
            words.last_words(refused) or "the agent cannot honour its command line or environment; its log says why"
        )
        return Ending(reason=Reason.BAD_INPUT, message=refusal, culprit=refused)
    return None


def _by_policy(toll: Toll) -> Ending | None:
    if toll.fatal is None:
        return None
    pod, judgement = toll.fatal
    return Ending(
        reason=Reason.POD_FAILURE_POLICY,
        message=f"{pod.name} {words.death(pod)}, and spec.failurePolicy.rules[{judgement.position}] fails the job then",
        culprit=pod,
    )


def _by_budget(spec: ElasticJobSpec, toll: Toll) -> Ending | None:
    if not toll.charged or toll.pod_failures <= spec.backoff_limit:
        return None
    last = toll.charged[-1]
    return Ending(
        reason=Reason.POD_FAILURES,
        message=f"{words.count(toll.pod_failures, 'pod')} died by themselves, and backoffLimit allows "
        f"{spec.backoff_limit}; the last was {last.name}, which {words.death(last)}",
        culprit=last,
    )


def _by_deadline(job: Job, observed: Observed, roster: Roster, now: float) -> Ending | None:
    deadline = deadline_of(job.status, job.spec)
    if deadline is None or now < deadline:
        return None
    ended_unseen = was_never_read(observed) or is_in_doubt(job, observed, roster)
    if ended_unseen and may_yet_tell(job, observed, deadline, now):
        return None
    return Ending(
        reason=Reason.DEADLINE_EXCEEDED,
        message="the job has not come to its end within the "
        f"{words.count(job.spec.active_deadline or 0, 'second')} that activeDeadlineSeconds allows",
    )
