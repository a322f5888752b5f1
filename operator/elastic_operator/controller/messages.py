"""The operator's messages about a job: conditions, events, and sentences about failed pods and workers.

The conditions hold after the plan is carried out. The events result from a comparison of the new status with the last
written status. They are emitted after the new status is written, so that each event is emitted once.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType, EventReason, Reason, hostname
from elastic_operator.api.json_values import rfc3339
from elastic_operator.api.status import Condition, JobState
from elastic_operator.controller.model import JobEvent, PodEnd, TerminationCause
from torchelastic.protocol import ExitCode, RoundReason, TerminationMessage, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.failures import Completion, FailureCount
    from elastic_operator.controller.model import EndedPod, Observed, Pod, Snapshot
    from elastic_operator.controller.scaling import EmptySlot, PlannedPods
    from torchelastic.protocol import FailureRecord, OutcomeRecord

Value = tuple[bool, Reason, str]
"""The value of a condition: whether it holds, the reason, and the message."""

MESSAGE_LIMIT: Final = 8192
"""Maximum length of a condition's message in characters; the CRD allows a few more."""

SIGNAL_BASE: Final = 128
"""An exit code of 128 + n stands for the signal n."""

_CAUSES_SHOWN: Final = 3
"""Maximum number of different causes for unready pods in a message."""
_NAMES_SHOWN: Final = 5
_LAST_LINE_LIMIT: Final = 512
_QUOTE_LIMIT: Final = 2048
_UNKNOWN: Final = "whether the run has ended is not known while the store cannot be read"
_HELD: Final = "no pod is started until it can be read"


def running_conditions(snapshot: Snapshot, status: JobStatus, planned: PlannedPods) -> tuple[Condition, ...]:
    """Return the conditions of a job that is neither suspended nor finished."""
    observed, before = snapshot.observed, snapshot.job.status
    missing = _missing(snapshot, planned)
    waiting = _waiting(snapshot, status, planned, missing)
    values: dict[str, Value] = {
        ConditionType.RUNNING: _running(observed, status, waiting),
        ConditionType.WAITING: waiting,
        ConditionType.DEGRADED: _degraded(observed, status, missing),
    }
    budget_ok = Reason.BUDGET_CREATED if snapshot.job.spec.disruption_budget else Reason.NOT_REQUESTED
    # These are set when they first become true, and kept from then on.
    rare: dict[str, tuple[Reason, str | None, Reason]] = {
        ConditionType.INVALID: (*_rejection(snapshot), Reason.SPEC_VALID),
        ConditionType.SUSPENDED: (Reason.SUSPENDED, None, Reason.RESUMED),
        ConditionType.RESTART_REQUIRED: (
            Reason.SPEC_CHANGED,
            _restart_required(snapshot.changes),
            Reason.SPEC_IN_EFFECT,
        ),
        ConditionType.STORE_UNREACHABLE: (
            Reason.NOT_ALLOWED if observed.store_forbidden else Reason.UNREACHABLE,
            observed.store_error and clause(observed.store_error),
            Reason.REACHABLE,
        ),
        ConditionType.RESOURCES_BLOCKED: (
            Reason.RESOURCES_BLOCKED,
            observed.blocked and clause(observed.blocked),
            Reason.RESOURCES_AVAILABLE,
        ),
        ConditionType.DISRUPTION_BUDGET_FAILED: (
            Reason.BUDGET_REJECTED,
            observed.disruption_budget_error and clause(observed.disruption_budget_error),
            budget_ok,
        ),
    }
    known = {condition.type for condition in before.conditions}
    for kind, (reason, message, reason_if_false) in rare.items():
        if message is not None:
            values[kind] = (True, reason, message)
        elif kind in known:
            values[kind] = (False, reason_if_false, "")
    return with_times(before, values, snapshot.now)


def suspended_conditions(snapshot: Snapshot, *, stopping: bool, unread: bool) -> tuple[Condition, ...]:
    """Return the conditions of a suspended job; see :func:`~elastic_operator.controller.status.suspended_status`."""
    before = snapshot.job.status
    no: Value = (False, Reason.SUSPENDED, "")
    if stopping:
        suspended: Value = (False, Reason.STOPPING, "the pods are terminating")
    elif unread:
        suspended = (False, Reason.STORE_UNREADABLE, _UNKNOWN)
    else:
        suspended = (True, Reason.SUSPENDED, "no pod is created until spec.suspend is false again")
    why = _clauses(_UNKNOWN, _why_unread(snapshot.observed))
    values: dict[str, Value] = {
        ConditionType.RUNNING: no,
        ConditionType.WAITING: (True, Reason.STORE_UNREADABLE, why) if unread else no,
        ConditionType.DEGRADED: no,
        ConditionType.SUSPENDED: suspended,
    }
    for condition in before.conditions:
        values.setdefault(condition.type, no)
    if snapshot.job.problem is not None:
        values[ConditionType.INVALID] = (True, Reason.SPEC_INVALID, snapshot.job.problem)
    elif ConditionType.INVALID in values:
        values[ConditionType.INVALID] = (False, Reason.SPEC_VALID, "")
    if unread and before.state is not JobState.SUSPENDED:
        # The time of this condition is the start of the wait for the store.
        others = tuple(condition for condition in before.conditions if condition.type != ConditionType.WAITING)
        before = replace(before, conditions=others)
    return with_times(before, values, snapshot.now)


