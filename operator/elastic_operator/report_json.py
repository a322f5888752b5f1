"""The report of a job: what is kept of its run when its store goes.

On a cluster it is the key ``report.json`` of the ConfigMap ``<job>-report``, on this machine the file ``report.json``
in the run's folder. It is written when the job is over, and when it is suspended::

    {
      "job": {"namespace", "name", "uid", "created", "completed", "state", "message"},
      "split": {"asOf", "seconds": {"waiting": …}, "lostSeconds", "joined", "gone": {"left": …}},
      "epochs": [{"number", "began", "ended", "nodes", "workers", "reason", "cause", "failure", "lostSeconds"}],
      "omitted": 0,
      "rested": [],
      "outcome": {"state", "epoch", "restarts", "message", "failure"}
    }

A ``failure`` has the fields of :class:`torchelastic.contract.FailureRecord`. What is not known is left out. Times are
RFC 3339 in milliseconds, durations seconds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from elastic_operator.errors import BadInput
from elastic_operator.model import JobState
from elastic_operator.report import Report, bounded, merged
from elastic_operator.split_json import SplitJson, moment, seconds_of, split_to_json
from torchelastic.contract import (
    EpochReason,
    FailureKind,
    FailureRecord,
    HistoryRecord,
    OutcomeRecord,
    OutcomeState,
    PastEpoch,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_KEY: Final = "report.json"
"""The key in the ConfigMap, and the name of the file."""

REPORT_LIMIT: Final = 900_000
"""Bytes; a ConfigMap takes 1 MiB."""

_LONGEST_TEXT: Final = 16384
_SHORTEST_TEXT: Final = 64

_UNKNOWN: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""What stands for a time that is not told."""

_Record = TypeVar("_Record", bound=msgspec.Struct)

