"""The status of a job as it stands in the object: camelCase and RFC 3339, as ``crds/elasticjob.yaml`` describes it.

Times are written in whole seconds, as everywhere in Kubernetes, and never later than they were.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.errors import BadInput
from elastic_operator.model import Condition, JobState, JobStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAST_SECOND: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


class _ConditionJson(msgspec.Struct, frozen=True, rename="camel"):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class _StatusJson(msgspec.Struct, frozen=True, rename="camel"):
    state: JobState = JobState.PENDING
    observed_generation: int = 0
    replicas: int = 0
    ready: int = 0
    desired: int = 0
    epoch: int = 0
    world_size: int = 0
    restarts: int = 0
    pod_failures: int = 0
    accounted: tuple[str, ...] = ()
    size_generation: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    last_failure: str = ""
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
        "podFailures": status.pod_failures,
        "sizeGeneration": status.size_generation,
        "conditions": [_condition_to_json(condition, status) for condition in status.conditions],
    }
    if status.accounted:
        document["accounted"] = sorted(status.accounted)
    if status.started is not None:
        document["startTime"] = rfc3339(status.started)
    if status.completed is not None:
        document["completionTime"] = rfc3339(status.completed)
    if status.last_failure:
        document["lastFailure"] = status.last_failure
    return document


def status_from_json(document: Mapping[str, Any] | None) -> JobStatus:
    """The status of an object; an empty one where there is none yet.

    Raises:
        BadInput: it is not one that this operator writes. To take it for an empty one would forget what it had counted.
    """
    try:
        parsed = msgspec.convert(document or {}, _StatusJson)
    except msgspec.ValidationError as error:
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
        pod_failures=parsed.pod_failures,
        accounted=frozenset(parsed.accounted),
        size_generation=parsed.size_generation,
        started=_seconds(parsed.start_time),
        completed=_seconds(parsed.completion_time),
        last_failure=parsed.last_failure,
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


def _seconds(time: datetime | None) -> float | None:
    if time is None:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
