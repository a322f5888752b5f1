"""The status of an ElasticJob, and the report of its run. One reconcile passes only the status to the next.

The report is the part of a run that is kept when the job's store is deleted.

On a cluster, the report is the key ``report.json`` of the ConfigMap ``<job>-report``. On this machine, it is the file
``report.json`` in the run's folder. The report is written when the job finishes or is suspended::

    {
      "job": {"namespace", "name", "uid", "created", "completed", "state", "message"},
      "timeBreakdown": {"asOf", "seconds": {"waiting": …}, "lostSeconds", "nodesJoined", "departures": {"left": …}},
      "rounds": [{"number", "began", "ended", "nodes", "workers", "reason", "cause", "failure", "lostSeconds",
                  "staying", "firstSteps"}],
      "omitted": 0,
      "suspensions": [],
      "outcome": {"state", "round", "restarts", "message", "failure"}
    }

A ``failure`` has the fields of :class:`torchelastic.protocol.records.FailureRecord`. Unknown values are left out. Times
are in RFC 3339 with milliseconds; durations are in seconds.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.api.json_values import from_json, to_json
from elastic_operator.api.spec import AppliedSpec  # noqa: TC001 - msgspec reads the annotations
from elastic_operator.errors import BadInput
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.records import HISTORY_LIMIT, HistoryRecord, OutcomeRecord, TimeBreakdown

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_KEY: Final = "report.json"
"""The report's key in the ConfigMap, and the name of its file."""

REPORT_LIMIT: Final = 900_000
"""Maximum size of a report in bytes; the limit of a ConfigMap is 1 MiB."""

_MAX_TEXT_LENGTH: Final = 16384
_MIN_TEXT_LENGTH: Final = 256
"""Maximum length of each string with which the longest history fits into a ConfigMap."""
_OF_JOB: Final = ("namespace", "name", "uid", "created", "completed", "state", "message")


