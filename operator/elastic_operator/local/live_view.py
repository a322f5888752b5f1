"""The live picture of a job on a terminal.

The least important parts are last; a small terminal cuts them off. The live view uses the terminal's alternate screen,
as a pager does. The last picture and the outcome stay on the normal screen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from elastic_operator.controller import messages
from elastic_operator.local.view import DONE, FAILED, NOW, View, event_text, outcome, paths, suggestions
from elastic_operator.views import formatting
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console, RenderableType

    from elastic_operator.local.view import Hints, Step
    from elastic_operator.views.job_view import PodView

_REPAINTS: Final = 4
_MAX_WIDTH: Final = 120
_MAX_PODS: Final = 8
_MAX_EVENTS: Final = 4
_BAR: Final = {"Running": "black on green", "Succeeded": "black on green", "Failed": "white on red"}
_TONE: Final = {True: "green", None: "yellow", False: "red"}
_MARKS: Final = {"": ("·", "dim"), NOW: ("▶", "bold yellow"), DONE: ("✔", "green"), FAILED: ("✘", "red")}


class LiveView(View):
    """The picture of a job, kept up to date on a terminal."""

    def __init__(self, console: Console, hints: Hints, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._hints = hints
        self._clock = clock
        self._snapshot: Mapping[str, Any] = {}
        self._steps: Sequence[Step] = ()
        self._ending = ""
        self._over = False
        self._live = Live(
            console=console, screen=True, refresh_per_second=_REPAINTS, get_renderable=self._picture, transient=True
        )

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._live.stop()

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Show the job from the next repaint on."""
        self._snapshot = snapshot
        if not self._live.is_started and not self._over:
            self._live.start(refresh=True)  # not before: an error about bad input belongs on the normal screen

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Show the steps of the demo."""
        self._steps = tuple(steps)

    def on_ending(self, sentence: str) -> None:
        """Show that the run is ending."""
        self._ending = sentence
        if self._live.is_started:
            self._live.refresh()

    def say_outcome(self, code: int) -> None:
        """Print the last picture, and how the run has ended."""
        if not self._snapshot:
            return
        self._console.print(render(self._snapshot, self._clock()))
        first, *rest = outcome(self._snapshot, self._clock(), code, self._hints)
        style = {0: "bold green", 1: "bold red"}.get(code, "bold")
        self._console.print(Text(f"\n {first}", style=style))
        for line in rest:
            self._console.print(Text(f" {line}"), soft_wrap=True)

    def _picture(self) -> RenderableType:
        return render(self._snapshot, self._clock(), self._hints, steps=self._steps, ending=self._ending)


def render(
    snapshot: Mapping[str, Any],
    now: float,
    hints: Hints | None = None,
    *,
    steps: Sequence[Step] = (),
    ending: str = "",
) -> RenderableType:
    """Return the picture of a job.

    Args:
        snapshot: of the job.
        now: seconds since the Unix epoch.
        hints: how ``elasticjob`` is called; None for the last picture, which has neither paths nor suggestions.
        steps: of the demo.
        ending: shown in place of the suggestions when the run is ending.
    """
    job = JobView.of(snapshot)
    parts = [_title(job, now), _facts(job)]
    if ending:
        parts.append(Text(f"\n {ending}", "bold yellow"))
    parts += [_steps(steps), _pods(job, now), _events(job, now)]
    if hints is not None:
        where = [
            (Text(name, "dim"), Text(formatting.home_relative(path), overflow="fold")) for name, path in paths(job)
        ]
        parts.append(_grid(where))
        if not ending and not job.status.finished:
            commands = [(Text(f"  {command}", "cyan"), Text(why, "dim")) for command, why in suggestions(job, hints)]
            parts.append(_grid([(Text("In a second terminal", "dim"), Text()), *commands]))
    return Constrain(Group(*parts), _MAX_WIDTH)


def _grid(rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """Return a blank line and a table, whose cells are wrapped if there is too little room."""
    if not rows:
        return Group()
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return Padding(table, (1, 0, 0, 1))


def _title(job: JobView, now: float) -> RenderableType:
    bar = Table.grid(Column(no_wrap=True), Column(justify="right"), expand=True)
    bar.add_row(Text(f" {job.name}  {job.state}", "bold"), f"{formatting.clock(job.age(now))} ")
    bar.style = _BAR.get(job.state, "black on yellow")
    return bar


def _facts(job: JobView) -> RenderableType:
    status = job.status
    facts = [("round", status.round or "-"), ("world size", status.world_size), ("restarts", status.restarts)]
    if not job.completed:
        facts.insert(2, ("pods", status.ready))
    text = Text(no_wrap=True, overflow="ellipsis")
    for label, value in facts:
        text.append(f" {label} ", style="dim").append(f"{value}", style="bold").append("  ")
        if label == "pods":
            missing = status.desired - status.ready_replicas
            text.append("●" * status.ready_replicas, "green").append("●" * missing, "yellow")
            text.append("·" * (job.spec.get("maxReplicas", 0) - max(status.desired, status.ready_replicas)), "dim")
            text.append("  ")
    if job.progress and (line := formatting.printed(job.progress.line)):
        text.append(f"\n\n {line}", "bold cyan")
    return text


def _steps(steps: Sequence[Step]) -> RenderableType:
    rows = []
    for step in steps:
        sign, style = _MARKS[step.mark]
        result = Text(step.result, style if step.mark == FAILED else "bold")
        rows.append((Text(f"{sign} ", style).append(step.title, "" if step.mark else "dim"), result))
    return _grid(rows)


def _pods(job: JobView, now: float) -> RenderableType:
    living, ended = job.living_pods, job.ended_pods
    # Beside living pods, the two that ended last explain what happened; if all have ended, each is shown.
    rows = [*living[:_MAX_PODS], *ended[:2]] if living else sorted(ended[:_MAX_PODS], key=lambda pod: pod.index)
    titles = ("POD", "PID", "STATE", "RANKS", "AGE", "MESSAGE" if any(map(_message, rows)) else "")
    table = [tuple(Text(title, "dim") for title in titles), *(_pod(pod, now) for pod in rows)]
    if len(living) > _MAX_PODS:
        table.append((Text(f"and {messages.count(len(living) - _MAX_PODS, 'more pod')}", "dim"), *[Text()] * 5))
    return _grid(table if rows else ())


def _pod(pod: PodView, now: float) -> tuple[Text, ...]:
    doing, dim = formatting.activity(pod), "dim" if pod.over else ""
    return (
        Text(pod.name, dim),
        Text(str(pod.pid) if pod.pid and not pod.over else "-", dim),
        Text(doing.word, _TONE[doing.good]),
        Text(formatting.rank_list(() if pod.over else pod.ranks), dim),
        Text(formatting.duration((pod.ended or now) - pod.created), dim),
        Text(_message(pod), dim),
    )


def _message(pod: PodView) -> str:
    """Return the last line of a pod's termination message, if it adds to the pod's state."""
    if pod.exit_code == 0 or (isinstance(pod.message, str) and messages.signal_name(pod.exit_code)):
        return ""
    return formatting.printed((pod.words.splitlines() or [""])[-1])


def _events(job: JobView, now: float) -> RenderableType:
    start = job.created or now
    rows = [
        (
            Text(formatting.clock(each.time - start).rjust(5), "dim"),
            Text(event_text(each), "red" if each.warning else ""),
        )
        for each in job.events[-_MAX_EVENTS:]
    ]
    return _grid(rows)
