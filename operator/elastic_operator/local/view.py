"""The output of ``elasticjob run`` while a job runs: a live view on a terminal, plain lines elsewhere.

The least important parts of the live view come last, because a small terminal cuts them off. The live view uses the
terminal's alternate screen, as a pager does. The last state and the outcome stay on the normal screen.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from elastic_operator.controller import messages
from elastic_operator.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_operator.views.job_view import EventView, JobView, PodView

_OUTCOMES: Final = {0: "succeeded", 1: "failed", 3: "was deleted", 130: "was interrupted"}

NOW: Final = ">"
DONE: Final = "+"
FAILED: Final = "-"

_REPAINTS: Final = 4
_MAX_WIDTH: Final = 120
_MAX_PODS: Final = 8
_MAX_EVENTS: Final = 4
_BAR: Final = {"Running": "black on green", "Succeeded": "black on green", "Failed": "white on red"}
_TONE: Final = {True: "green", None: "yellow", False: "red"}
_MARKS: Final = {"": ("·", "dim"), NOW: ("▶", "bold yellow"), DONE: ("✔", "green"), FAILED: ("✘", "red")}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the demo.

    Attributes:
        title: what the step does, in a few words.
        mark: "" before the step begins, then :data:`NOW`, and finally :data:`DONE` or :data:`FAILED`.
        result: what happened; empty until the step has ended.
    """

    title: str
    mark: str = ""
    result: str = ""


def own_command(argv0: str, environ: Mapping[str, str]) -> str:
    """Return the command that calls ``elasticjob`` in any terminal; ``argv0`` is the path of this program."""
    path = Path(argv0)
    if "VIRTUAL_ENV" not in environ and shutil.which("elasticjob", path=environ.get("PATH")):
        return "elasticjob"
    if path.name == "elasticjob" and path.is_file():
        return formatting.shell_path(str(path.absolute()))  # the command may be typed outside of the environment
    return f"{formatting.shell_path(sys.executable)} -m elastic_operator.cli.main"


def suggestions(job: JobView, command: str) -> list[tuple[str, str]]:
    """Return commands to suggest for a second terminal, each with its effect."""
    name = job.name
    rows: list[tuple[str, str]] = []
    if job.status.state == "Suspended":
        rows.append((f"{command} resume {name}", "resume it"))
    else:
        low, high = job.spec.get("minReplicas", 1), job.spec.get("maxReplicas", 1)
        size = job.status.desired or job.spec.get("replicas") or high
        if low < high:
            other = size + 1 if size < high else size - 1
            rows.append((f"{command} scale {name} --replicas {other}", "change its size while it trains"))
        rows.append((f"{command} logs {name} --rank 0 -f", "follow one rank's output"))
        if victim := next((pod for pod in reversed(job.living_pods) if pod.pid and pod.ranks), None):
            rows.append((f"kill -9 {victim.pid}", f"kill pod {victim.name}"))
    rows.append((f"{command} describe {name}", "show its details"))
    rows.append((f"{command} get", "list all jobs on this machine"))
    rows.append((f"{command} delete {name}", "end it"))
    return rows


def outcome(job: JobView, now: float, code: int, command: str) -> list[str]:
    """Return lines that say how a run with this exit code ended, and where its files are."""
    first = f"{job.name} {_OUTCOMES.get(code, f'ended with {code}')} after {formatting.duration(job.age(now))}"
    why = job.run.ended.message if job.run.ended else ""
    if code == 0 and job.progress is not None:
        why = job.progress.line
    why = formatting.printed(why.replace("\n", " "))
    lines = [f"{first}: {why}" if why else f"{first}."]
    lines += [f"{label:<12} {formatting.home_relative(path)}" for label, path in paths(job)]
    if code in (1, 130) and job.run.id:
        manifest = formatting.shell_path(job.run.manifest_path) if job.run.manifest_path else "FILE"
        lines.append(f"{'resume with':<12} {command} run --resume {job.run.id} {manifest}")
    return lines


