"""The status of an ElasticJob: the only state that one reconcile passes to the next."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic_operator.api.json_values import from_json, to_json
from elastic_operator.api.spec import AppliedSpec  # noqa: TC001 - msgspec reads the annotations
from elastic_operator.errors import BadInput
from torchelastic.protocol import TimeBreakdown  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Mapping


class JobState(enum.StrEnum):
    """The state of a job in one word, as ``kubectl get`` shows it."""

    PENDING = "Pending"
    """Some pods or the etcd do not exist yet, and nothing trains."""
    RUNNING = "Running"
    """At least the minimum number of pods trains."""
    WAITING = "Waiting"
    """The job has trained, but now has fewer pods than the minimum."""
    SUSPENDED = "Suspended"
    """The pods are gone or terminating, and no pod is created until the job is resumed."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether this is a final state."""
        return self in (JobState.SUCCEEDED, JobState.FAILED)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as in Kubernetes' metav1.

    Attributes:
        type: one of the names in :mod:`elastic_operator.api.constants`.
        status: whether it holds.
        reason: one word in CamelCase.
        message: a sentence.
        since: when ``status`` last changed.
    """

    type: str
    status: bool
    reason: str = ""
    message: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class LastFailure:
    """The last failure of a worker or a pod.

    Attributes:
        message: a sentence.
        pod: the pod's name; empty if no pod failed.
        rank: the rank of the worker; None if no worker failed.
        exit_code: the exit code of the worker or the pod's agent; None after a signal, or if unknown.
        signal: the name of the signal that ended it; empty for none.
        time: when the operator noticed it.
    """

    message: str = ""
    pod: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job.

    Attributes:
        state: one word.
        observed_generation: the generation of the spec that this status describes.
        replicas: worker pods that neither have ended nor terminate, once the plan with this status is carried out.
        ready_replicas: the number of ready pods among these.
        desired: the desired number of pods.
        round: the number of the current round.
        world_size: the number of workers in the current round.
        restarts: failures of workers charged so far.
        uncharged_restarts: restarts of workers for other reasons: membership changes, ignored failures.
        pod_failures: pods that failed and are charged so far.
        counted_pod_uids: UIDs of ended or terminating pods that are already counted or ignored.
        size_generation: the generation of the last size that the agents received; 0 before the first pod was seen, and
            while the job is suspended.
        started: when the first round formed.
        active: when the job was last allowed to have pods: its start or last resumption; None while it is suspended.
        completed: when the job finished.
        last_failure: the last failure; None if there was none.
        excluded_nodes: nodes on which later pods are not scheduled.
        applied_spec: the part of the spec that its pods are made from, as of its start or last resumption; None before
            it has pods, and once it is suspended and the last pod has ended.
        time_breakdown: the job's time breakdown up to its last suspension, resumption or end; None if unknown.
        conditions: the conditions by type.
    """

    state: JobState = JobState.PENDING
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    desired: int = 0
    round: int = 0
    world_size: int = 0
    restarts: int = 0
    uncharged_restarts: int = 0
    pod_failures: int = 0
    counted_pod_uids: frozenset[str] = frozenset()
    size_generation: int = 0
    started: float | None = None
    active: float | None = None
    completed: float | None = None
    last_failure: LastFailure | None = None
    excluded_nodes: tuple[str, ...] = ()
    applied_spec: AppliedSpec | None = None
    time_breakdown: TimeBreakdown | None = None
    conditions: tuple[Condition, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.state.finished

    @property
    def suspended(self) -> bool:
        """Whether the job's pods were all gone after a suspension, and it was not resumed since."""
        return self.state is JobState.SUSPENDED and self.holds("Suspended")

    @property
    def ready(self) -> str:
        """The ready pods of the desired ones: 2/3."""
        return f"{self.ready_replicas}/{self.desired}"

    @property
    def what_failed(self) -> str:
        """The message of the last failure; empty if there is none."""
        return self.last_failure.message if self.last_failure is not None else ""

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of this type; None if it was never set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Return whether the condition of this type is true."""
        condition = self.condition(kind)
        return condition is not None and condition.status


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Return the object's ``status``, without ``selector``."""
    document: dict[str, Any] = to_json(replace(status, conditions=()))
    document["readyDesired"] = status.ready
    document["conditions"] = [
        {
            **to_json(condition),
            "status": "True" if condition.status else "False",
            "observedGeneration": status.observed_generation,
        }
        for condition in status.conditions
    ]
    return document


def status_from_json(document: Mapping[str, Any] | None) -> JobStatus:
    """Return the status of an object; an empty one if it has none yet.

    Raises:
        BadInput: the operator did not write it; ignoring it would lose its counters.
    """
    read = dict(document or {})
    if isinstance(conditions := read.get("conditions"), list):
        read["conditions"] = [
            {**each, "status": each.get("status") == "True"} if isinstance(each, dict) else each for each in conditions
        ]
    try:
        return from_json(read, JobStatus)
    except BadInput as error:
        raise BadInput(f"the job's status is not one that this operator writes: {error}") from None