def finished_conditions(before: JobStatus, completion: Completion, now: float) -> tuple[Condition, ...]:
    """Return the conditions of a finished job."""
    no: Value = (False, completion.reason, "")
    yes: Value = (True, completion.reason, completion.failure.message if completion.failure is not None else "")
    values: dict[str, Value] = {
        ConditionType.RUNNING: no,
        ConditionType.WAITING: no,
        ConditionType.DEGRADED: no,
        ConditionType.SUCCEEDED if completion.failure is None else ConditionType.FAILED: yes,
        ConditionType.FINISHED: yes,
    }
    for condition in before.conditions:
        values.setdefault(condition.type, no)
    return with_times(before, values, now)


def with_times(before: JobStatus, values: Mapping[str, Value], now: float) -> tuple[Condition, ...]:
    """Return the conditions, each with the time since which it has its status."""
    since = {(condition.type, condition.status): condition.since for condition in before.conditions}
    return tuple(
        [
            Condition(
                kind, holds, reason, shorten(message, MESSAGE_LIMIT) if message else "", since.get((kind, holds), now)
            )
            for kind, (holds, reason, message) in values.items()
        ]
    )


def _rejection(snapshot: Snapshot) -> tuple[Reason, str | None]:
    """Return why the spec is invalid; None for its message if it is valid."""
    if snapshot.job.problem is not None:
        return Reason.SPEC_INVALID, snapshot.job.problem
    rejected = snapshot.observed.rejected
    return Reason.REFUSED, None if rejected is None else clause(rejected)


def _waiting(snapshot: Snapshot, status: JobStatus, planned: PlannedPods, missing: str) -> Value:
    minimum, observed = snapshot.job.spec.min_replicas, snapshot.observed
    if status.ready_replicas >= minimum:
        return (False, Reason.ENOUGH_PODS, "")
    if planned.held:
        seen = status.size_generation > 0
        unknown = _UNKNOWN if seen else "whether pods existed and the run has ended is unknown until the store is read"
        return (True, Reason.STORE_UNREADABLE, _clauses(unknown, _HELD, _why_unread(observed)))
    verb = "is" if status.ready_replicas == 1 else "are"
    there = f"{status.ready_replicas} of at least {count(minimum, 'pod')} {verb} ready"
    reason = Reason.BELOW_MINIMUM if observed.blocked is None else Reason.RESOURCES_BLOCKED
    return (True, reason, _clauses(there, missing))


def _running(observed: Observed, status: JobStatus, waiting: Value) -> Value:
    if status.state is JobState.RUNNING:
        known = f"round {status.round} with world size {status.world_size}"
        return (
            True,
            Reason.TRAINING,
            known if status.world_size else "enough pods are ready; they know the round",
        )
    waits, reason, _ = waiting
    if waits:
        return (False, Reason.NOT_STARTED if status.started is None else reason, "")
    cause = observed.round.cause if observed.round is not None and not observed.round.members else ""
    return (False, Reason.STARTING, cause or "the agents have not formed a round yet")


def _degraded(observed: Observed, status: JobStatus, missing: str) -> Value:
    if status.started is None:
        return (False, Reason.NOT_STARTED, "")
    if status.ready_replicas >= status.desired:
        return (False, Reason.ALL_PODS, "")
    there = f"{status.ready_replicas} of {count(status.desired, 'pod')} ready"
    reason = Reason.BELOW_DESIRED if observed.blocked is None else Reason.RESOURCES_BLOCKED
    return (True, reason, _clauses(there, missing))


def _restart_required(changes: Sequence[str]) -> str | None:
    if not changes:
        return None
    has = "has" if len(changes) == 1 else "have"
    return f"{listed(changes)} {has} changed; suspend the job and resume it to apply the change"


def _clauses(*parts: str) -> str:
    """Return the parts that are not empty, as one sentence."""
    return "; ".join(part for part in parts if part)


