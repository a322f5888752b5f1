"""The output of ``elasticjob top``: one job in detail, or a table of jobs.

A line is a sequence of pieces, each with its style: the same lines serve a terminal and a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from elastic_operator.views import formatting
from elastic_operator.views.formatting import percent, short_duration
from elastic_operator.views.job_metrics import JobMetrics, Tally, goodput
from elastic_operator.views.job_view import JobView, seconds
from torchelastic.protocol import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.views.job_metrics import CustomMetric, GpuMetrics, RankMetrics
    from elastic_operator.views.rates import Rates

_Item = TypeVar("_Item")


class Piece(NamedTuple):
    """A part of a line, with its style for rich."""

    text: str
    style: str = ""


Line = tuple[Piece, ...]

_STATE_STYLES: Final[Mapping[str, str]] = {
    RunState.TRAINING: "green",
    RunState.RESTORING: "cyan",
    RunState.STARTING: "blue",
    RunState.RENDEZVOUS: "magenta",
    RunState.WAITING: "yellow",
    RunState.STOPPING: "red",
    RunState.SUSPENDED: "bright_black",
}
_JOB_STYLES: Final = {"Running": "bold green", "Succeeded": "bold green", "Failed": "bold red"}
_SEPARATOR: Final = "   "
_MAX_RANKS: Final = 64
_MAX_CUSTOM: Final = 40
_MAX_NOTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A job at a moment, in seconds since the Unix epoch; ``notes`` say such as which pods do not answer."""

    job: JobView
    metrics: JobMetrics
    rates: Rates
    now: float
    notes: Sequence[str] = ()

    @property
    def time_breakdown(self) -> tuple[Mapping[str, float], float | None]:
        """Seconds by run state and seconds of lost training: from the leader, or from the status if nothing runs.

        While pods run, the status has the values from before the last resumption.
        """
        status = self.job.status
        kept = status.time_breakdown
        if self.metrics.seconds or kept is None or not (status.finished or status.suspended):
            return self.metrics.seconds, self.metrics.lost
        as_of = seconds(kept.as_of)
        since = self.now - as_of if self.job.state == "Suspended" and as_of is not None else 0.0
        suspended = kept.seconds.get(RunState.SUSPENDED, 0.0) + max(0.0, since)
        return kept.seconds | ({RunState.SUSPENDED.value: suspended} if suspended else {}), kept.lost_seconds

    @property
    def goodput(self) -> float | None:
        """The ratio of kept training to all time; None if unknown."""
        return goodput(*self.time_breakdown)

    @property
    def world_size(self) -> int:
        """Workers of the current round."""
        return self.job.status.world_size if self.metrics.world_size is None else self.metrics.world_size

    @property
    def restarts(self) -> tuple[int, int]:
        """Charged and free restarts."""
        status, told = self.job.status, self.metrics
        return (
            status.restarts if told.restarts is None else told.restarts,
            status.uncharged_restarts if told.free_restarts is None else told.free_restarts,
        )


