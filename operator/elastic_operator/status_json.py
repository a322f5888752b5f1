"""The status of a job as it stands in the object: camelCase and RFC 3339, as ``crds/elasticjob.yaml`` describes it.

Times are written in whole seconds, as everywhere in Kubernetes, and never later than they were; that of the time split
has milliseconds.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.errors import BadInput
from elastic_operator.model import Condition, JobState, JobStatus, LastFailure
from elastic_operator.pinned import checked
from elastic_operator.split_json import SplitJson, seconds_of, split_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAST_SECOND: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


class _ConditionJson(msgspec.Struct, frozen=True, rename="camel"):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class _LastFailureJson(msgspec.Struct, frozen=True, rename="camel"):
    message: str = ""
    pod: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    time: datetime | None = None


class _StatusJson(msgspec.Struct, frozen=True, rename="camel"):
    state: JobState = JobState.PENDING
    observed_generation: int = 0
    replicas: int = 0
    ready: int = 0
    desired: int = 0
    epoch: int = 0
    world_size: int = 0
    restarts: int = 0
    free_restarts: int = 0
    pod_failures: int = 0
    accounted: tuple[str, ...] = ()
    size_generation: int = 0
    start_time: datetime | None = None
    active_since: datetime | None = None
    completion_time: datetime | None = None
    last_failure: _LastFailureJson | None = None
    excluded_nodes: tuple[str, ...] = ()
    pinned: dict[str, Any] | None = None
    time_split: SplitJson | None = None
    conditions: tuple[_ConditionJson, ...] = ()


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """What to write as the object's ``status``; what only the cluster knows (``selector``) is not in it."""
    document: dict[str, Any] = {
        "state": status.state.value,
        "observedGeneration": status.observed_generation,
        "replicas": status.replicas,
        "ready": status.ready,
        "desired": status.desired,
        "readyDesired": f"{status.ready}/{status.desired}",
        "epoch": status.epoch,
        "worldSize": status.world_size,
        "restarts": status.restarts,
        "freeRestarts": status.free_restarts,
        "podFailures": status.pod_failures,
        "sizeGeneration": status.size_generation,
        "conditions": [_condition_to_json(condition, status) for condition in status.conditions],
    }
    if status.accounted:
        document["accounted"] = sorted(status.accounted)
    if status.started is not None:
        document["startTime"] = rfc3339(status.started)
    if status.active is not None:
        document["activeSince"] = rfc3339(status.active)
    if status.completed is not None:
        document["completionTime"] = rfc3339(status.completed)
    if status.last_failure is not None:
        document["lastFailure"] = _failure_to_json(status.last_failure)
    if status.excluded:
        document["excludedNodes"] = list(status.excluded)
    if status.pinned is not None:
        document["pinned"] = status.pinned
    if status.split is not None:
        document["timeSplit"] = split_to_json(status.split)
    return document


def status_from_json(document: Mapping[str, Any] | None) -> JobStatus:
    """The status of an object; an empty one where there is none yet.

    Raises:
        BadInput: it is not one that this operator writes. To take it for an empty one would forget what it had counted.
    """
    try:
        parsed = msgspec.convert(document or {}, _StatusJson)
        pinned = None if parsed.pinned is None else checked(parsed.pinned)
        split = None if parsed.time_split is None else parsed.time_split.split()
    except (msgspec.ValidationError, BadInput) as error:
        raise BadInput(f"the job's status is not one that this operator writes: {error}") from None
    return JobStatus(
        state=parsed.state,
        observed_generation=parsed.observed_generation,
        replicas=parsed.replicas,
        ready=parsed.ready,
        desired=parsed.desired,
        epoch=parsed.epoch,
        world_size=parsed.world_size,
        restarts=parsed.restarts,
        free_restarts=parsed.free_restarts,
        pod_failures=parsed.pod_failures,
        accounted=frozenset(parsed.accounted),
        size_generation=parsed.size_generation,
        started=_seconds(parsed.start_time),
        active=_seconds(parsed.active_since),
        completed=_seconds(parsed.completion_time),
        last_failure=_failure_from_json(parsed.last_failure),
        excluded=parsed.excluded_nodes,
        pinned=pinned,
        split=split,
        conditions=tuple(
            Condition(
                type=condition.type,
                status=condition.status == "True",
                reason=condition.reason,
                message=condition.message,
                since=_seconds(condition.last_transition_time) or 0.0,
            )
            for condition in parsed.conditions
        ),
    )


def rfc3339(seconds: float) -> str:
    """A time as Kubernetes writes it; one that no calendar has becomes the nearest that one has."""
    if not math.isfinite(seconds):
        seconds = _LAST_SECOND if seconds > 0 else 0.0
    whole = math.floor(min(max(seconds, 0.0), _LAST_SECOND))
    return datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition_to_json(condition: Condition, status: JobStatus) -> dict[str, Any]:
    return {
        "type": str(condition.type),
        "status": "True" if condition.status else "False",
        "observedGeneration": status.observed_generation,
        "lastTransitionTime": rfc3339(condition.since),
        "reason": str(condition.reason),
        "message": condition.message,
    }


def _failure_to_json(failure: LastFailure) -> dict[str, Any]:
    document: dict[str, Any] = {"message": failure.message, "time": rfc3339(failure.time)}
    if failure.pod:
        document["pod"] = failure.pod
    if failure.rank is not None:
        document["rank"] = failure.rank
    if failure.exit_code is not None:
        document["exitCode"] = failure.exit_code
    if failure.signal:
        document["signal"] = failure.signal
    return document


def _failure_from_json(parsed: _LastFailureJson | None) -> LastFailure | None:
    if parsed is None:
        return None
    return LastFailure(
        message=parsed.message,
        pod=parsed.pod,
        rank=parsed.rank,
        exit_code=parsed.exit_code,
        signal=parsed.signal,
        time=_seconds(parsed.time) or 0.0,
    )


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else seconds_of(time)
