"""The pods of a job, sorted by what they mean for the plan, and what the end of a pod means."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import pod_name
from elastic_operator.controller.model import PodPhase, TerminationCause
from torchelastic.protocol import ExitCode, TerminationMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, Observed, Pod

_POD_DEADLINE: Final = "DeadlineExceeded"
"""Why a kubelet ends a pod whose template has activeDeadlineSeconds."""

_NOT_ITS_FAULT: Final = (TerminationCause.DISRUPTED, TerminationCause.NODE_LOST, TerminationCause.NOT_ADMITTED)


class PodEnd(enum.Enum):
    """What the end of a pod means."""

    RUN_SUCCEEDED = enum.auto()
    """The agent says that the run succeeded."""
    RUN_FAILED = enum.auto()
    """The agent says, in a termination message, that the run failed."""
    BAD_INPUT = enum.auto()
    """The agent cannot honour its settings; another agent could not either."""
    INCOMPATIBLE = enum.auto()
    """The image has no agent, or one that speaks another protocol; another pod would not have one either."""
    LEFT = enum.auto()
    """It was deleted, or asked to leave: no failure."""
    DISRUPTED = enum.auto()
    """It was evicted, not admitted, lost with its node, or could not reach the store: not its own failure."""
    FAILED = enum.auto()
    """It ended by itself before the run did."""


def pod_end(pod: Pod) -> PodEnd:
    """What the end of an ended or terminating pod means.

    What an agent says of the run's end counts however its pod ended. Otherwise a deleted pod has not failed.
    """
    code = ExitCode.SUCCEEDED if pod.exit_code is None and pod.phase is PodPhase.SUCCEEDED else pod.exit_code
    if pod.phase.ended and code == ExitCode.SUCCEEDED:
        return PodEnd.RUN_SUCCEEDED
    if pod.phase.ended and code == ExitCode.FAILED and isinstance(pod.message, TerminationMessage):
        return PodEnd.RUN_FAILED
    # In these two cases the agent was asked to leave because of what its own pod did.
    over_limit = pod.termination_cause is TerminationCause.OVER_LIMIT or _POD_DEADLINE in pod.reasons
    if over_limit and not pod.terminating:
        return PodEnd.FAILED
    if pod.terminating or code in (ExitCode.LEFT, ExitCode.INTERRUPTED):
        return PodEnd.LEFT
    if pod.termination_cause in _NOT_ITS_FAULT or (pod.termination_cause is None and code == ExitCode.STORE):
        return PodEnd.DISRUPTED
    if pod.incompatible_image is not None:
        return PodEnd.INCOMPATIBLE
    return PodEnd.BAD_INPUT if code == ExitCode.BAD_INPUT else PodEnd.FAILED


@dataclass(frozen=True, slots=True)
class PodSets:
    """The pods of a job.

    Attributes:
        live: neither ended nor terminating.
        terminating: being deleted, ended or not.
        ended: ended and kept, for their log or until a successor exists.
    """

    live: tuple[Pod, ...]
    terminating: tuple[Pod, ...]
    ended: tuple[Pod, ...]

    @classmethod
    def of(cls, observed: Observed) -> PodSets:
        """Sort the observed pods."""
        pods = sorted(observed.pods, key=lambda pod: (pod.index, pod.created, pod.uid))
        return cls(
            live=tuple(pod for pod in pods if not pod.phase.ended and not pod.terminating),
            terminating=tuple(pod for pod in pods if pod.terminating),
            ended=tuple(pod for pod in pods if pod.phase.ended and not pod.terminating),
        )

    @property
    def gone(self) -> tuple[Pod, ...]:
        """All pods that are not live."""
        return self.terminating + self.ended

    @property
    def by_end(self) -> list[Pod]:
        """All pods that are not live, in the order in which they ended."""
        return sorted(self.gone, key=lambda pod: (pod.ended or 0.0, pod.name))

    @property
    def unfinished(self) -> tuple[Pod, ...]:
        """Those whose agent may still run; a terminating pod on a lost node does not count."""
        running = (pod for pod in self.live + self.terminating if not pod.phase.ended)
        return tuple(
            pod for pod in running if not (pod.terminating and pod.termination_cause is TerminationCause.NODE_LOST)
        )

    @property
    def with_sidecars(self) -> tuple[Pod, ...]:
        """Ended pods in which another container still runs."""
        return tuple(pod for pod in self.ended if pod.sidecars_running)

    def last_of_each_index(self, job: Job, deleted: Iterable[Pod] = ()) -> dict[int, Pod]:
        """By index, the pod that a new one would replace.

        Args:
            job: the job.
            deleted: live pods that are about to be deleted.
        """
        by_index: dict[int, list[Pod]] = {}
        for pod in (*self.gone, *(replace(pod, terminating=True) for pod in deleted)):
            by_index.setdefault(pod.index, []).append(pod)
        return {index: _last(job, pods) for index, pods in by_index.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of a plan.

    Attributes:
        job: the job, with the spec in effect and the status that was written last.
        observed: what was observed of it.
        pods: its pods.
        now: seconds since the Unix epoch.
    """

    job: Job
    observed: Observed
    pods: PodSets
    now: float

    @property
    def spec(self) -> ElasticJobSpec:
        """The spec in effect."""
        return self.job.spec

    @property
    def before(self) -> JobStatus:
        """The status that was written last."""
        return self.job.status


def without(pods: Iterable[Pod], others: Iterable[Pod]) -> tuple[Pod, ...]:
    """The pods that are not among the others."""
    uids = {pod.uid for pod in others}
    return tuple(pod for pod in pods if pod.uid not in uids)


def _last(job: Job, pods: list[Pod]) -> Pod:
    """The newest pod of one index: by creation time and, as times are coarse, by which pod replaced which."""
    by_name = {pod.name: pod for pod in pods}
    last = max(pods, key=lambda pod: (pod.created, pod.uid))
    while (successor := by_name.pop(pod_name(job.name, job.uid, last.index, last.uid), None)) is not None:
        last = successor
    return last
