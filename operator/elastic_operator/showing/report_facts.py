"""What a report says of a job beyond what stands in it: how long epochs lasted, what went wrong, and what it cost."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.showing.figures import goodput
from torchelastic.contract import EpochReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.report import Report
    from torchelastic.contract import FailureRecord, PastEpoch


@dataclass(frozen=True, slots=True)
class Span:
    """An epoch, and what is known only since it ended.

    Attributes:
        epoch: itself.
        end: when it gave way to the next one, or to rest, or the report ends; None where the next one was not kept.
        lost: seconds of its training that no checkpoint held when it ended; None where nobody knows.
    """

    epoch: PastEpoch
    end: float | None
    lost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that went wrong.

    Attributes:
        time: when what followed from it began, in seconds since the Unix epoch.
        epoch: in which it went wrong; 0 where that is not known.
        message: in words.
        pod: where; empty where the message says it.
        rank: of the worker that failed; None where none did.
        what: how it ended, in a word or two.
        lost: seconds of training that no checkpoint held; None where nobody knows.
        free: whether it was charged to nobody.
        final: whether the job failed of it.
    """

    time: float
    epoch: int
    message: str
    pod: str = ""
    rank: int | None = None
    what: str = ""
    lost: float | None = None
    free: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is said of a job.

    Attributes:
        report: what is kept.
        begin: when it was made, in seconds since the Unix epoch.
        end: up to when it is told of.
        spans: its epochs.
        troubles: what went wrong, in order.
    """

    report: Report
    begin: float
    end: float
    spans: tuple[Span, ...]
    troubles: tuple[Trouble, ...]

    @property
    def goodput(self) -> float | None:
        """The share of its time in which it trained what it still has; None where nobody knows."""
        split = self.report.split
        return goodput({str(state): spent for state, spent in split.seconds.items()}, split.lost) if split else None

    @property
    def largest(self) -> int:
        """Workers of its largest epoch."""
        return max((span.epoch.workers for span in self.spans), default=0)

    @property
    def last(self) -> int:
        """The number of its last epoch; 0 where there was none."""
        return self.spans[-1].epoch.number if self.spans else 0


def facts(report: Report) -> Facts:
    """What a report says of a job."""
    epochs = report.history.epochs
    times = [report.completed, report.split.until if report.split else None, *(epoch.began for epoch in epochs)]
    end = max((time for time in times if time), default=report.created)
    end = report.completed or end
    begin = report.created or min((epoch.began for epoch in epochs), default=end)
    return Facts(
        report=report,
        begin=begin,
        end=max(begin, end),
        spans=tuple(_spans(epochs, report.rested, max(begin, end))),
        troubles=tuple(_troubles(report, end)),
    )


def _spans(epochs: tuple[PastEpoch, ...], rested: tuple[float, ...], end: float) -> Iterator[Span]:
    def ends(epoch: PastEpoch, latest: float) -> float:
        moments = (time for time in (epoch.ended, *rested) if epoch.began < time < latest)
        return min(moments, default=max(epoch.began, latest))

    for epoch, after in itertools.pairwise(epochs):
        known = after.number == epoch.number + 1
        yield Span(epoch, ends(epoch, after.began) if known else None, after.lost if known else None)
    if epochs:
        yield Span(epochs[-1], ends(epochs[-1], end))


def _troubles(report: Report, end: float) -> Iterator[Trouble]:
    for epoch in report.history.epochs:
        if epoch.failure is not None:
            yield _of_worker(epoch.failure, epoch.began, epoch.lost)
        elif epoch.reason is EpochReason.NODE_LOST:
            yield Trouble(
                time=epoch.began,
                epoch=max(epoch.number - 1, 0),
                message=epoch.cause,
                what="pod lost",
                lost=epoch.lost,
            )
    outcome = report.outcome
    if outcome is not None and outcome.failure is not None:
        yield _of_worker(outcome.failure, end, None, final=True)
    elif report.state.value == "Failed":
        said = report.message or (outcome.message if outcome else "")
        yield Trouble(time=end, epoch=outcome.epoch if outcome else 0, message=said, final=True)


def _of_worker(failure: FailureRecord, time: float, lost: float | None, *, final: bool = False) -> Trouble:
    return Trouble(
        time=time,
        epoch=failure.epoch,
        message=failure.message,
        pod=failure.node.rpartition(".")[0] or failure.node,
        rank=failure.rank,
        what=_ending(failure.exit_code),
        lost=lost,
        free=failure.free,
        final=final,
    )


def _ending(exit_code: int) -> str:
    """How a worker ended, from what it returned, or the negative number of the signal that ended it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
