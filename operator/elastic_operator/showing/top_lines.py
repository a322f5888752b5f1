"""What ``elasticjob top`` says of a job, in lines: of the whole of it, of each of its ranks, and what the program says.

A line is made of pieces, each with the style that it has where there are colours; so the same lines serve a terminal
and a file. What matters least gives way where there is little room.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.showing import quantities, words
from elastic_operator.showing.agent_page import Tally
from elastic_operator.showing.figures import Figures, goodput
from elastic_operator.showing.shown import Shown, seconds
from torchelastic.contract import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.showing.figures import OwnFigure, RankFigures
    from elastic_operator.showing.trend import Pace


class Piece(NamedTuple):
    """A part of a line.

    Attributes:
        text: as it is shown.
        style: of it, as rich has it.
    """

    text: str
    style: str = ""


Line = tuple[Piece, ...]

STATE_STYLES: Final[Mapping[str, str]] = {
    RunState.TRAINING: "green",
    RunState.RESTORING: "cyan",
    RunState.STARTING: "blue",
    RunState.RENDEZVOUS: "magenta",
    RunState.WAITING: "yellow",
    RunState.STOPPING: "red",
    RunState.SUSPENDED: "bright_black",
}
"""What a run can be doing, with the colour of it; in the order in which it is told."""

_JOB_STYLES: Final = {"Running": "bold green", "Succeeded": "bold green", "Failed": "bold red"}
_BETWEEN: Final = "   "


class _Room(NamedTuple):
    """How much is shown.

    Attributes:
        ranks: so many, and so many GPUs.
        own: so many own names.
        notes: so many.
        recoveries: whether there are any.
        states: whether it is said in which states the time was spent, and not only what the goodput is.
    """

    ranks: int
    own: int
    notes: int
    recoveries: bool = True
    states: bool = True


_ROOMS: Final = (
    *(_Room(64, 40, 16), _Room(32, 20, 8), _Room(16, 10, 8), _Room(8, 6, 4), _Room(8, 3, 2), _Room(4, 0, 2)),
    *(_Room(2, 0, 1), _Room(2, 0, 1, recoveries=False), _Room(2, 0, 1, recoveries=False, states=False)),
    _Room(0, 0, 0, recoveries=False, states=False),
)
"""The first that fits is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A job at a moment.

    Attributes:
        shown: what is known of it.
        figures: what its agents tell.
        pace: how things go.
        now: that moment, in seconds since the Unix epoch.
        notes: what else is to be said, such as which pods do not answer.
    """

    shown: Shown
    figures: Figures
    pace: Pace
    now: float
    notes: Sequence[str] = ()

    @property
    def split(self) -> tuple[Mapping[str, float], float | None]:
        """Where the time went, and how much training was lost: as the leader tells it, or once nothing runs the status.

        While something runs, the status has what was true before the last resumption: that is not shown.
        """
        status = self.shown.status
        kept = status.time_split
        if self.figures.seconds or kept is None or not (status.finished or status.rests):
            return self.figures.seconds, self.figures.lost
        as_of = seconds(kept.as_of)
        rested = self.now - as_of if self.shown.state == "Suspended" and as_of is not None else 0.0
        rest = kept.seconds.get(RunState.SUSPENDED, 0.0) + max(0.0, rested)
        return kept.seconds | ({RunState.SUSPENDED.value: rest} if rest else {}), kept.lost_seconds

    @property
    def goodput(self) -> float | None:
        """The share of the job's time in which it trained what it still has; None where nobody knows."""
        return goodput(*self.split)


def lines(reading: Reading, *, width: int = 100, height: int | None = None, bar: bool = False) -> list[Line]:
    """All that is said of one job.

    Args:
        reading: the job.
        width: columns that there are.
        height: lines that there are; None for as many as are needed.
        bar: draw where the time went, too; for where there are colours.
    """
    found: list[Line] = []
    rest: list[Line] = []
    for room in _ROOMS:
        found = [
            *_head(reading),
            *_time(reading, width if bar else 0, states=room.states),
            *(_recoveries(reading) if room.recoveries else ()),
            *_ranks(reading, room.ranks),
            *_gpus(reading, room.ranks),
            *_own(reading, room.own),
        ]
        rest = [*_without_room(reading, room), *_notes(reading, room.notes)]
        if height is None or len(found) + len(rest) <= height:
            return found + rest
    return [*found[: max(1, (height or 0) - len(rest))], *rest][:height]


