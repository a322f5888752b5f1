"""How a job ends, and what is cleared away when it has.

The outcome that the agents commit to the store decides. Where it cannot be read, their exit codes say the same. Only
what keeps agents from running at all is decided here: images without one, or with one that cannot be understood, input
that none of them can honour, and pods that die again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.model import JobState, PodPhase
from elastic_operator.names import ConditionType, Reason
from elastic_operator.plan import words
from elastic_operator.plan.roster import Verdict, verdict
from torchelastic.contract import OutcomeState

if TYPE_CHECKING:
    from elastic_operator.model import Job, JobStatus, Observed, Pod
    from elastic_operator.plan.roster import Roster
    from elastic_operator.plan.toll import Toll

FAREWELL: Final = 30.0
"""Seconds in which agents that know of the run's end may end by themselves: a pod that ended keeps its log, one that is
removed loses it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the job ended.

    Attributes:
        state: succeeded or failed.
        reason: in a word.
        message: why it failed, in words; empty where it succeeded.
        restarts: failures of workers that were charged, as far as the ending tells.
        epoch: the last epoch, as far as the ending tells.
    """

    state: JobState
    reason: Reason
    message: str = ""
    restarts: int = 0
    epoch: int = 0


def find_ending(job: Job, observed: Observed, roster: Roster, toll: Toll) -> Ending | None:
    """How the job has ended; None where it has not."""
    if (outcome := observed.outcome) is not None:
        if outcome.state is OutcomeState.SUCCEEDED:
            return Ending(JobState.SUCCEEDED, Reason.RUN_SUCCEEDED, "", outcome.restarts, outcome.epoch)
        return Ending(JobState.FAILED, Reason.RUN_FAILED, words.root_cause(outcome), outcome.restarts, outcome.epoch)
    said: dict[Verdict, Pod] = {}
    for pod in sorted(roster.past, key=lambda pod: (pod.ended or 0.0, pod.name)):
        said.setdefault(verdict(pod), pod)
    if Verdict.RUN_SUCCEEDED in said:
        return Ending(JobState.SUCCEEDED, Reason.RUN_SUCCEEDED)
    if (herald := said.get(Verdict.RUN_FAILED)) is not None:
        return Ending(JobState.FAILED, Reason.RUN_FAILED, words.last_words(herald))
    for pod in (*roster.live, *((said[Verdict.UNFIT],) if Verdict.UNFIT in said else ())):
        if pod.unfit is not None:
            return Ending(JobState.FAILED, Reason(pod.unfit.reason.value), pod.unfit.message)
    if (refused := said.get(Verdict.BAD_INPUT)) is not None:
        refusal = (
            words.last_words(refused) or "the agent cannot honour its command line or environment; its log says why"
        )
        return Ending(JobState.FAILED, Reason.BAD_INPUT, refusal)
    if toll.charged and toll.pod_failures > job.spec.max_restarts:
        last = toll.charged[-1]
        return Ending(
            JobState.FAILED,
            Reason.POD_FAILURES,
            f"{words.count(toll.pod_failures, 'pod')} died by themselves, and maxRestarts allows "
            f"{job.spec.max_restarts}; the last was {last.name}, which {words.death(last)}",
        )
    return None


@dataclass(frozen=True, slots=True)
class Clearance:
    """What is cleared away of a finished job.

    Attributes:
        remove: pods of which something still runs.
        etcd: whether the store is still needed.
        wake_at: when there will be more to clear away.
    """

    remove: tuple[Pod, ...]
    etcd: bool
    wake_at: float | None


def clear_away(status: JobStatus, roster: Roster, now: float) -> Clearance:
    """What to clear away of a job with this status, now.

    Pods that have ended stay, for their log, unless another of their containers still runs. Agents that know of the end
    get a while to end by themselves, and can read it in the store until then.
    """
    completed = status.completed or 0.0
    patience_ends = completed + FAREWELL
    # A time that is still to come is by another clock, and nobody knows how long to wait.
    patient = completed <= now < patience_ends
    agents_know = any(
        condition.type == ConditionType.FINISHED and condition.reason in (Reason.RUN_SUCCEEDED, Reason.RUN_FAILED)
        for condition in status.conditions
    )
    staying = patient and agents_know
    remove = tuple(pod for pod in roster.live if not (staying and pod.phase is PodPhase.RUNNING))
    waiting = patient and bool(roster.unfinished)
    return Clearance(remove=remove + roster.lingering, etcd=waiting, wake_at=patience_ends if waiting else None)
