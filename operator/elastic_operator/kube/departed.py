"""Pods that are gone, remembered until another one has taken their place.

Most pods are seen going before they are gone. One that was deleted by force, or before it had a node, may be gone at
once, and so may any whose news a watch has missed. It was deleted all the same: a person is told so, and its successor
gets a name of its own, for an agent of the old name may still run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.kube.observation import pod_of
from elastic_operator.model import PodPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_operator.model import Pod
    from elastic_operator.spec import Json

_REMEMBERED: Final = 900.0
"""Seconds for which a pod is remembered whose place nobody takes."""


@dataclass(frozen=True, slots=True)
class _Departure:
    """A pod that is gone.

    Attributes:
        pod: as a pod that goes.
        until: when it is forgotten, by the clock.
    """

    pod: Pod
    until: float


class Departed:
    """The last pod of each place that is gone.

    Args:
        clock: a monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_job: dict[str, dict[int, _Departure]] = {}

    def add(self, job_uid: str, body: Json) -> None:
        """A pod of a job is gone.

        Args:
            job_uid: whose it was.
            body: its last known state.
        """
        pod = pod_of(body)
        phase = pod.phase if pod.phase.ended else PodPhase.FAILED
        gone = replace(pod, phase=phase, ready=False, terminating=True, waiting="", lingers=False)
        self._by_job.setdefault(job_uid, {})[pod.index] = _Departure(gone, self._clock() + _REMEMBERED)

    def of(self, job_uid: str, there: Sequence[Pod]) -> tuple[Pod, ...]:
        """Those whose place is still empty, each as a pod that is going and whose containers have ended.

        Args:
            job_uid: the job.
            there: the pods that it has.
        """
        places = self._by_job.get(job_uid)
        if places is None:
            return ()
        filled = {pod.index for pod in there if not pod.terminating and not pod.phase.ended}
        now = self._clock()
        left = {index: gone for index, gone in places.items() if index not in filled and gone.until > now}
        self._by_job[job_uid] = left
        if not left:
            del self._by_job[job_uid]
        return tuple(gone.pod for gone in left.values())

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._by_job.pop(job_uid, None)