def _without_room(reading: Reading, room: _Room) -> Iterator[Line]:
    """How many there are of which none is shown; of what is shown in part, that is said below it."""
    told = reading.figures
    each = (
        (0 if room.ranks else len(told.ranks), "more rank"),
        (0 if room.ranks else len(told.gpus), "more GPU"),
        (0 if room.own else len(told.own), "more name"),
    )
    if found := [words.count(number, thing) for number, thing in each if number]:
        yield (Piece(f"and {', '.join(found)}", "dim"),)


def plain(line: Line) -> str:
    """A line without styles."""
    return "".join(piece.text for piece in line).rstrip()


def _head(reading: Reading) -> Iterator[Line]:
    shown, told, status = reading.shown, reading.figures, reading.shown.status
    age = words.duration(shown.age(reading.now))
    yield (
        Piece(shown.name, "bold"),
        Piece("  "),
        Piece(shown.state, _JOB_STYLES.get(shown.state, "bold yellow")),
        Piece(f"  {age}", "dim"),
    )
    nodes = "" if told.nodes is None else f" on {words.count(told.nodes, 'node')}"
    wanted = "" if told.wanted is None or told.wanted == told.nodes else f", {told.wanted} wanted"
    epoch = told.epoch or status.epoch
    size = status.world_size if told.world_size is None else told.world_size
    charged = status.restarts if told.restarts is None else told.restarts
    free = status.free_restarts if told.free is None else told.free
    left = "" if told.remaining is None else f", {told.remaining} left"
    yield _facts(
        ("epoch", str(epoch) if epoch else "-"),
        ("world size", f"{size}{nodes}{wanted}" if size else f"0{wanted}"),
        *([] if shown.completed else [("pods ready", f"{status.ready}/{status.desired}")]),
        ("restarts", f"{charged} charged, {free} free{left}"),
    )


def _facts(*facts: tuple[str, str]) -> Line:
    pieces: list[Piece] = []
    for label, value in facts:
        pieces += [Piece(f"{label} ", "dim"), Piece(value, "bold"), Piece(_BETWEEN)]
    return tuple(pieces[:-1])


def _time(reading: Reading, width: int, *, states: bool = True) -> Iterator[Line]:
    split, lost = reading.split
    whole, good = sum(split.values()), reading.goodput
    if good is None:
        return
    yield ()
    yield _facts(("goodput", quantities.share(good)), *([("lost", quantities.span(lost))] if lost is not None else []))
    if not states:
        return
    done = [state for state in (*STATE_STYLES, *sorted(split.keys() - STATE_STYLES.keys())) if split.get(state)]
    if width:
        ends = [round(end / whole * width) for end in accumulate(split[state] for state in done)]
        begins = [0, *ends]
        yield tuple(
            Piece("█" * (end - begin), STATE_STYLES.get(state, "white"))
            for state, begin, end in zip(done, begins, ends, strict=False)
        )
    entries: list[Line] = []
    for state in done:
        mark = (Piece("■ ", STATE_STYLES.get(state, "white")),) if width else ()
        about = f" {quantities.span(split[state])} ({quantities.share(split[state] / whole)})"
        entries.append((*mark, Piece(state, "dim"), Piece(about)))
    yield from _side_by_side(entries, width)


def _side_by_side(entries: Sequence[Line], width: int) -> Iterator[Line]:
    """As many in a line as fit; all, where the width is 0."""
    line: list[Piece] = []
    for entry in entries:
        if width and line and len(plain((*line, *entry))) + len(_BETWEEN) > width:
            yield tuple(line)
            line = []
        line += [*([Piece(_BETWEEN)] if line else []), *entry]
    yield tuple(line)


def _recoveries(reading: Reading) -> Iterator[Line]:
    found = reading.figures.recoveries
    if not found:
        return
    yield ()
    rows = [("RECOVERIES AFTER", "COUNT", "MEAN", "LAST")]
    for cause, tally in found.items():
        last = reading.pace.recoveries.get(cause)
        rows.append(
            (
                cause.replace("_", " "),
                quantities.number(tally.count),
                "-" if tally.mean is None else quantities.span(tally.mean),
                "-" if last is None else quantities.span(last),
            )
        )
    yield from _table(rows)