def paths(job: JobView) -> list[tuple[str, str]]:
    """Return the label and the path of each directory of a run."""
    return [(label, path) for label, path in (("logs", job.run.logs), ("checkpoints", job.run.checkpoints)) if path]


def event_text(event: EventView) -> str:
    """Return the message of an event in one line, or the reason if there is no message."""
    return formatting.printed(event.message.replace("\n", " ")) or event.reason


class View(contextlib.AbstractContextManager["View"]):
    """Shows a job while it runs: prints a line for each change, with the time of day.

    Args:
        output: the file that the lines are written to.
        command: the command that calls ``elasticjob``.
        clock: returns the seconds since the Unix epoch.

    Attributes:
        job: the job as it was shown last.
        steps: the steps of the demo.
    """

    def __init__(self, output: IO[str], command: str, clock: Callable[[], float] = time.time) -> None:
        self.command = command
        self.clock = clock
        self.job: JobView | None = None
        self.steps: Sequence[Step] = ()
        self._output = output
        self._output_rest = b""

    def __exit__(self, *_: object) -> None:
        """End the view."""

    def on_snapshot(self, job: JobView) -> None:
        """Show what has changed in the job."""
        before, self.job = self.job, job
        if before is None:
            self._say(*(f"{label}: {formatting.home_relative(path)}" for label, path in paths(job)))
            self._say("in a second terminal:")
            self._say(*(f"  {command}   # {why}" for command, why in suggestions(job, self.command)))
        last = before.events[-1].time if before and before.events else 0.0
        for event in job.events:
            if event.time > last:
                self._say(f"! {event_text(event)}" if event.warning else event_text(event))
        # Events report rounds and sizes; the outcome reports the end.
        if not job.status.finished and (before is None or before.status.state != job.status.state):
            self._say(f"{job.name} is {job.status.state}")

    def on_output(self, output: bytes) -> None:
        """Show the complete lines of the workers' output; of a progress bar, the newest state."""
        output = self._output_rest + output
        end = max(output.rfind(b"\n"), output.rfind(b"\r")) + 1
        complete, self._output_rest = output[:end], output[end:]
        lines = (formatting.printed(line.decode(errors="replace")) for line in complete.split(b"\n"))
        self._say(*(f"| {line}" for line in lines if line))

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Show the steps of the demo that have begun or ended."""
        for step in steps:
            if step.mark and step not in self.steps:
                self._say(f"--- {step.title}" if step.mark == NOW else f"--- {step.title}: {step.result}")
        self.steps = tuple(steps)

    def on_ending(self, sentence: str) -> None:
        """Show that the run is ending."""
        self._say(sentence)

    def say_outcome(self, code: int) -> None:
        """Print how the run has ended, after the view has ended."""
        if self.job is not None:
            self._say(*outcome(self.job, self.clock(), code, self.command))

    def _say(self, *lines: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self.clock()))
        with contextlib.suppress(BrokenPipeError):  # `| head` must not end the training
            self._output.writelines(f"{stamp}  {line}\n" for line in lines)
            self._output.flush()


class LiveView(View):
    """Shows a job on a terminal, and restores the terminal when the view ends."""

    def __init__(self, console: Console, command: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(console.file, command, clock)
        self._console = console
        self._ending = ""
        self._live = Live(
            console=console, screen=True, refresh_per_second=_REPAINTS, get_renderable=self._picture, transient=True
        )

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_snapshot(self, job: JobView) -> None:
        """Show the job at the next repaint."""
        self.job = job
        if not self._live.is_started:
            self._live.start(refresh=True)  # not earlier: an error about bad input belongs on the normal screen

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Show the steps at the next repaint."""
        self.steps = tuple(steps)

    def on_ending(self, sentence: str) -> None:
        """Show that the run is ending."""
        self._ending = sentence
        if self._live.is_started:
            self._live.refresh()

    def say_outcome(self, code: int) -> None:
        """Print the last state, and how the run has ended."""
        if self.job is None:
            return
        self._console.print(render(self.job, self.clock()))
        first, *rest = outcome(self.job, self.clock(), code, self.command)
        style = {0: "bold green", 1: "bold red"}.get(code, "bold")
        self._console.print(Text(f"\n {first}", style=style))
        for line in rest:
            self._console.print(Text(f" {line}"), soft_wrap=True)

    def _picture(self) -> RenderableType:
        if self.job is None:
            return Text()
        return render(self.job, self.clock(), self.command, steps=self.steps, ending=self._ending)


