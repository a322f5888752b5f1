"""What the pods that are no more cost: each is charged or forgiven once.

The status that says so is written before a pod is removed, and remembers it until it is gone. So a crash between any
two writes neither loses a charge nor counts it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.plan.doubt import PATIENCE, may_yet_tell, was_never_read
from elastic_operator.plan.policy import judge
from elastic_operator.plan.roster import Verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.model import Job, Observed, Pod
    from elastic_operator.plan.policy import Judgement
    from elastic_operator.plan.roster import Roster

_NO_USE: Final = (Verdict.BAD_INPUT, Verdict.UNFIT)
"""What ends the job without being charged: another pod would do no better."""

EXCLUDED_NODES_KEPT: Final = 100
"""So many nodes are kept away from; of more, the first ones are forgiven."""


@dataclass(frozen=True, slots=True)
class Toll:
    """What came to its end since the last status.

    Attributes:
        charged: pods that count against the budget, the last one last.
        ignored: pods that died, which the failure policy passes over.
        forgiven: pods that left, were deleted, or had to go.
        pod_failures: all that is charged to the job, these included.
        fatal: the first pod for which the failure policy fails the job, and what it says of it.
        excluded: nodes that later pods keep away from, these included.
        shunned: of these, those that have come with these pods, each with its pod.
        unjudged: pods that would be charged, or end the job, unless the store says that the run had ended before; they
            are judged when it has been read, or cannot be.
        may_be_the_end: whether the job fails as soon as they are judged.
    """

    charged: tuple[Pod, ...]
    ignored: tuple[Pod, ...]
    forgiven: tuple[Pod, ...]
    pod_failures: int
    fatal: tuple[Pod, Judgement] | None
    excluded: tuple[str, ...]
    shunned: tuple[tuple[str, Pod], ...]
    unjudged: tuple[Pod, ...] = ()
    may_be_the_end: bool = False

    @property
    def judged_at(self) -> float | None:
        """When the next of those that are not judged yet is judged in any case; None where there is none."""
        return min(((pod.ended or 0.0) + PATIENCE for pod in self.unjudged), default=None)


def take_toll(job: Job, observed: Observed, roster: Roster, now: float) -> Toll:
    """Charge, or forgive, what has not been accounted for."""
    news = [pod for pod in roster.past if pod.uid not in job.status.accounted]
    judgements = [(pod, judge(pod, job.spec.failure_rules)) for pod in news]
    waiting = [
        (pod, judgement)
        for pod, judgement in judgements
        if (judgement.charged or verdict(pod) in _NO_USE) and _must_wait(job, pod, observed, now)
    ]
    unjudged = tuple(pod for pod, _ in waiting)
    judged = [(pod, judgement) for pod, judgement in judgements if pod not in unjudged]
    by_time = sorted(judged, key=lambda each: (each[0].ended or 0.0, each[0].name))
    charged = tuple(pod for pod, judgement in by_time if judgement.charged)
    fatal = next(((pod, judgement) for pod, judgement in by_time if judgement.fatal), None)
    shunned = _shunned(by_time, job.status.excluded)
    pod_failures = job.status.pod_failures + len(charged)
    at_worst = pod_failures + sum(judgement.charged for _, judgement in waiting)
    return Toll(
        charged=charged,
        ignored=tuple(pod for pod, judgement in by_time if verdict(pod) is Verdict.DIED and not judgement.charged),
        forgiven=tuple(
            pod for pod, judgement in judged if verdict(pod) in (Verdict.LEFT, Verdict.SPARED) and not judgement.charged
        ),
        pod_failures=pod_failures,
        fatal=fatal,
        excluded=(*job.status.excluded, *(node for node, _ in shunned))[-EXCLUDED_NODES_KEPT:],
        shunned=shunned,
        unjudged=unjudged,
        may_be_the_end=bool(waiting)
        and (
            at_worst > job.spec.backoff_limit
            or any(judgement.fatal or verdict(pod) in _NO_USE for pod, judgement in waiting)
        ),
    )


def _must_wait(job: Job, pod: Pod, observed: Observed, now: float) -> bool:
    """Whether the run may have ended before the pod did, as far as anybody can know by now."""
    return pod.phase.ended and was_never_read(observed) and may_yet_tell(job, observed, pod.ended or 0.0, now)


def _shunned(judged: Iterable[tuple[Pod, Judgement]], known: Iterable[str]) -> tuple[tuple[str, Pod], ...]:
    culprits: dict[str, Pod] = {}
    for pod, judgement in judged:
        if judgement.excludes and pod.node and pod.node not in known:
            culprits.setdefault(pod.node, pod)
    return tuple(culprits.items())
