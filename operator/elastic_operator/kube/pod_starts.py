"""What keeps a pod from starting that has its node, where its status does not say so.

A volume that cannot be mounted, or a network that is not there, stands in no status of the pod: only its events tell.
An API server searches those of a whole namespace for those of one pod. So it is asked where a pod takes its time, of
one pod of a job at a time, and each time later.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.advice import with_advice
from elastic_operator.kube.container_state import seconds
from elastic_operator.kube.pod_words import in_a_line
from elastic_operator.kube.resources import EVENTS
from elastic_operator.model import PodPhase
from elastic_operator.unchecked import mapping, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from elastic_operator.kube.api import Api
    from elastic_operator.model import Job, Pod
    from elastic_operator.spec import Json

_log: Final = logging.getLogger(__name__)

_FIRST_LOOK: Final = 5.0
"""Seconds that pods may take to start before their events are looked at. A kubelet tells within a second or two that a
volume cannot be mounted."""
_LONGEST_WAIT: Final = 60.0
_THOSE_WHO_START: Final = frozenset({"kubelet", "attachdetach-controller"})
"""Who says why a pod does not start, once it has a node; what others say of it is about something else."""
_PULLS: Final = "Pulling"


def last_word(events: Iterable[Json]) -> str:
    """What keeps a pod from starting, by the last of its events, as a clause; empty where that is nothing bad.

    Args:
        events: of this pod, in any order.
    """
    told = [event for event in events if _teller(event) in _THOSE_WHO_START]
    if not told:
        return ""
    last = max(told, key=_time)
    said = in_a_line(text(last, "message"))
    if text(last, "type") == "Warning":
        return with_advice(said or text(last, "reason"))
    return f"its node is {said[:1].lower()}{said[1:]}" if said and text(last, "reason") == _PULLS else ""


async def why_not_started(api: Api, namespace: str, uid: str) -> str:
    """What keeps a pod from starting, as its events tell, as a clause; empty where they tell nothing of the kind.

    Args:
        api: the connection.
        namespace: where the pod is.
        uid: which one it is.

    Raises:
        ClusterError: they cannot be seen.
    """
    events, _ = await api.list(EVENTS, namespace, fields=f"involvedObject.uid={uid}")
    return last_word(events)


@dataclass(slots=True)
class _Starts:
    """The pods of a job that take their time.

    Attributes:
        wait: seconds until the next look.
        due: when that is; a monotonic time.
        said: what was seen to keep each of them, by its UID; the one that was looked at last is the last.
    """

    wait: float
    due: float
    said: dict[str, str] = field(default_factory=dict)


class PodStarts:
    """Says of pods that take their time to start what keeps them.

    Args:
        api: is asked for their events.
        clock: a monotonic time in seconds.
    """

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._jobs: dict[str, _Starts] = {}

    async def look(self, job: Job, pods: Sequence[Pod]) -> float | None:
        """See what keeps the job's pods from starting, if it is time to.

        Args:
            job: whose pods they are.
            pods: as they are now.

        Returns:
            Seconds until the next time to look at them; None where none is being started.
        """
        slow = [pod for pod in pods if _is_being_started(pod)]
        if not slow:
            self.forget(job.uid)
            return None
        starts = self._jobs.setdefault(job.uid, _Starts(_FIRST_LOOK, self._clock() + _FIRST_LOOK))
        there = {pod.uid for pod in slow}
        starts.said = {uid: said for uid, said in starts.said.items() if uid in there}
        if starts.due <= self._clock():
            await self._look(job, starts, slow)
        return max(starts.due - self._clock(), 0.0)

    def explained(self, job: Job, pod: Pod) -> Pod:
        """A pod of the job; one that is being started with what was seen to keep it from that."""
        starts = self._jobs.get(job.uid)
        if starts is None or not _is_being_started(pod):
            return pod
        return replace(pod, waiting=starts.said.get(pod.uid, ""))

    def forget(self, uid: str) -> None:
        """The job is gone, or all its pods have started."""
        self._jobs.pop(uid, None)

    async def _look(self, job: Job, starts: _Starts, slow: Sequence[Pod]) -> None:
        """Look at the pod at which nobody has looked yet, or not for the longest time."""
        uid = next((pod.uid for pod in slow if pod.uid not in starts.said), next(iter(starts.said), ""))
        said = starts.said.pop(uid, "")
        try:
            said = await why_not_started(self._api, job.namespace, uid)
        except ClusterError as error:
            _log.debug("%s/%s: what is said of its pods cannot be seen: %s", job.namespace, job.name, error)
        starts.said[uid] = said
        starts.wait = min(starts.wait * 2, _LONGEST_WAIT)
        starts.due = self._clock() + starts.wait


def _is_being_started(pod: Pod) -> bool:
    return pod.phase is PodPhase.PENDING and bool(pod.node) and not pod.waiting and not pod.terminating


def _teller(event: Json) -> str:
    return text(event, "source", "component") or text(event, "reportingComponent")


def _time(event: Json) -> tuple[float, bool]:
    """When it was told last; of two in the same second, the bad news is the last."""
    times = (
        text(event, "series", "lastObservedTime"),
        text(event, "lastTimestamp"),
        text(event, "eventTime"),
        text(mapping(event, "metadata"), "creationTimestamp"),
    )
    return next((at for at in map(seconds, times) if at is not None), 0.0), text(event, "type") == "Warning"
