"""The events of a job, found by comparing the new status with the one that was written last.

They are emitted once the new status is written, so that each is emitted once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.api.constants import ConditionType, EventReason, Reason
from elastic_operator.api.status import JobState
from elastic_operator.controller import messages
from elastic_operator.controller.model import JobEvent, PodEnd
from torchelastic.protocol import RoundReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.failures import FailureCount
    from elastic_operator.controller.model import EndedPod
    from elastic_operator.controller.scaling import PlannedPods
    from elastic_operator.controller.snapshot import Snapshot


def running_events(
    snapshot: Snapshot, status: JobStatus, count: FailureCount, planned: PlannedPods
) -> tuple[JobEvent, ...]:
    """The events of a job that is neither suspended nor finished, with its new status."""
    before = snapshot.job.status
    return (
        *_resumed(before),
        *_pods_ended(count, planned, snapshot.now),
        *_obstacles(snapshot, status),
        *_new_round(snapshot, status),
        *_scaled(before, status),
    )


def suspension_events(before: JobStatus, status: JobStatus, count: FailureCount) -> tuple[JobEvent, ...]:
    """The events of a suspended job."""
    had_pods = ": its pods are asked to leave" if before.replicas else ""
    suspended = [JobEvent(EventReason.SUSPENDED, f"suspended{had_pods}")] if before.state is not status.state else []
    return (*_pods_ended(count), *suspended, *_spec_rejected(_news(before, status)))


def completion_event(status: JobStatus) -> JobEvent:
    """The event of a job that has finished."""
    if status.state is JobState.SUCCEEDED:
        restarts = messages.count(status.restarts, "restart")
        return JobEvent(EventReason.SUCCEEDED, f"succeeded in round {status.round} after {restarts}")
    why = status.last_failure.message if status.last_failure is not None else ""
    return JobEvent(EventReason.FAILED, f"failed: {why}", warning=True)


def _resumed(before: JobStatus) -> Iterator[JobEvent]:
    if before.state is JobState.SUSPENDED:
        since = f" after round {before.round}" if before.round > 0 else ""
        yield JobEvent(EventReason.RESUMED, f"resumed{since}")


def _pods_ended(count: FailureCount, planned: PlannedPods | None = None, now: float = 0.0) -> Iterator[JobEvent]:
    successors: dict[str, str] = {}
    for slot in planned.slots if planned is not None else ():
        if slot.replaces is not None:
            when = f" in {slot.due - now:.0f} s" if slot.due >= now + 1 else ""
            when = " once the store can be read" if planned is not None and planned.held else when
            successors[slot.replaces.uid] = f"; a new pod takes its place{when}"
    for each in count.ended:
        if (what := _pod_ended(each)) is not None:
            reason, how = what
            message = f"{each.pod.name} {how}{successors.get(each.pod.uid, '')}"
            yield JobEvent(reason, message, warning=reason is EventReason.POD_DIED)
    for node, pod in count.newly_excluded:
        message = f"later pods keep away from the node {node}, where {pod.name} {messages.pod_death(pod)}"
        yield JobEvent(EventReason.NODE_EXCLUDED, message, warning=True)


def _pod_ended(ended: EndedPod) -> tuple[EventReason, str] | None:
    """What to say of a pod that ended; None for nothing."""
    pod = ended.pod
    if ended.charged:
        return EventReason.POD_DIED, messages.pod_death(pod)
    if ended.end is PodEnd.FAILED:
        return EventReason.POD_DIED, f"{messages.pod_death(pod)}, which the failure policy ignores"
    if ended.end not in (PodEnd.LEFT, PodEnd.DISRUPTED):
        return None
    if pod.termination_cause is not None:
        return EventReason.POD_DISRUPTED, messages.pod_disruption(pod)
    if ended.end is PodEnd.DISRUPTED:
        return EventReason.POD_DIED, messages.pod_death(pod)
    if pod.terminating:
        return EventReason.POD_DELETED, "was deleted"
    return EventReason.POD_LEFT, "was asked to leave"


def _obstacles(snapshot: Snapshot, status: JobStatus) -> Iterator[JobEvent]:
    """What prevents pods from being created, or from being created as the spec says."""
    before, blocked = snapshot.job.status, snapshot.observed.blocked
    news = _news(before, status)
    yield from _spec_rejected(news)
    if (changes := news.get(ConditionType.RESTART_REQUIRED)) is not None:
        yield JobEvent(EventReason.RESTART_REQUIRED, changes)
    if (budget := news.get(ConditionType.DISRUPTION_BUDGET_FAILED)) is not None:
        yield JobEvent(EventReason.RESOURCES_BLOCKED, budget, warning=True)
    if blocked is not None and _is_blocked(status) and not _is_blocked(before):
        what = "pods cannot" if status.replicas < status.desired else "not all that the job needs can"
        message = f"{what} be made for now: {messages.clause(blocked)}"
        yield JobEvent(EventReason.RESOURCES_BLOCKED, message, warning=True)
    unreachable = news.get(ConditionType.STORE_UNREACHABLE)
    if unreachable is not None and not before.holds(ConditionType.STORE_UNREACHABLE):
        message = f"the operator cannot use the store: {unreachable}"
        yield JobEvent(EventReason.STORE_UNREACHABLE, message, warning=True)


def _spec_rejected(news: Mapping[str, str]) -> Iterator[JobEvent]:
    if (problem := news.get(ConditionType.INVALID)) is not None:
        message = f"the spec cannot be honoured, and no pod is made of it: {problem}"
        yield JobEvent(EventReason.REFUSED, message, warning=True)


def _news(before: JobStatus, status: JobStatus) -> dict[str, str]:
    """By type, the messages of conditions that are true, and were not true with the same message before."""
    known = {condition.type: condition.message for condition in before.conditions if condition.status}
    return {
        each.type: each.message for each in status.conditions if each.status and known.get(each.type) != each.message
    }


def _is_blocked(status: JobStatus) -> bool:
    return any(each.status and each.reason == Reason.RESOURCES_BLOCKED for each in status.conditions)


def _new_round(snapshot: Snapshot, status: JobStatus) -> Iterator[JobEvent]:
    before, round = snapshot.job.status, snapshot.observed.round
    if round is None or round.number <= before.round:
        return
    charged = round.restarts > before.restarts
    failed = charged and round.reason is RoundReason.WORKER_FAILED
    if charged and not failed and round.failure is not None:
        yield JobEvent(EventReason.WORKER_FAILED, messages.worker_failure(round.failure), warning=True)
    if not round.members:
        message = f"nobody trains now: {round.cause or 'too few nodes are there'}"
        yield JobEvent(EventReason.PAUSED, message, warning=True)
    elif before.started is None:
        pods = messages.count(len(round.members), "pod")
        yield JobEvent(EventReason.STARTED, f"training started with {pods} and world size {status.world_size}")
    else:
        because = f": {round.cause}" if round.cause else ""
        message = f"round {round.number} with world size {round.world_size}{because}"
        yield JobEvent(EventReason.ROUND, message, warning=failed)


def _scaled(before: JobStatus, status: JobStatus) -> Iterator[JobEvent]:
    if before.desired not in (0, status.desired):
        pods = messages.count(status.desired, "pod")
        yield JobEvent(EventReason.SCALED, f"scaled from {before.desired} to {pods}")
