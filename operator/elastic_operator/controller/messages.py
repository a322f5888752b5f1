"""The operator's messages about a job: events, and sentences about failed pods and workers.

The events result from a comparison of the new status with the last written status. They are emitted after the new
status is written, so that each event is emitted once.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, Reason, hostname
from elastic_operator.api.json_values import rfc3339
from elastic_operator.api.status import JobState, JobStatus
from elastic_operator.controller.model import (
    EndedPod,
    JobEvent,
    Observed,
    PlannedPods,
    Pod,
    PodEnd,
    Snapshot,
    TerminationCause,
)
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.pod import ExitCode, TerminationMessage
from torchelastic.protocol.records import FailureRecord, RoundReason, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.controller.model import FailureCount

MESSAGE_LIMIT: Final = 8192
"""Maximum number of characters of a condition's or failure's message; the CRD allows at least twice as many."""

SIGNAL_BASE: Final = 128
"""An exit code of 128 + n stands for the signal n."""

OUTCOME_UNKNOWN: Final = "whether the run has ended is not known while the store cannot be read"

ETCD_OPEN: Final = "everyone who reaches the job's etcd can read and change its run, because spec.etcd.security is None"

_HELD: Final = "no pod is started until it can be read"
_CAUSES_SHOWN: Final = 3
"""Maximum number of different causes for unready pods in a message."""
_NAMES_SHOWN: Final = 5
_LAST_LINE_LIMIT: Final = 512
_QUOTE_LIMIT: Final = 2048


def running_events(
    snapshot: Snapshot, status: JobStatus, failures: FailureCount, planned: PlannedPods
) -> tuple[JobEvent, ...]:
    """Return the events of a job that is neither suspended nor finished, with its new status."""
    before, events = snapshot.job.status, []
    if before.state is JobState.SUSPENDED:
        since = f" after round {before.round}" if before.round > 0 else ""
        events.append(JobEvent(Reason.RESUMED, f"resumed{since}"))
    events += _pods_ended(failures, planned, snapshot.now)
    events += _obstacles(snapshot, status)
    events += _new_round(snapshot, status)
    if before.desired not in (0, status.desired):
        pods = count(status.desired, "pod")
        events.append(JobEvent(Reason.SCALED, f"scaled from {before.desired} to {pods}"))
    return tuple(events)


def suspension_events(before: JobStatus, status: JobStatus, failures: FailureCount) -> tuple[JobEvent, ...]:
    """Return the events of a suspended job."""
    had_pods = ": its pods are asked to leave" if before.replicas else ""
    suspended = [JobEvent(Reason.SUSPENDED, f"suspended{had_pods}")] if before.state is not status.state else []
    return (*_pods_ended(failures), *suspended, *_spec_rejected(_news(before, status)))


def completion_event(status: JobStatus) -> JobEvent:
    """Return the event of a job that has finished."""
    if status.state is JobState.SUCCEEDED:
        restarts = count(status.restarts, "restart")
        return JobEvent(Reason.SUCCEEDED, f"succeeded in round {status.round} after {restarts}")
    return JobEvent(Reason.FAILED, f"failed: {status.what_failed}", warning=True)


def _pods_ended(failures: FailureCount, planned: PlannedPods | None = None, now: float = 0.0) -> Iterator[JobEvent]:
    successors: dict[str, str] = {}
    for new in planned.missing if planned is not None else ():
        if new.replaces is not None:
            when = f" in {new.due - now:.0f} s" if new.due >= now + 1 else ""
            when = " once the store can be read" if planned is not None and planned.held else when
            successors[new.replaces.uid] = f"; a new pod takes its place{when}"
    for each in failures.ended:
        if (what := _pod_ended(each)) is not None:
            reason, how = what
            message = f"{each.pod.name} {how}{successors.get(each.pod.uid, '')}"
            yield JobEvent(reason, message, warning=reason is Reason.POD_DIED)
    for node, pod in failures.newly_excluded:
        message = f"later pods avoid the node {node}, where {pod.name} {pod_death(pod)}"
        yield JobEvent(Reason.NODE_EXCLUDED, message, warning=True)


def _pod_ended(ended: EndedPod) -> tuple[Reason, str] | None:
    pod = ended.pod
    if ended.charged:
        return Reason.POD_DIED, pod_death(pod)
    if ended.end is PodEnd.FAILED:
        return Reason.POD_DIED, f"{pod_death(pod)}, which the failure policy ignores"
    if ended.end not in (PodEnd.LEFT, PodEnd.DISRUPTED):
        return None
    if pod.termination_cause is not None:
        return Reason.POD_DISRUPTED, pod_disruption(pod)
    if ended.end is PodEnd.DISRUPTED:
        return Reason.POD_DIED, pod_death(pod)
    if pod.terminating:
        return Reason.POD_DELETED, "was deleted"
    return Reason.POD_LEFT, "was asked to leave"


def _obstacles(snapshot: Snapshot, status: JobStatus) -> Iterator[JobEvent]:
    """Yield the events about a rejected spec, a required restart, blocked objects and an unreachable store."""
    before, blocked = snapshot.job.status, snapshot.observed.blocked
    news = _news(before, status)
    yield from _spec_rejected(news)
    if (changes := news.get(ConditionType.RESTART_REQUIRED)) is not None:
        yield JobEvent(Reason.RESTART_REQUIRED, changes)
    if (budget := news.get(ConditionType.DISRUPTION_BUDGET_FAILED)) is not None:
        yield JobEvent(Reason.RESOURCES_BLOCKED, budget, warning=True)
    steps = news.get(ConditionType.STEPS_DIFFER)
    # More ranks may report their steps later, which changes the message of the same round.
    if steps is not None and (status.round > before.round or not before.holds(ConditionType.STEPS_DIFFER)):
        yield JobEvent(Reason.STEPS_DIFFER, steps, warning=True)
    if blocked is not None and _is_blocked(status) and not _is_blocked(before):
        what = "pods" if status.replicas < status.desired else "some objects of the job"
        message = f"{what} cannot be created for now: {clause(blocked)}"
        yield JobEvent(Reason.RESOURCES_BLOCKED, message, warning=True)
    unreachable = news.get(ConditionType.STORE_UNREACHABLE)
    if unreachable is not None and not before.holds(ConditionType.STORE_UNREACHABLE):
        message = f"the operator cannot use the store: {unreachable}"
        yield JobEvent(Reason.STORE_UNREACHABLE, message, warning=True)


def _spec_rejected(news: Mapping[str, str]) -> Iterator[JobEvent]:
    if (problem := news.get(ConditionType.INVALID)) is not None:
        message = f"the spec is invalid, and no pod is created from it: {problem}"
        yield JobEvent(Reason.REFUSED, message, warning=True)


def _news(before: JobStatus, status: JobStatus) -> dict[str, str]:
    """Return, by type, the messages of the true conditions that are new or have a new message."""
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
        yield JobEvent(Reason.WORKER_FAILED, worker_failure(round.failure), warning=True)
    if not round.members:
        message = f"no pod trains now: {round.cause or 'too few nodes are available'}"
        yield JobEvent(Reason.PAUSED, message, warning=True)
    elif before.started is None:
        pods = count(len(round.members), "pod")
        yield JobEvent(Reason.STARTED, f"training started with {pods} and world size {status.world_size}")
    else:
        because = f": {round.cause}" if round.cause else ""
        message = f"round {round.number} with world size {round.world_size}{because}"
        yield JobEvent(Reason.ROUND, message, warning=failed)


def missing_pods(snapshot: Snapshot, status: JobStatus, planned: PlannedPods) -> tuple[str, str]:
    """Return two messages about missing pods and the reasons: compared to the minimum, and to the desired number.

    If the store must be read first, the first message says only that.
    """
    ready, minimum = status.ready_replicas, snapshot.job.spec.min_replicas
    missing = _missing(snapshot, planned)
    too_few = _clauses(f"{ready} of at least {count(minimum, 'pod')} {'is' if ready == 1 else 'are'} ready", missing)
    if planned.held:
        too_few = _clauses(OUTCOME_UNKNOWN, _HELD, _why_unread(snapshot.observed))
    return too_few, _clauses(f"{ready} of {count(status.desired, 'pod')} ready", missing)


def spares(snapshot: Snapshot, status: JobStatus, planned: PlannedPods) -> str:
    """Return how many spares of a job are ready, and why the others are not; empty for a job without spares."""
    wanted, ready = snapshot.job.spec.spares, status.ready_spares
    if not wanted:
        return ""
    known = f"{ready} of {count(wanted, 'spare')} ready"
    if ready == wanted or status.ready_replicas < status.desired:  # the condition Degraded names the missing pods
        return known
    return _clauses(known, _missing(snapshot, planned))


def different_steps(observed: Observed) -> str | None:
    """Return from which to which step the ranks began the current round; None if they began at the same step."""
    past = observed.history.rounds[-1] if observed.history is not None and observed.history.rounds else None
    if past is None or observed.round is None or past.number != observed.round.number or not past.first_steps:
        return None
    return (
        f"round {past.number}: the ranks began at different steps, from {past.first_steps[0]} to {past.first_steps[-1]}"
    )


def store_unread(observed: Observed) -> str:
    """Return why it is unknown whether the run of a job has ended."""
    return _clauses(OUTCOME_UNKNOWN, _why_unread(observed))


def spec_changes(changes: Sequence[str]) -> str:
    """Return a message about the fields of the spec that differ from the applied spec."""
    has_changed = "has changed" if len(changes) == 1 else "have changed"
    return f"{listed(changes)} {has_changed}; suspend the job and resume it to apply the change"


def _missing(snapshot: Snapshot, planned: PlannedPods) -> str:
    """Return which pods are missing, and why."""
    blocked = snapshot.observed.blocked
    starting = [(pod.index, pod.name, clause(pod.waiting)) for pod in planned.staying if not pod.ready]
    parts = []
    if blocked is None:
        starting += [(pod.index, pod.name, "") for pod in planned.created]
    elif planned.created:
        names = listed([pod.name for pod in planned.created])
        parts.append(f"{names} cannot be created for now: {clause(blocked)}")
    parts += _not_ready(starting)
    if blocked is not None and not planned.created:
        parts.append(f"some objects of the job cannot be created for now: {clause(blocked)}")
    waits = []
    for new in planned.missing:
        if new.due > snapshot.now:
            last, often = new.replaces, count(new.failures, "time")
            how = "was deleted" if last is not None and last.terminating and last.exit_code is None else "failed"
            who = hostname(snapshot.job.name, new.index)
            waits.append(f"{who} {how} {often} in a row and is started again at {rfc3339(new.due)}")
    parts.append(listed(waits))
    if planned.held:
        parts += [OUTCOME_UNKNOWN, _HELD, _why_unread(snapshot.observed)]
    if (problem := snapshot.job.problem) is not None:
        parts.append(f"no pod is created from this spec: {clause(problem)}")
    elif snapshot.observed.rejected is not None:
        parts.append("no more pods are created from this spec, which the cluster rejects")
    return _clauses(*parts)


def _not_ready(starting: Sequence[tuple[int, str, str]]) -> list[str]:
    """Return clauses about pods that are not ready (index, name and cause), grouped by cause."""
    causes: dict[str, list[str]] = {}
    for _, name, cause in sorted(starting):
        causes.setdefault(cause if cause in causes or len(causes) < _CAUSES_SHOWN else "", []).append(name)
    return [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} not ready yet: {cause}"
        if cause
        else f"{listed(names)} {'has' if len(names) == 1 else 'have'} not joined yet"
        for cause, names in causes.items()
    ]


def _clauses(*parts: str) -> str:
    """Return the parts that are not empty, as one sentence."""
    return "; ".join(part for part in parts if part)


def _why_unread(observed: Observed) -> str:
    """Return why the store cannot be read or cannot be created."""
    return clause(observed.blocked or observed.store_error or observed.etcd_error or "")


def pod_death(pod: Pod) -> str:
    """Describe how a pod ended, as the words that follow its name: "was killed by SIGKILL"."""
    if pod.termination_cause is not None:
        return pod_disruption(pod)
    if (name := signal_name(pod.exit_code)) is not None:
        return f"was killed by {name}"
    said = last_message(pod)
    if pod.exit_code is None and pod.init_exit_code is not None:
        return f"did not start: {said}"
    if pod.exit_code is None:
        how = "ended for an unknown reason"
    elif pod.exit_code == ExitCode.STORE_UNAVAILABLE:
        how = "gave up on the store"
    else:
        how = f"exited with code {pod.exit_code}"
    return f"{how}: {said}" if said else how


def pod_disruption(pod: Pod) -> str:
    """Describe how a pod with a termination cause ended, as the words that follow its name: "was evicted: …"."""
    node = f" {pod.node}" if pod.node else ""
    if pod.termination_cause is TerminationCause.NODE_LOST:
        return f"was lost with its node{node}"
    if pod.termination_cause is TerminationCause.OUT_OF_MEMORY:
        return "ran out of memory"
    said = last_message(pod)
    if pod.termination_cause is TerminationCause.NOT_ADMITTED:
        return f"was not admitted by its node{node}{f': {clause(said)}' if said else ''}"
    for reason in pod.reasons:  # the cluster may begin its message with the reason
        said = said.removeprefix(f"{reason}: ")
    preempted = any(reason.startswith("Preempt") for reason in pod.reasons)
    return f"was {'preempted' if preempted else 'evicted'}{f': {clause(said)}' if said else ''}"


def last_message(pod: Pod) -> str:
    """Return a pod's termination message, or else the last line of its output."""
    message = pod.message
    if isinstance(message, TerminationMessage):
        return message.message or (worker_failure(message.failure) if message.failure else message.reason)
    lines = [line.strip() for line in str(message or "").splitlines() if line.strip()]
    return shorten(lines[-1], _LAST_LINE_LIMIT) if lines else ""