def job_lines(reading: Reading, *, width: int = 100, height: int | None = None, bar: bool = False) -> list[Line]:
    """Return all that is shown of one job, for a terminal of this size; ``bar`` draws the time breakdown, too."""
    room = _MAX_RANKS if height is None else max(1, height // 4)
    found = [
        *_header(reading),
        *_time(reading, width if bar else 0),
        *_recoveries(reading),
        *_ranks(reading, min(room, _MAX_RANKS)),
        *_gpus(reading.metrics.gpus, min(room, _MAX_RANKS)),
        *_custom(reading, min(room, _MAX_CUSTOM)),
    ]
    notes = [*_notes(reading, min(room, _MAX_NOTES))]
    if height is None or len(found) + len(notes) <= height:
        return found + notes
    notes = notes[: height // 3]
    kept = found[: max(2, height - len(notes) - 1)]
    left = len(found) - len(kept)
    return [*kept, *([(Piece(f"and {formatting.count(left, 'more line')}", "dim"),)] if left else []), *notes][:height]


def plain(line: Line) -> str:
    """Return a line without styles."""
    return "".join(piece.text for piece in line).rstrip()


def jobs_table(readings: Sequence[Reading], *, namespaces: bool = False) -> list[str]:
    """Return the jobs in columns, with the metrics of each one's leader."""
    first = ["NAMESPACE"] if namespaces else []
    rows = [[*first, "NAME", "STATE", "READY", "ROUND", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]]
    for reading in readings:
        job, (charged, free), (_, lost) = reading.job, reading.restarts, reading.time_breakdown
        rows.append(
            [
                *([job.namespace] if namespaces else []),
                job.name,
                job.state,
                f"{job.status.ready_replicas}/{job.status.desired}",
                str(reading.metrics.round or job.status.round or "-"),
                str(reading.world_size),
                "-" if reading.goodput is None else percent(reading.goodput),
                "-" if lost is None else short_duration(lost),
                f"{charged}+{free}" if free else str(charged),
                short_duration(max(reading.rates.steps.values())) if reading.rates.steps else "-",
                "-" if job.created is None else formatting.duration(reading.now - job.created),
            ]
        )
    return formatting.columns(rows)


def _header(reading: Reading) -> Iterator[Line]:
    job, told, status = reading.job, reading.metrics, reading.job.status
    yield (
        Piece(job.name, "bold"),
        Piece("  "),
        Piece(job.state, _JOB_STYLES.get(job.state, "bold yellow")),
        Piece(f"  {formatting.duration(job.age(reading.now))}", "dim"),
    )
    nodes = "" if told.nodes is None else f" on {formatting.count(told.nodes, 'node')}"
    desired = "" if told.desired_nodes in (None, told.nodes) else f", {told.desired_nodes} wanted"
    size, (charged, free) = reading.world_size, reading.restarts
    left = "" if told.remaining_restarts is None else f", {told.remaining_restarts} left"
    yield _facts(
        ("round", str(told.round or status.round or "-")),
        ("world size", f"{size}{nodes}{desired}" if size else f"0{desired}"),
        *([] if job.completed else [("pods ready", f"{status.ready_replicas}/{status.desired}")]),
        ("restarts", f"{charged} charged, {free} free{left}"),
    )


def _facts(*facts: tuple[str, str]) -> Line:
    pieces: list[Piece] = []
    for label, value in facts:
        pieces += [Piece(f"{label} ", "dim"), Piece(value, "bold"), Piece(_SEPARATOR)]
    return tuple(pieces[:-1])


def _time(reading: Reading, width: int) -> Iterator[Line]:
    spent, lost = reading.time_breakdown
    total, good = sum(spent.values()), reading.goodput
    if good is None:
        return
    yield ()
    yield _facts(("goodput", percent(good)), *([("lost", short_duration(lost))] if lost is not None else []))
    states = [state for state in (*_STATE_STYLES, *sorted(spent.keys() - _STATE_STYLES.keys())) if spent.get(state)]
    if width:
        ends = [round(end / total * width) for end in accumulate(spent[state] for state in states)]
        yield tuple(
            Piece("█" * (end - begin), _STATE_STYLES.get(state, "white"))
            for state, begin, end in zip(states, [0, *ends], ends, strict=False)
        )
    line: list[Piece] = []
    for state in states:
        mark = [Piece("■ ", _STATE_STYLES.get(state, "white"))] if width else []
        value = f" {short_duration(spent[state])} ({percent(spent[state] / total)})"
        entry = [*mark, Piece(state, "dim"), Piece(value)]
        if width and line and len(plain((*line, *entry))) + len(_SEPARATOR) > width:
            yield tuple(line)
            line = []
        line += [*([Piece(_SEPARATOR)] if line else []), *entry]
    yield tuple(line)


def _recoveries(reading: Reading) -> Iterator[Line]:
    rows = []
    for cause, tally in reading.metrics.recoveries.items():
        last = reading.rates.recoveries.get(cause)
        mean = "-" if tally.mean is None else short_duration(tally.mean)
        count = formatting.number(tally.count)
        rows.append((cause.replace("_", " "), count, mean, "-" if last is None else short_duration(last)))
    return _table(("RECOVERIES AFTER", "COUNT", "MEAN", "LAST"), rows)


def _ranks(reading: Reading, most: int) -> Iterator[Line]:
    ranks, rates = reading.metrics.ranks, reading.rates
    shown = list(ranks[:most])
    straggler = next((each for each in ranks[most:] if each.rank == rates.straggler), None)
    if straggler is not None:
        shown[-1] = straggler
    rows = [_rank(each, rates) for each in shown]
    return _table(("RANK", "POD", "STEP", "MEMORY", "CHECKPOINTS", ""), rows, _more(ranks, most, "rank"))


def _rank(each: RankMetrics, rates: Rates) -> tuple[str, ...]:
    step, saved = rates.steps.get(each.rank), each.checkpoints
    return (
        str(each.rank),
        each.pod,
        "-" if step is None else short_duration(step),
        "-" if each.memory is None else formatting.size(each.memory),
        "-" if saved is None or saved.mean is None else f"{saved.count:.0f}, {short_duration(saved.mean)} each",
        "straggles" if each.rank == rates.straggler else "",
    )


def _gpus(gpus: Sequence[GpuMetrics], most: int) -> Iterator[Line]:
    rows = []
    for each in gpus[:most]:
        memory = " of ".join(formatting.size(amount) for amount in (each.used, each.total) if amount is not None)
        busy = "-" if each.utilization is None else percent(each.utilization)
        rows.append((each.gpu, each.pod, memory or "-", busy))
    return _table(("GPU", "POD", "MEMORY", "BUSY"), rows, _more(gpus, most, "GPU"))


def _custom(reading: Reading, most: int) -> Iterator[Line]:
    found = reading.metrics.custom
    rows = [
        (
            formatting.printed(f"{each.group} {each.name}")[:60],
            *_custom_value(each, reading.rates.counters.get((each.group, each.name))),
        )
        for each in found[:most]
    ]
    return _table(("MEASURED", "VALUE", ""), rows, _more(found, most, "name"))


def _custom_value(metric: CustomMetric, rate: float | None) -> tuple[str, str]:
    """Return a metric's value over all ranks, and a remark."""
    written = short_duration if metric.seconds else formatting.number
    tallies = [value for value in metric.values.values() if isinstance(value, Tally)]
    if tallies:
        total = sum(tallies, Tally(0.0, 0.0))
        return "-" if total.mean is None else written(total.mean), f"mean of {total.count:.0f}"
    values = [value for value in metric.values.values() if isinstance(value, float)]
    if metric.kind == "counter":
        return written(sum(values)), "" if rate is None else f"{formatting.number(rate)} in a second"
    first, *rest = values
    differ = any(value != first for value in rest)
    return written(first), f"{written(min(values))} to {written(max(values))} over the ranks" if differ else ""


def _notes(reading: Reading, most: int) -> Iterator[Line]:
    notes = [formatting.printed(note.replace("\n", " ")) for note in reading.notes]
    if notes:
        yield ()
    for note in notes[:most]:
        yield (Piece(note, "yellow"),)
    yield from _more(notes, most, "note")


def _more(items: Sequence[_Item], most: int, thing: str) -> list[Line]:
    left = len(items) - most
    return [(Piece(f"and {formatting.count(left, f'more {thing}')}", "dim"),)] if left > 0 else []


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], more: Sequence[Line] = ()) -> Iterator[Line]:
    if not rows:
        return
    head, *lines = formatting.columns([header, *rows])
    yield ()
    yield (Piece(head, "dim"),)
    for line in lines:
        yield (Piece(line),)
    yield from more
