"""The pods of a job by what they mean for the plan, and what an ended one says."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.model import Fate, PodPhase
from elastic_operator.names import pod_name
from torchelastic.contract import ExitCode, TerminationMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.model import Job, Observed, Pod


class Verdict(enum.Enum):
    """What the end of a pod means."""

    RUN_SUCCEEDED = enum.auto()
    """The agent says that the run succeeded."""
    RUN_FAILED = enum.auto()
    """The agent says, in its own words, that the run failed."""
    BAD_INPUT = enum.auto()
    """The agent can't honour what it was started with; another one could not either."""
    UNFIT = enum.auto()
    """There is no agent in it, or none that can be understood; nor would there be in another one."""
    LEFT = enum.auto()
    """It was deleted, or asked to leave: no failure."""
    SPARED = enum.auto()
    """It ended by no fault of its own: evicted, turned away by its node, lost with it, or the store could not be
    reached."""
    DIED = enum.auto()
    """It ended by itself, and the run has not."""


_OVERDUE: Final = "DeadlineExceeded"
"""Why a kubelet ends a pod whose template has activeDeadlineSeconds."""
_NO_FAULT: Final = (Fate.DISRUPTED, Fate.NODE_LOST, Fate.NOT_ADMITTED)


def verdict(pod: Pod) -> Verdict:
    """What the end of a pod, ended or going, means.

    What an agent knows of the run's end counts however the pod came to its own. For the rest, a pod that is being
    deleted is not to blame.
    """
    code = ExitCode.SUCCEEDED if pod.exit_code is None and pod.phase is PodPhase.SUCCEEDED else pod.exit_code
    if pod.phase.ended and code == ExitCode.SUCCEEDED:
        return Verdict.RUN_SUCCEEDED
    if pod.phase.ended and code == ExitCode.FAILED and isinstance(pod.message, TerminationMessage):
        return Verdict.RUN_FAILED
    if pod.fate is Fate.OVER_LIMIT and not pod.terminating:
        return Verdict.DIED  # its agent was asked to leave, as others are whose place somebody else needs
    if _OVERDUE in pod.reasons and not pod.terminating:
        return Verdict.DIED  # its agent was asked to leave, since the pod itself has taken too long
    if pod.terminating or code in (ExitCode.LEFT, ExitCode.INTERRUPTED):
        return Verdict.LEFT
    if pod.fate in _NO_FAULT or (pod.fate is None and code == ExitCode.STORE):
        return Verdict.SPARED
    if pod.unfit is not None:
        return Verdict.UNFIT
    if code == ExitCode.BAD_INPUT:
        return Verdict.BAD_INPUT
    return Verdict.DIED


@dataclass(frozen=True, slots=True)
class Roster:
    """The pods of a job.

    Attributes:
        live: neither ended nor going.
        going: being deleted, ended or not.
        ended: ended and kept, for their log or until another takes their place.
    """

    live: tuple[Pod, ...]
    going: tuple[Pod, ...]
    ended: tuple[Pod, ...]

    @classmethod
    def of(cls, observed: Observed) -> Roster:
        """Sort what was observed."""
        return cls(
            live=_by_index(pod for pod in observed.pods if not pod.phase.ended and not pod.terminating),
            going=_by_index(pod for pod in observed.pods if pod.terminating),
            ended=_by_index(pod for pod in observed.pods if pod.phase.ended and not pod.terminating),
        )

    @property
    def past(self) -> tuple[Pod, ...]:
        """All that is not live."""
        return self.going + self.ended

    @property
    def unfinished(self) -> tuple[Pod, ...]:
        """All whose agent may still run, as far as anybody can know: not those on a node that is lost."""
        running = (pod for pod in self.live + self.going if not pod.phase.ended)
        return tuple(pod for pod in running if not (pod.terminating and pod.fate is Fate.NODE_LOST))

    @property
    def lingering(self) -> tuple[Pod, ...]:
        """Those that have ended and still hold on to what they were given."""
        return tuple(pod for pod in self.ended if pod.lingers)

    def last_of_each_place(self, job: Job, going: Iterable[Pod] = ()) -> dict[int, Pod]:
        """By index, the pod that a new one would replace.

        Args:
            job: the job.
            going: live pods that are about to go.
        """
        places: dict[int, list[Pod]] = {}
        for pod in (*self.past, *(replace(pod, terminating=True) for pod in going)):
            places.setdefault(pod.index, []).append(pod)
        return {index: _last(job, pods) for index, pods in places.items()}


def _by_index(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    return tuple(sorted(pods, key=lambda pod: (pod.index, pod.created, pod.uid)))


def _last(job: Job, pods: list[Pod]) -> Pod:
    """The last of the pods of one index, by their times and then, for times are coarse, by who replaced whom."""
    by_name = {pod.name: pod for pod in pods}
    last = max(pods, key=lambda pod: (pod.created, pod.uid))
    while (successor := by_name.pop(pod_name(job.name, job.uid, last.index, last.uid), None)) is not None:
        last = successor
    return last
