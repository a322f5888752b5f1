"""What ``elasticjob run`` shows while a job goes on: a live picture on a terminal, plain lines elsewhere.

The live picture uses the terminal's alternate screen, as a pager does. What stays afterwards is the last picture and
the outcome.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO

from elastic_operator.local.view_text import NOW, Hints, Step, event_text, outcome, paths, suggestions
from elastic_operator.views import formatting
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from rich.console import Console, RenderableType

    from elastic_operator.views.job_view import EventView

PROGRESS_INTERVAL: Final = 5.0
"""Seconds between two lines of the program's progress in plain lines."""
_REPAINTS: Final = 4


class View(Protocol):
    """Shows a job while it goes on; a context manager."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Give the terminal back."""

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The job has changed."""

    def on_steps(self, steps: Sequence[Step]) -> None:
        """A step of the demo has begun or ended."""

    def on_ending(self, sentence: str) -> None:
        """The run is ending."""

    def say_outcome(self, code: int) -> None:
        """Say how the run has ended, after the view has ended."""


def choose_view(*, plain: bool, hints: Hints, output: TextIO, environ: Mapping[str, str]) -> View:
    """Return the live view if the output is a terminal that can show it, else plain lines.

    Args:
        plain: the user wants plain lines.
        hints: how ``elasticjob`` is called.
        output: where to show it.
        environ: NO_COLOR and TERM=dumb ask for plain lines.
    """
    if plain or environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb" or not output.isatty():
        return PlainView(output, hints)
    from rich.console import Console

    return LiveView(Console(file=output, highlight=False), hints)


class PlainView:
    """Prints a line for each change, with the time of day."""

    def __init__(self, output: TextIO, hints: Hints, clock: Callable[[], float] = time.time) -> None:
        self._output = output
        self._hints = hints
        self._clock = clock
        self._job: JobView | None = None
        self._snapshot: Mapping[str, Any] = {}
        self._said_progress = 0.0
        self._steps: tuple[Step, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        pass

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Print what has changed."""
        before, job = self._job, JobView.of(snapshot)
        self._snapshot, self._job = snapshot, job
        if before is None:
            self._say(*(f"{label}: {formatting.home_relative(path)}" for label, path in paths(job)))
            self._say("in a second terminal:")
            self._say(*(f"  {command}   # {why}" for command, why in suggestions(job, self._hints)))
        for event in _new_events(before, job):
            self._say(f"! {event_text(event)}" if event.warning else event_text(event))
        # Events tell of rounds and sizes, the outcome of the end.
        if not job.status.finished and (before is None or before.status.state != job.status.state):
            self._say(f"{job.name} is {job.status.state}")
        progress = job.progress
        due = progress is not None and progress.time >= self._said_progress + PROGRESS_INTERVAL
        if progress is not None and due and (line := formatting.printed(progress.line)):
            self._said_progress = progress.time
            self._say(f"| {line}")

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Print which step of the demo begins, and what came of it."""
        for step in steps:
            if step.mark and step not in self._steps:
                self._say(f"--- {step.title}" if step.mark == NOW else f"--- {step.title}: {step.result}")
        self._steps = tuple(steps)

    def on_ending(self, sentence: str) -> None:
        """Print that the run is ending."""
        self._say(sentence)

    def say_outcome(self, code: int) -> None:
        """Print how the run has ended."""
        if self._snapshot:
            self._say(*outcome(self._snapshot, self._clock(), code, self._hints))

    def _say(self, *lines: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        with contextlib.suppress(BrokenPipeError):  # `| head` is no reason to end the training
            self._output.writelines(f"{stamp}  {line}\n" for line in lines)
            self._output.flush()


def _new_events(before: JobView | None, after: JobView) -> Sequence[EventView]:
    """Return the events that were not there before; the oldest may have been dropped."""
    events = after.events
    for known in range(len(events), 0, -1):
        if before and before.events and events[known - 1] == before.events[-1]:
            return events[known:]
    return events


class LiveView:
    """The picture of :mod:`elastic_operator.local.render`, kept up to date on a terminal."""

    def __init__(self, console: Console, hints: Hints, clock: Callable[[], float] = time.time) -> None:
        from rich.live import Live

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._over = True
        self._live.stop()

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Show the job from the next repaint on."""
        self._snapshot = snapshot
        if not self._live.is_started and not self._over:
            self._live.start(refresh=True)  # not before: bad input is told on the screen that stays

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
        from rich.text import Text

        from elastic_operator.local.render import render

        if not self._snapshot:
            return
        self._console.print(render(self._snapshot, self._clock(), self._console.width))
        first, *rest = outcome(self._snapshot, self._clock(), code, self._hints)
        style = {0: "bold green", 1: "bold red"}.get(code, "bold")
        self._console.print(Text(f"\n {first}", style=style))
        for line in rest:
            self._console.print(Text(f" {line}"), soft_wrap=True)

    def _picture(self) -> RenderableType:
        from elastic_operator.local.render import render

        return render(
            self._snapshot,
            self._clock(),
            self._console.width,
            self._console.height,
            hints=self._hints,
            steps=self._steps,
            ending=self._ending,
        )