def render(
    job: JobView, now: float, command: str = "", *, steps: Sequence[Step] = (), ending: str = ""
) -> RenderableType:
    """Return the renderable of the live view.

    Args:
        job: the job.
        now: the current time, in seconds since the Unix epoch.
        command: the command that calls ``elasticjob``; empty for a view without paths and suggestions.
        steps: the steps of the demo.
        ending: a sentence to show instead of the suggestions; empty unless the run is ending.
    """
    parts = [_title(job, now), _facts(job)]
    if ending:
        parts.append(Text(f"\n {ending}", "bold yellow"))
    parts += [_steps(steps), _pods(job, now), _events(job, now)]
    if command:
        where = [
            (Text(name, "dim"), Text(formatting.home_relative(path), overflow="fold")) for name, path in paths(job)
        ]
        parts.append(_grid(where))
        if not ending and not job.status.finished:
            commands = [(Text(f"  {typed}", "cyan"), Text(why, "dim")) for typed, why in suggestions(job, command)]
            parts.append(_grid([(Text("In a second terminal", "dim"), Text()), *commands]))
    return Constrain(Group(*parts), _MAX_WIDTH)


def _grid(rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """Return a blank line and a table, whose cells are wrapped on a narrow terminal; nothing if there are no rows."""
    if not rows:
        return Group()
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return Padding(table, (1, 0, 0, 1))


def _title(job: JobView, now: float) -> RenderableType:
    bar = Table.grid(Column(no_wrap=True), Column(justify="right"), expand=True)
    bar.add_row(Text(f" {job.name}  {job.state}", "bold"), f"{formatting.duration(job.age(now))} ")
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
    if (spares := job.spec.get("spares")) and not job.completed:
        text.append(" spares ", style="dim").append(f"{status.ready_spares}/{spares}", style="bold")
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
    # Beside living pods, the two that ended last explain what happened.
    rows = [*living[:_MAX_PODS], *ended[:2]] if living else sorted(ended[:_MAX_PODS], key=lambda pod: pod.index)
    titles = ("POD", "PID", "STATE", "RANKS", "AGE", "MESSAGE" if any(map(_message, rows)) else "")
    table = [tuple(Text(title, "dim") for title in titles), *(_pod(pod, now) for pod in rows)]
    if len(living) > _MAX_PODS:
        table.append((Text(f"and {messages.count(len(living) - _MAX_PODS, 'more pod')}", "dim"), *[Text()] * 5))
    return _grid(table if rows else ())


def _pod(pod: PodView, now: float) -> tuple[Text, ...]:
    (word, good), dim = formatting.activity(pod), "dim" if pod.over else ""
    return (
        Text(pod.name, dim),
        Text(str(pod.pid) if pod.pid and not pod.over else "-", dim),
        Text(word, _TONE[good]),
        Text(formatting.rank_list(() if pod.over else pod.ranks), dim),
        Text(formatting.duration((pod.ended or now) - pod.created), dim),
        Text(_message(pod), dim),
    )


def _message(pod: PodView) -> str:
    """Return the last line of a pod's termination message; empty if the pod's state says the same."""
    if pod.exit_code == 0 or messages.signal_name(pod.exit_code):
        return ""
    return formatting.printed((pod.message.splitlines() or [""])[-1])


def _events(job: JobView, now: float) -> RenderableType:
    start = job.created or now
    rows = []
    for each in job.events[-_MAX_EVENTS:]:
        after = Text(formatting.duration(each.time - start).rjust(6), "dim")
        rows.append((after, Text(event_text(each), "red" if each.warning else "")))
    return _grid(rows)