def _ranks(reading: Reading, most: int) -> Iterator[Line]:
    ranks = reading.figures.ranks
    if not ranks or not most:
        return
    pace = reading.pace
    chosen = list(ranks[:most])
    slowest = next((each for each in ranks[most:] if each.rank == pace.straggler), None)
    if slowest is not None:
        chosen[-1] = slowest
    rows: list[tuple[str, ...]] = [("RANK", "POD", "STEP", "MEMORY", "CHECKPOINTS", "")]
    rows += [_rank(each, pace) for each in chosen]
    yield ()
    for row, line in zip([None, *chosen], _table(rows), strict=True):
        mark = row is not None and row.rank == pace.straggler
        yield (Piece(plain(line), "yellow"),) if mark else line
    if len(ranks) > most:
        yield (Piece(f"and {words.count(len(ranks) - most, 'more rank')}", "dim"),)


def _rank(each: RankFigures, pace: Pace) -> tuple[str, ...]:
    step = pace.steps.get(each.rank)
    kept = each.checkpoints
    return (
        str(each.rank),
        each.pod,
        "-" if step is None else quantities.span(step),
        "-" if each.memory is None else quantities.size(each.memory),
        "-" if kept is None or kept.mean is None else f"{kept.count:.0f}, {quantities.span(kept.mean)} each",
        "straggles" if each.rank == pace.straggler else "",
    )


def _gpus(reading: Reading, most: int) -> Iterator[Line]:
    found = reading.figures.gpus
    if not found or not most:
        return
    rows = [("GPU", "POD", "MEMORY", "BUSY")]
    for each in found[:most]:
        memory = " of ".join(quantities.size(amount) for amount in (each.used, each.total) if amount is not None)
        busy = "-" if each.utilization is None else quantities.share(each.utilization)
        rows.append((each.gpu, each.pod, memory or "-", busy))
    yield ()
    yield from _table(rows)
    if len(found) > most:
        yield (Piece(f"and {words.count(len(found) - most, 'more GPU')}", "dim"),)


def _own(reading: Reading, most: int) -> Iterator[Line]:
    found = reading.figures.own
    if not found or not most:
        return
    chosen = found[:most]
    rows = [("MEASURED", "VALUE", "")]
    for each in chosen:
        value, more = _values(each, reading.pace.rates.get((each.group, each.name)))
        rows.append((words.printed(f"{each.group} {each.name}")[:60], value, more))
    yield ()
    yield from _table(rows)
    if len(found) > most:
        yield (Piece(f"and {words.count(len(found) - most, 'more name')}", "dim"),)


def _values(own: OwnFigure, rate: float | None) -> tuple[str, str]:
    """The value that is shown of a name, and what else is to be said of it."""
    written = quantities.span if own.seconds else quantities.number
    tallies = [value for value in own.values.values() if isinstance(value, Tally)]
    if tallies:
        together = sum(tallies, Tally(0.0, 0.0))
        return "-" if together.mean is None else written(together.mean), f"mean of {together.count:.0f}"
    values = [value for value in own.values.values() if isinstance(value, float)]
    if own.kind == "counter":
        return written(sum(values)), "" if rate is None else f"{quantities.number(rate)} in a second"
    first, *rest = values
    spread = any(value != first for value in rest)
    return written(first), f"{written(min(values))} to {written(max(values))} over the ranks" if spread else ""


def _notes(reading: Reading, most: int) -> Iterator[Line]:
    notes = [words.printed(note.replace("\n", " ")) for note in reading.notes]
    if not notes:
        return
    if most:
        yield ()
    for note in notes[:most]:
        yield (Piece(note, "yellow"),)
    if len(notes) > most:
        yield (Piece(f"and {words.count(len(notes) - most, 'more note')}", "dim"),)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    from elastic_operator.showing.columns import columns

    head, *rest = columns(rows)
    yield (Piece(head, "dim"),)
    for line in rest:
        yield (Piece(line),)