def worker_failure(failure: FailureRecord) -> str:
    """Describe a worker's failure: "rank 3 on digits-2 exited with ValueError: …"."""
    who = f"rank {failure.rank} on {name_of(failure.node)}"
    if failure.message.startswith("killed by "):  # such as "killed by SIGKILL: out of memory"
        return f"{who} was {failure.message}"
    if failure.message.startswith("the process that "):  # a process of the agent, on which its workers depend
        return f"on {name_of(failure.node)} {failure.message}"
    if (name := signal_name(SIGNAL_BASE - failure.exit_code if failure.exit_code < 0 else None)) is not None:
        return f"{who} was killed by {name}"
    return f"{who} exited with {failure.message or f'code {failure.exit_code}'}"


def count(number: int, thing: str) -> str:
    """Return a number with its noun: "1 pod", "3 pods"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def clause(quoted: str) -> str:
    """Return a quoted message as part of a sentence: on one line, without a full stop, and of limited length."""
    return shorten(" ".join(quoted.split()).rstrip("."), _QUOTE_LIMIT)


def listed(things: Sequence[str]) -> str:
    """Join items, as in "a, b and c"; a long list is shortened."""
    shown = list(things)
    if len(shown) > _NAMES_SHOWN:
        shown = [*shown[: _NAMES_SHOWN - 1], f"{len(shown) - _NAMES_SHOWN + 1} more"]
    if len(shown) <= 1:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def signal_name(exit_code: int | None) -> str | None:
    """Return the signal of an exit code, such as SIGKILL for 137; None if the code does not stand for a signal."""
    if exit_code is None or exit_code <= SIGNAL_BASE:
        return None
    try:
        return signal.Signals(exit_code - SIGNAL_BASE).name
    except ValueError:
        return None