def _why_unread(observed: Observed) -> str:
    """Return why the store cannot be read, perhaps because it cannot be created."""
    return clause(observed.blocked or observed.store_error or observed.etcd_error or "")


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
        parts.append(f"not all that the job needs can be created for now: {clause(blocked)}")
    waits = [
        f"{hostname(snapshot.job.name, slot.index)} {_history(slot)} and is started again at {rfc3339(slot.due)}"
        for slot in planned.slots
        if slot.due > snapshot.now
    ]
    parts.append(listed(waits))
    if planned.held:
        parts += [_UNKNOWN, _HELD, _why_unread(snapshot.observed)]
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


def _history(slot: EmptySlot) -> str:
    """Describe the past pods of an index, as a predicate of its name: "failed 3 times in a row"."""
    often = f"{count(slot.failures, 'time')} in a row"
    if slot.replaces is None or not slot.left:
        return f"failed {often}"
    return f"was deleted {often} before it ran" if slot.replaces.terminating else f"was asked to leave {often}"


def running_events(
    snapshot: Snapshot, status: JobStatus, count: FailureCount, planned: PlannedPods
) -> tuple[JobEvent, ...]:
    """Return the events of a job that is neither suspended nor finished, with its new status."""
    before = snapshot.job.status
    return (
        *_resumed(before),
        *_pods_ended(count, planned, snapshot.now),
        *_obstacles(snapshot, status),
        *_new_round(snapshot, status),
        *_scaled(before, status),
    )


def suspension_events(before: JobStatus, status: JobStatus, count: FailureCount) -> tuple[JobEvent, ...]:
    """Return the events of a suspended job."""
    had_pods = ": its pods are asked to leave" if before.replicas else ""
    suspended = [JobEvent(EventReason.SUSPENDED, f"suspended{had_pods}")] if before.state is not status.state else []
    return (*_pods_ended(count), *suspended, *_spec_rejected(_news(before, status)))


def completion_event(status: JobStatus) -> JobEvent:
    """Return the event of a job that has finished."""
    if status.state is JobState.SUCCEEDED:
        restarts = count(status.restarts, "restart")
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
        message = f"later pods keep away from the node {node}, where {pod.name} {pod_death(pod)}"
        yield JobEvent(EventReason.NODE_EXCLUDED, message, warning=True)


def _pod_ended(ended: EndedPod) -> tuple[EventReason, str] | None:
    """Return the event of a pod that ended; None without one."""
    pod = ended.pod
    if ended.charged:
        return EventReason.POD_DIED, pod_death(pod)
    if ended.end is PodEnd.FAILED:
        return EventReason.POD_DIED, f"{pod_death(pod)}, which the failure policy ignores"
    if ended.end not in (PodEnd.LEFT, PodEnd.DISRUPTED):
        return None
    if pod.termination_cause is not None:
        return EventReason.POD_DISRUPTED, pod_disruption(pod)
    if ended.end is PodEnd.DISRUPTED:
        return EventReason.POD_DIED, pod_death(pod)
    if pod.terminating:
        return EventReason.POD_DELETED, "was deleted"
    return EventReason.POD_LEFT, "was asked to leave"


def _obstacles(snapshot: Snapshot, status: JobStatus) -> Iterator[JobEvent]:
    """Yield events about obstacles to the creation of pods according to the spec."""
    before, blocked = snapshot.job.status, snapshot.observed.blocked
    news = _news(before, status)
    yield from _spec_rejected(news)
    if (changes := news.get(ConditionType.RESTART_REQUIRED)) is not None:
        yield JobEvent(EventReason.RESTART_REQUIRED, changes)
    if (budget := news.get(ConditionType.DISRUPTION_BUDGET_FAILED)) is not None:
        yield JobEvent(EventReason.RESOURCES_BLOCKED, budget, warning=True)
    if blocked is not None and _is_blocked(status) and not _is_blocked(before):
        what = "pods cannot" if status.replicas < status.desired else "not all that the job needs can"
        message = f"{what} be created for now: {clause(blocked)}"
        yield JobEvent(EventReason.RESOURCES_BLOCKED, message, warning=True)
    unreachable = news.get(ConditionType.STORE_UNREACHABLE)
    if unreachable is not None and not before.holds(ConditionType.STORE_UNREACHABLE):
        message = f"the operator cannot use the store: {unreachable}"
        yield JobEvent(EventReason.STORE_UNREACHABLE, message, warning=True)


def _spec_rejected(news: Mapping[str, str]) -> Iterator[JobEvent]:
    if (problem := news.get(ConditionType.INVALID)) is not None:
        message = f"the spec is invalid, and no pod is created from it: {problem}"
        yield JobEvent(EventReason.REFUSED, message, warning=True)