class JobState(enum.StrEnum):
    """The state of a job in one word, as ``kubectl get`` shows it."""

    PENDING = "Pending"
    """The job has not trained yet."""
    RUNNING = "Running"
    """The job trains with at least the minimum number of pods."""
    WAITING = "Waiting"
    """The job has trained, but does not train now, for example because fewer pods than the minimum are ready."""
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
        reason: one word in CamelCase.
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
        pod: the name of the pod that failed, or in which the worker failed; empty if unknown.
        rank: the rank of the worker; None if no worker failed.
        exit_code: the exit code of the worker or the pod's agent; None after a signal, or if unknown.
        signal: the name of the signal that ended the worker or agent; empty for none.
        time: when the operator noticed the failure.
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
        observed_generation: the generation of the spec that this status describes.
        replicas: the number of worker pods that have not ended and do not terminate, after the plan is applied. Pods
            beyond the desired number are spares and are not included.
        ready_replicas: the number of ready pods, without spares.
        ready_spares: the number of ready pods beyond the desired number.
        world_size: the number of workers in the current round.
        restarts: the number of worker failures that count against ``maxRestarts``.
        uncharged_restarts: the number of restarts of workers after membership changes and ignored failures.
        pod_failures: the number of pod failures that count against ``backoffLimit``.
        counted_pod_uids: the UIDs of ended or terminating pods that must not be counted any more.
        size_generation: the generation of the last size that the agents received; 0 before the first pod was seen, and
            after a suspended job has stopped.
        started: when the first round formed; None if none has formed.
        active: when the job was last allowed to have pods: its start or last resumption; None while it is suspended.
        excluded_nodes: nodes on which later pods are not scheduled.
        applied_spec: the spec from which the pods are created, as of the job's start or last resumption; None before
            the first valid spec, and after a suspended job has stopped.
        time_breakdown: the job's time breakdown up to its last suspension, resumption or end; None if unknown.
        conditions: the conditions, at most one of each type.
    """

    state: JobState = JobState.PENDING
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    ready_spares: int = 0
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
        """Whether the job is suspended and all its pods are gone."""
        return self.state is JobState.SUSPENDED and self.holds("Suspended")

    @property
    def ready(self) -> str:
        """The numbers of ready and of desired pods, such as ``2/3``."""
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
        BadInput: the status is malformed. It cannot be ignored, because its counters would be lost.
    """
    read = dict(document or {})
    if isinstance(conditions := read.get("conditions"), list):
        read["conditions"] = [
            {**each, "status": each.get("status") == "True"} if isinstance(each, dict) else each for each in conditions
        ]
    try:
        return from_json(read, JobStatus)
    except BadInput as error:
        raise BadInput(f"the job's status does not have the form that this operator writes: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a job's run.

    Attributes:
        state: the state of the job when the report was written: Succeeded, Failed or Suspended.
        completed_at: when the job finished; None if it has not finished.
        message: why the job failed; empty if it has not failed.
        time_breakdown: the time breakdown of the run; None if unknown.
        outcome: how the agents ended the run; None if they have not.
        suspensions: the times when the job was suspended, or stopped on this machine.
    """

    namespace: str = ""
    name: str
    uid: str = ""
    created: float = 0.0
    state: JobState = JobState.PENDING
    completed_at: float | None = None
    message: str = ""
    time_breakdown: TimeBreakdown | None = None
    history: HistoryRecord = field(default_factory=HistoryRecord)
    outcome: OutcomeRecord | None = None
    suspensions: tuple[float, ...] = ()


def encode_report(report: Report) -> bytes:
    """Return the report as JSON of at most :data:`REPORT_LIMIT` bytes; long strings are shortened if necessary."""
    whole = to_json(report)
    job = {key: whole.pop(key) for key in _OF_JOB if key in whole}
    history = whole.pop("history")
    document = {"job": job, **whole, "rounds": history["rounds"], "omitted": report.history.omitted}
    longest = _MAX_TEXT_LENGTH
    while True:
        text = json.dumps(_shortened(document, longest), ensure_ascii=False, indent=1)
        encoded = text.encode(errors="replace")  # a lone surrogate in a program's message becomes a question mark
        if len(encoded) <= REPORT_LIMIT or longest <= _MIN_TEXT_LENGTH:
            return encoded
        longest //= 2


def decode_report(text: str | bytes) -> Report:
    """Return the report that :func:`encode_report` has encoded.

    Raises:
        BadInput: the text is not a report.
    """
    try:
        document = msgspec.json.decode(text, type=dict[str, Any])
        job = msgspec.convert(document.get("job"), dict[str, Any])
        history = {"created": job.get("created") or "1970-01-01T00:00:00Z", "rounds": document.get("rounds", [])}
        others = {key: document[key] for key in ("timeBreakdown", "suspensions", "outcome") if key in document}
        return from_json(job | others | {"history": history}, Report)
    except (BadInput, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"not the report of a job: {error}") from None


def merged(kept: Report | None, report: Report) -> Report:
    """Return a report merged with an earlier one, because the store's history is empty after a suspension."""
    if kept is None or kept.uid != report.uid:
        return report
    by_number = {round.number: round for round in (*kept.history.rounds, *report.history.rounds)}
    rounds = tuple(by_number[number] for number in sorted(by_number))
    if len(rounds) > HISTORY_LIMIT:  # keep the first and the last rounds
        first = HISTORY_LIMIT // 2
        rounds = rounds[:first] + rounds[first - HISTORY_LIMIT :]
    return replace(
        report,
        time_breakdown=report.time_breakdown if report.time_breakdown is not None else kept.time_breakdown,
        history=HistoryRecord(created=report.created, rounds=rounds),
        outcome=report.outcome if report.outcome is not None else kept.outcome,
        suspensions=tuple(sorted({*kept.suspensions, *report.suspensions})[-HISTORY_LIMIT:]),
    )


def _shortened(value: object, longest: int) -> object:
    """Return a part of a document, with its strings shortened to this number of characters."""
    if isinstance(value, dict):
        return {key: _shortened(below, longest) for key, below in value.items()}
    if isinstance(value, list):
        return [_shortened(below, longest) for below in value]
    return shorten(value, longest) if isinstance(value, str) else value