__all__ = [
    "REPORT_KEY",
    "REPORT_LIMIT",
    "Report",
    "decode_report",
    "encode_report",
    "merged",
    "report_from_json",
    "report_to_json",
]


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as a document of JSON, as long as it may be; see :func:`encode_report`."""
    job: dict[str, Any] = {
        "namespace": report.namespace,
        "name": report.name,
        "uid": report.uid,
        "created": moment(report.created),
        "state": report.state.value,
        "message": report.message,
    }
    if report.completed is not None:
        job["completed"] = moment(report.completed)
    document: dict[str, Any] = {"job": job}
    if report.split is not None:
        document["split"] = split_to_json(report.split)
    document["epochs"] = [_epoch_to_json(epoch) for epoch in report.history.epochs]
    document["omitted"] = report.history.omitted
    document["rested"] = [moment(time) for time in report.rested]
    if report.outcome is not None:
        document["outcome"] = _outcome_to_json(report.outcome)
    return document


def report_from_json(document: Mapping[str, Any]) -> Report:
    """The report in a document of JSON.

    Raises:
        BadInput: it is none.
    """
    try:
        parsed = msgspec.convert(document, _ReportJson)
        epochs = tuple(epoch.record() for epoch in parsed.epochs)
        return Report(
            namespace=parsed.job.namespace,
            name=parsed.job.name,
            uid=parsed.job.uid,
            created=seconds_of(parsed.job.created),
            state=parsed.job.state,
            completed=None if parsed.job.completed is None else seconds_of(parsed.job.completed),
            message=parsed.job.message,
            split=None if parsed.split is None else parsed.split.split(),
            history=_valid(
                HistoryRecord(created=seconds_of(parsed.job.created), epochs=epochs, omitted=parsed.omitted)
            ),
            outcome=None if parsed.outcome is None else _valid(parsed.outcome.record()),
            rested=tuple(sorted(map(seconds_of, parsed.rested))),
        )
    except (msgspec.ValidationError, OverflowError) as error:
        raise BadInput(f"not the report of a job: {error}") from None


def encode_report(report: Report, limit: int = REPORT_LIMIT) -> bytes:
    """The report as text of at most ``limit`` bytes: its sentences are shortened and, if need be, epochs left out."""
    longest = _LONGEST_TEXT
    while len(text := _text_of(report)) > limit and (longest > _SHORTEST_TEXT or report.history.epochs):
        if longest > _SHORTEST_TEXT:
            longest //= 2
            report = _shortened(report, longest)
        else:
            report = replace(report, history=bounded(report.history, len(report.history.epochs) // 2))
    return text


def decode_report(text: str | bytes) -> Report:
    """The report in a text.

    Raises:
        BadInput: there is none in it.
    """
    try:
        document = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"not the report of a job: {error}") from None
    return report_from_json(document)


class _FailureJson(msgspec.Struct, frozen=True, rename="camel"):
    epoch: int
    rank: int
    local_rank: int
    node: str
    exit_code: int
    kind: FailureKind = FailureKind.PROGRAM
    host: str = ""
    pid: int = 0
    message: str = ""
    uptime: float = 0.0
    final: bool = False
    free: bool = False

    def record(self) -> FailureRecord:
        return FailureRecord(**msgspec.structs.asdict(self))


class _EpochJson(msgspec.Struct, frozen=True, rename="camel"):
    number: int
    began: datetime = _UNKNOWN
    nodes: int = 0
    workers: int = 0
    reason: EpochReason = EpochReason.NODE_JOINED
    cause: str = ""
    failure: _FailureJson | None = None
    lost_seconds: float | None = None
    ended: datetime | None = None

    def record(self) -> PastEpoch:
        return PastEpoch(
            number=self.number,
            began=seconds_of(self.began),
            nodes=self.nodes,
            workers=self.workers,
            reason=self.reason,
            cause=self.cause,
            failure=None if self.failure is None else self.failure.record(),
            lost=self.lost_seconds,
            ended=0.0 if self.ended is None else seconds_of(self.ended),
        )


class _OutcomeJson(msgspec.Struct, frozen=True, rename="camel"):
    state: OutcomeState
    epoch: int = 0
    restarts: int = 0
    message: str = ""
    failure: _FailureJson | None = None

    def record(self) -> OutcomeRecord:
        return OutcomeRecord(
            state=self.state,
            epoch=self.epoch,
            restarts=self.restarts,
            message=self.message,
            failure=None if self.failure is None else self.failure.record(),
        )


class _JobJson(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    state: JobState = JobState.PENDING
    created: datetime = _UNKNOWN
    namespace: str = ""
    uid: str = ""
    completed: datetime | None = None
    message: str = ""


class _ReportJson(msgspec.Struct, frozen=True, rename="camel"):
    job: _JobJson
    split: SplitJson | None = None
    epochs: tuple[_EpochJson, ...] = ()
    omitted: int = 0
    rested: tuple[datetime, ...] = ()
    outcome: _OutcomeJson | None = None


def _epoch_to_json(epoch: PastEpoch) -> dict[str, Any]:
    document: dict[str, Any] = {
        "number": epoch.number,
        "began": moment(epoch.began),
        "nodes": epoch.nodes,
        "workers": epoch.workers,
        "reason": epoch.reason.value,
        "cause": epoch.cause,
    }
    if epoch.failure is not None:
        document["failure"] = _failure_to_json(epoch.failure)
    if epoch.lost is not None:
        document["lostSeconds"] = round(epoch.lost, 3)
    if epoch.ended:
        document["ended"] = moment(epoch.ended)
    return document


def _outcome_to_json(outcome: OutcomeRecord) -> dict[str, Any]:
    document: dict[str, Any] = {
        "state": outcome.state.value,
        "epoch": outcome.epoch,
        "restarts": outcome.restarts,
        "message": outcome.message,
    }
    if outcome.failure is not None:
        document["failure"] = _failure_to_json(outcome.failure)
    return document


def _failure_to_json(failure: FailureRecord) -> dict[str, Any]:
    return {
        "epoch": failure.epoch,
        "rank": failure.rank,
        "localRank": failure.local_rank,
        "node": failure.node,
        "host": failure.host,
        "pid": failure.pid,
        "exitCode": failure.exit_code,
        "kind": failure.kind.value,
        "message": failure.message,
        "uptime": round(failure.uptime, 3),
        "final": failure.final,
        "free": failure.free,
    }


def _text_of(report: Report) -> bytes:
    """The report as text; half a character, as a program's words may have it, becomes a question mark."""
    return json.dumps(report_to_json(report), ensure_ascii=False, indent=1).encode(errors="replace")


def _shortened(report: Report, longest: int) -> Report:
    """The report with sentences of at most so many characters."""

    def short(failure: FailureRecord | None) -> FailureRecord | None:
        return failure and msgspec.structs.replace(failure, message=shorten(failure.message, longest))

    epochs = tuple(
        msgspec.structs.replace(epoch, cause=shorten(epoch.cause, longest), failure=short(epoch.failure))
        for epoch in report.history.epochs
    )
    outcome = report.outcome and msgspec.structs.replace(
        report.outcome, message=shorten(report.outcome.message, longest), failure=short(report.outcome.failure)
    )
    return replace(
        report,
        message=shorten(report.message, longest),
        history=msgspec.structs.replace(report.history, epochs=epochs),
        outcome=outcome,
    )


def _valid(record: _Record) -> _Record:
    """The record, if its numbers and texts are within the bounds of the contract.

    Raises:
        msgspec.ValidationError: they are not.
    """
    return msgspec.convert(msgspec.to_builtins(record), type(record))
