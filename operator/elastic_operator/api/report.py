"""The report of a job: the part of its run that is kept when its store is deleted.

On a cluster it is the key ``report.json`` of the ConfigMap ``<job>-report``, on this machine the file ``report.json``
in the run's folder. It is written when the job finishes, and when it is suspended::

    {
      "job": {"namespace", "name", "uid", "created", "completed", "state", "message"},
      "timeBreakdown": {"asOf", "seconds": {"waiting": …}, "lostSeconds", "joined", "gone": {"left": …}},
      "rounds": [{"number", "began", "ended", "nodes", "workers", "reason", "cause", "failure", "lostSeconds"}],
      "omitted": 0,
      "rested": [],
      "outcome": {"state", "round", "restarts", "message", "failure"}
    }

A ``failure`` has the fields of :class:`torchelastic.protocol.FailureRecord`. Unknown values are left out. Times are in
RFC 3339 with milliseconds, durations are in seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.api.json_values import from_json, to_json
from elastic_operator.api.status import JobState
from elastic_operator.errors import BadInput
from torchelastic.protocol import (
    HISTORY_LIMIT,
    HistoryRecord,
    OutcomeRecord,
    TimeBreakdown,
    shorten,
)

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json
    from torchelastic.protocol import PastRound

REPORT_KEY: Final = "report.json"
"""The key in the ConfigMap, and the name of the file."""

REPORT_LIMIT: Final = 900_000
"""Maximum size of a report in bytes; the limit of a ConfigMap is 1 MiB."""

_LONGEST_TEXT: Final = 16384
_SHORTEST_TEXT: Final = 256
"""Characters with which the rounds of the longest history fit into a ConfigMap."""
_OF_JOB: Final = ("namespace", "name", "uid", "created", "completed", "state", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a job's run.

    Attributes:
        namespace: the namespace of the job.
        name: the name of the job.
        uid: the UID of the job.
        created: when the job was created.
        state: when the report was written: Succeeded, Failed or Suspended.
        completed_at: when the job finished; None if it has not.
        message: why it failed; empty if it has not.
        time_breakdown: the time breakdown of the run; None if unknown.
        history: the rounds of the run.
        outcome: how the agents ended the run; None if they have not.
        rested: the times when it was suspended, or stopped on this machine.
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
    rested: tuple[float, ...] = ()


def encode_report(report: Report, limit: int = REPORT_LIMIT) -> bytes:
    """Return the report as text of at most ``limit`` bytes; its sentences are shortened if necessary."""
    whole = to_json(report)
    job = {key: whole.pop(key) for key in _OF_JOB if key in whole}
    history = whole.pop("history")
    document = {"job": job, **whole, "rounds": history["rounds"], "omitted": report.history.omitted}
    longest = _LONGEST_TEXT
    while len(text := _text_of(document, longest)) > limit and longest > _SHORTEST_TEXT:
        longest //= 2
    return text


def decode_report(text: str | bytes) -> Report:
    """Return the report in a text.

    Raises:
        BadInput: the text is not a report.
    """
    try:
        document = msgspec.json.decode(text, type=dict[str, Any])
        job = msgspec.convert(document.get("job"), dict[str, Any])
        history = {"created": job.get("created") or "1970-01-01T00:00:00Z", "rounds": document.get("rounds", [])}
        others = {key: document[key] for key in ("timeBreakdown", "rested", "outcome") if key in document}
        return from_json(job | others | {"history": history}, Report)
    except (BadInput, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"not the report of a job: {error}") from None


def merged(kept: Report | None, report: Report) -> Report:
    """Merge a report with an earlier one: after a suspension, the history of the next leader is empty at first.

    Args:
        kept: the earlier report; None if there is none.
        report: the current report.
    """
    if kept is None or kept.uid != report.uid:
        return report
    by_number = {round.number: round for round in (*kept.history.rounds, *report.history.rounds)}
    rounds = tuple(by_number[number] for number in sorted(by_number))
    return replace(
        report,
        time_breakdown=report.time_breakdown if report.time_breakdown is not None else kept.time_breakdown,
        history=HistoryRecord(created=report.created, rounds=_bounded(rounds)),
        outcome=report.outcome if report.outcome is not None else kept.outcome,
        rested=tuple(sorted({*kept.rested, *report.rested})[-HISTORY_LIMIT:]),
    )


def _bounded(rounds: tuple[PastRound, ...]) -> tuple[PastRound, ...]:
    """Return at most HISTORY_LIMIT rounds: the first half of them, and the last ones."""
    excess, first = len(rounds) - HISTORY_LIMIT, HISTORY_LIMIT // 2
    return rounds if excess <= 0 else rounds[:first] + rounds[first + excess :]


def _text_of(document: Json, longest: int) -> bytes:
    """Return the report as text; a lone surrogate in a program's message becomes a question mark."""
    return json.dumps(_shortened(document, longest), ensure_ascii=False, indent=1).encode(errors="replace")


def _shortened(value: object, longest: int) -> object:
    """Return a part of a document with texts of at most this many characters."""
    if isinstance(value, dict):
        return {key: _shortened(below, longest) for key, below in value.items()}
    if isinstance(value, list):
        return [_shortened(below, longest) for below in value]
    return shorten(value, longest) if isinstance(value, str) else value