def _news(before: JobStatus, status: JobStatus) -> dict[str, str]:
    """Return the messages of newly true conditions by type, including those with a new message."""
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
        yield JobEvent(EventReason.WORKER_FAILED, worker_failure(round.failure), warning=True)
    if not round.members:
        message = f"no pod trains now: {round.cause or 'too few nodes are there'}"
        yield JobEvent(EventReason.PAUSED, message, warning=True)
    elif before.started is None:
        pods = count(len(round.members), "pod")
        yield JobEvent(EventReason.STARTED, f"training started with {pods} and world size {status.world_size}")
    else:
        because = f": {round.cause}" if round.cause else ""
        message = f"round {round.number} with world size {round.world_size}{because}"
        yield JobEvent(EventReason.ROUND, message, warning=failed)


def _scaled(before: JobStatus, status: JobStatus) -> Iterator[JobEvent]:
    if before.desired not in (0, status.desired):
        pods = count(status.desired, "pod")
        yield JobEvent(EventReason.SCALED, f"scaled from {before.desired} to {pods}")


def pod_death(pod: Pod) -> str:
    """Describe how a pod ended, as a predicate of its name: "was killed by SIGKILL"."""
    if pod.termination_cause is not None:
        return pod_disruption(pod)
    if (name := signal_name(pod.exit_code)) is not None:
        return f"was killed by {name}"
    said = last_message(pod)
    if pod.exit_code is None and pod.init_exit_code is not None:
        return f"did not start: {said}"
    if pod.exit_code is None:
        how = "came to an unknown end"
    elif pod.exit_code == ExitCode.STORE:
        how = "gave up on the store"
    else:
        how = f"exited with code {pod.exit_code}"
    return f"{how}: {said}" if said else how


def pod_disruption(pod: Pod) -> str:
    """Describe how a pod with a termination cause ended, as a predicate of its name: "was evicted: …"."""
    node = f" {pod.node}" if pod.node else ""
    if pod.termination_cause is TerminationCause.NODE_LOST:
        return f"was lost with its node{node}"
    if pod.termination_cause is TerminationCause.OUT_OF_MEMORY:
        return "ran out of memory"
    said = last_message(pod)
    if pod.termination_cause is TerminationCause.NOT_ADMITTED:
        return f"was turned away by its node{node}{f': {clause(said)}' if said else ''}"
    for reason in pod.reasons:  # the cluster may repeat it before its message
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


def run_failure(outcome: OutcomeRecord) -> str:
    """Return why a run failed."""
    if outcome.message:
        return outcome.message
    return worker_failure(outcome.failure) if outcome.failure else "the agents gave no reason"


def worker_failure(failure: FailureRecord) -> str:
    """Describe a worker's failure: "rank 3 on digits-2 exited with ValueError: …"."""
    who = f"rank {failure.rank} on {node_name(failure)}"
    if failure.message.startswith("killed by "):  # such as "killed by SIGKILL: out of memory"
        return f"{who} was {failure.message}"
    if failure.message.startswith("the process that "):  # a process of the agent, on which its workers depend
        return f"on {node_name(failure)} {failure.message}"
    if (name := signal_name(SIGNAL_BASE - failure.exit_code if failure.exit_code < 0 else None)) is not None:
        return f"{who} was killed by {name}"
    return f"{who} exited with {failure.message or f'code {failure.exit_code}'}"


def node_name(failure: FailureRecord) -> str:
    """Return the pod where a worker failed."""
    return failure.node.rpartition(".")[0] or failure.node


def count(number: int, thing: str) -> str:
    """Return a number of things: "1 pod", "3 pods"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def clause(quoted: str) -> str:
    """Return a quoted message as part of a sentence: on one line, without a full stop, and not too long."""
    return shorten(" ".join(quoted.split()).rstrip("."), _QUOTE_LIMIT)


def listed(things: Sequence[str]) -> str:
    """Join items to "a, b and c"; a long list is shortened."""
    shown = list(things)
    if len(shown) > _NAMES_SHOWN:
        shown = [*shown[: _NAMES_SHOWN - 1], f"{len(shown) - _NAMES_SHOWN + 1} more"]
    if len(shown) <= 1:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def signal_name(exit_code: int | None) -> str | None:
    """Return the signal of an exit code, such as SIGKILL for 137; None if it does not represent a signal."""
    if exit_code is None or exit_code <= SIGNAL_BASE:
        return None
    try:
        return signal.Signals(exit_code - SIGNAL_BASE).name
    except ValueError:
        return None
