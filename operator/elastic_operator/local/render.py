"""The live picture of a job: a function of a snapshot and the time.

It is made for terminals of 80 columns and 24 lines or more. What matters least is last; a smaller terminal cuts it off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from elastic_operator.local.view_text import DONE, FAILED, NOW, event_text, paths, suggestions
from elastic_operator.views import formatting
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from elastic_operator.local.view_text import Hints, Step
    from elastic_operator.views.job_view import PodView

_MAX_WIDTH: Final = 120
_MAX_EVENTS: Final = 4
_MAX_DOTS: Final = 16
_BAR: Final = {"Running": "black on green", "Succeeded": "black on green", "Failed": "white on red"}
_TONE: Final = {True: "green", None: "yellow", False: "red"}
_MARKS: Final = {"": ("·", "dim"), NOW: ("▶", "bold yellow"), DONE: ("✔", "green"), FAILED: ("✘", "red")}


def render(
    snapshot: Mapping[str, Any],
    now: float,
    width: int,
    height: int | None = None,
    *,
    hints: Hints | None = None,
    steps: Sequence[Step] = (),
    ending: str = "",
) -> RenderableType:
    """Return the picture of a job.

    Args:
        snapshot: of the job.
        now: seconds since the Unix epoch.
        width: columns of the terminal.
        height: its lines; None for the last picture, which shows neither paths nor suggestions.
        hints: how ``elasticjob`` is called; None for a picture without suggestions.
        steps: of the demo.
        ending: shown in place of the suggestions when the run is ending.
    """
    job, width = JobView.of(snapshot), min(width, _MAX_WIDTH)
    parts = [_header(job, now, width), _steps(steps), _pods(job, now, max(5, (height or 40) - 19)), _events(job, now)]
    if height is not None:
        parts.append(_where(job))
        if hints is not None and not ending and not job.status.finished:
            parts.append(_hints(job, hints))
    if ending:
        parts.insert(1, _line(f"\n {ending}", "bold yellow"))
    return Group(*(part for part in parts if part is not None))


def _line(text: str, style: str = "") -> RenderableType:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _grid(rows: Sequence[Sequence[RenderableType]], *, indent: int = 1, shrink: int | None = None) -> RenderableType:
    """Return a blank line and a table; one column is wrapped or shortened if there is too little room."""
    columns = [Column(no_wrap=number != shrink, overflow="ellipsis") for number in range(len(rows[0]))]
    table = Table.grid(*columns, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return Padding(table, (1, 0, 0, indent))


def _header(job: JobView, now: float, width: int) -> RenderableType:
    status = job.status
    left, right = f" {job.name}  {job.state}", f"{formatting.clock(job.age(now))} "
    text = Text(left.ljust(width - len(right)) + right, _BAR.get(job.state, "black on yellow"), no_wrap=True)
    text.stylize("bold", 0, len(left))
    facts = [("round", status.round or "-"), ("world size", status.world_size), ("restarts", status.restarts)]
    if not job.completed:
        facts.insert(2, ("pods", f"{status.ready_replicas}/{status.desired}"))
    text.append("\n")
    for label, value in facts:
        text.append(f" {label} ", style="dim").append(f"{value}", style="bold").append("  ")
        most = job.spec.get("maxReplicas") or status.desired
        if label == "pods" and 0 < most <= _MAX_DOTS:
            missing = max(0, status.desired - status.ready_replicas)
            text.append("●" * status.ready_replicas, "green").append("●" * missing, "yellow")
            text.append("·" * max(0, most - max(status.desired, status.ready_replicas)), "dim").append("  ")
    if job.progress and (line := formatting.printed(job.progress.line)):
        text.append(f"\n\n {line}", "bold cyan")
    text.overflow = "ellipsis"
    return text


def _steps(steps: Sequence[Step]) -> RenderableType | None:
    rows = []
    for step in steps:
        sign, style = _MARKS[step.mark]
        result = Text(step.result, style if step.mark == FAILED else "bold")
        rows.append((Text(f"{sign} ", style).append(step.title, "" if step.mark else "dim"), result))
    return _grid(rows) if rows else None


def _pods(job: JobView, now: float, most: int) -> RenderableType | None:
    living, ended = job.living_pods, job.ended_pods
    # Beside living pods, those that ended last tell what happened; if all have ended, each tells how.
    rows = [*living, *ended[:2]][:most] if living else sorted(ended[:most], key=lambda pod: pod.index)
    if not rows:
        return None
    titles = ("POD", "PID", "STATE", "RANKS", "AGE", "MESSAGE" if any(map(_message, rows)) else "")
    table = [tuple(Text(title, "dim") for title in titles), *(tuple(_pod(pod, now)) for pod in rows)]
    hidden = len(living) - sum(not pod.over for pod in rows)
    if hidden > 0:
        table.append((Text(f"and {formatting.count(hidden, 'more pod')}", "dim"), *[Text()] * 5))
    return _grid(table, shrink=5)


def _pod(pod: PodView, now: float) -> Iterator[RenderableType]:
    doing, dim = formatting.activity(pod), "dim" if pod.over else ""
    yield Text(pod.name, dim)
    yield Text(str(pod.pid) if pod.pid and not pod.over else "-", dim)
    yield Text(doing.word, _TONE[doing.good])
    yield Text(formatting.rank_list(() if pod.over else pod.ranks), dim)
    yield Text(formatting.duration((pod.ended or now) - pod.created), dim)
    yield Text(_message(pod), dim, no_wrap=True, overflow="ellipsis")


def _message(pod: PodView) -> str:
    """Return the last words of a pod, if they say more than its state."""
    if pod.exit_code == 0 or (isinstance(pod.message, str) and formatting.signal_name(pod.exit_code)):
        return ""
    return formatting.printed((pod.words.splitlines() or [""])[-1])


def _events(job: JobView, now: float) -> RenderableType | None:
    start = job.created or now
    rows = [
        (
            Text(formatting.clock(each.time - start).rjust(6), "dim"),
            Text(event_text(each), "red" if each.warning else ""),
        )
        for each in job.events[-_MAX_EVENTS:]
    ]
    return _grid(rows, indent=0, shrink=1) if rows else None


def _where(job: JobView) -> RenderableType | None:
    # A path is there to be copied: it is wrapped, and never shortened.
    rows = [(Text(label, "dim"), Text(formatting.home_relative(path), overflow="fold")) for label, path in paths(job)]
    return _grid(rows, shrink=1) if rows else None


def _hints(job: JobView, hints: Hints) -> RenderableType:
    rows = [(Text(f"  {command}", "cyan"), Text(why, "dim")) for command, why in suggestions(job, hints)]
    return _grid([(Text("In a second terminal", "dim"), Text()), *rows])
