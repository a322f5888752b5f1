"""What is kept of a job's run when its store goes, as the plan and those who read it have it.

How it is written is said in :mod:`elastic_operator.report_json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchelastic.contract import COUNT_LIMIT, HISTORY_LIMIT, HistoryRecord, missing_between

if TYPE_CHECKING:
    from elastic_operator.model import JobState
    from torchelastic.contract import OutcomeRecord, TimeSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is kept of a job's run.

    Attributes:
        namespace: of the job.
        name: of the job.
        uid: of the job.
        created: when it was made, in seconds since the Unix epoch.
        state: where it stood when the report was written: Succeeded, Failed or Suspended.
        completed: when it was over; None where it was not.
        message: why it failed, in words; empty where it did not.
        split: where its time went; None where nobody knows.
        history: its epochs.
        outcome: how the agents ended the run; None where they have not.
        rested: when it came to rest without being over, each time: it was suspended, or taken down on this machine.
    """

    namespace: str
    name: str
    uid: str
    created: float
    state: JobState
    completed: float | None = None
    message: str = ""
    split: TimeSplit | None = None
    history: HistoryRecord = field(default_factory=HistoryRecord)
    outcome: OutcomeRecord | None = None
    rested: tuple[float, ...] = ()


def merged(kept: Report | None, report: Report) -> Report:
    """A report that also tells of what the leader of a later life of the job does not know any more.

    Each time that a job is suspended its store goes, and the next leader's history begins with the resumption.

    Args:
        kept: the report as it was written before; None where there is none.
        report: the one of now.
    """
    if kept is None or kept.uid != report.uid:
        return report
    by_number = {epoch.number: epoch for epoch in (*kept.history.epochs, *report.history.epochs)}
    epochs = tuple(by_number[number] for number in sorted(by_number))
    history = HistoryRecord(created=report.created, epochs=epochs, omitted=missing_between(epochs))
    return replace(
        report,
        split=report.split if report.split is not None else kept.split,
        history=bounded(history, HISTORY_LIMIT),
        outcome=report.outcome if report.outcome is not None else kept.outcome,
        rested=tuple(sorted({*kept.rested, *report.rested})[-HISTORY_LIMIT:]),
    )


def bounded(history: HistoryRecord, limit: int) -> HistoryRecord:
    """The history with so many epochs at most: the first half of them, and the last ones."""
    epochs = history.epochs
    excess = len(epochs) - limit
    if excess <= 0:
        return history
    first = limit // 2
    omitted = min(history.omitted + excess, COUNT_LIMIT)
    return HistoryRecord(created=history.created, epochs=epochs[:first] + epochs[first + excess :], omitted=omitted)
