"""What the pods that are no more cost: each is charged or forgiven once.

The status that says so is written before a pod is removed, and remembers it until it is gone. So a crash between any
two writes neither loses a charge nor counts it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.plan.roster import Verdict, verdict

if TYPE_CHECKING:
    from elastic_operator.model import Job, Pod
    from elastic_operator.plan.roster import Roster


@dataclass(frozen=True, slots=True)
class Toll:
    """What came to its end since the last status.

    Attributes:
        charged: pods that died by themselves, the last one last.
        forgiven: pods that left or were deleted.
        pod_failures: all that is charged to the job, these included.
    """

    charged: tuple[Pod, ...]
    forgiven: tuple[Pod, ...]
    pod_failures: int


def take_toll(job: Job, roster: Roster) -> Toll:
    """Charge, or forgive, what has not been accounted for."""
    news = [pod for pod in roster.past if pod.uid not in job.status.accounted]
    died = [pod for pod in news if verdict(pod) is Verdict.DIED]
    died.sort(key=lambda pod: (pod.ended or 0.0, pod.name))
    return Toll(
        charged=tuple(died),
        forgiven=tuple(pod for pod in news if verdict(pod) is Verdict.LEFT),
        pod_failures=job.status.pod_failures + len(died),
    )
