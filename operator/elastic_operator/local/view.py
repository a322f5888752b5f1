"""What ``elasticjob run`` shows while a job goes on: a live picture on a terminal, plain lines anywhere else.

The live picture takes the terminal's second screen, as a pager does: when the terminal's size changes it is simply
painted anew, and what was there before comes back afterwards. What stays is the last picture and the outcome.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO

from elastic_operator.local.act import NOW
from elastic_operator.local.hints import suggestions
from elastic_operator.showing import words
from elastic_operator.showing.shown import Shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from rich.console import Console, RenderableType

    from elastic_operator.local.act import Act
    from elastic_operator.local.hints import Hints
    from elastic_operator.showing.shown import ShownEvent

PROGRESS_EVERY: Final = 5.0
"""Seconds; in plain lines the training's own progress is said no more often."""

_REPAINTS: Final = 4
"""A second. The clock in the picture moves once in a second; a changed size of the terminal should be seen sooner."""

_OUTCOMES: Final = {0: "succeeded", 1: "failed", 3: "was deleted", 130: "was interrupted"}


class View(Protocol):
    """Something that shows a job while it goes on; a context manager for as long as it does."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Give the terminal back."""

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The job has changed."""

    def show_acts(self, acts: Sequence[Act]) -> None:
        """An act of the demo has begun or ended."""

    def say_ending(self, why: str) -> None:
        """The run is being ended."""

    def say_outcome(self, code: int) -> None:
        """The run has ended with this exit code: say how, and where everything is. Said after the view has ended."""


def choose_view(*, plain: bool, hints: Hints, output: TextIO, environ: Mapping[str, str]) -> View:
    """The live view where there is a terminal that can show it, plain lines elsewhere.

    Args:
        plain: the user wants plain lines.
        hints: how commands are spelled.
        output: where to show it.
        environ: NO_COLOR and TERM=dumb ask for plain lines.
    """
    if plain or environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb" or not output.isatty():
        return PlainView(output, hints)
    from rich.console import Console

    return LiveView(Console(file=output, highlight=False), hints)


def outcome(snapshot: Mapping[str, Any], now: float, code: int, hints: Hints) -> list[str]:
    """How a run ended and where everything is, in lines.

    Args:
        snapshot: the last one.
        now: seconds since the Unix epoch.
        code: the exit code.
        hints: how commands are spelled.
    """
    shown = Shown.of(snapshot)
    last = f"{shown.name} {_OUTCOMES.get(code, f'ended with {code}')} after {words.duration(shown.age(now))}"
    why = shown.run.ended.message if shown.run.ended else ""
    if code == 0 and shown.progress is not None:
        why = shown.progress.line
    elif code == 1:
        why = why or shown.status.what_failed or _failed(shown)
    why = words.printed(why.replace("\n", " "))
    lines = [f"{last}: {why}" if why else f"{last}."]
    lines += [f"{label:<12} {words.home(place)}" for label, place in _places(shown)]
    if code in (1, 130) and shown.run.id:
        manifest = words.path_to_type(shown.run.manifest_path) if shown.run.manifest_path else "FILE"
        lines.append(f"{'go on with':<12} {hints.here} run --resume {shown.run.id} {manifest}")
    return lines


def _failed(shown: Shown) -> str:
    return next((each.message for each in shown.status.conditions if each.type == "Failed" and each.message), "")


def _places(shown: Shown) -> list[tuple[str, str]]:
    return [
        (label, place) for label, place in (("logs", shown.run.logs), ("checkpoints", shown.run.checkpoints)) if place
    ]


def _new(before: Sequence[ShownEvent], after: Sequence[ShownEvent]) -> Sequence[ShownEvent]:
    """The events that were not there before; old ones may have been dropped meanwhile."""
    for known in range(len(after), 0, -1):
        if before and after[known - 1] == before[-1]:
            return after[known:]
    return after


class LiveView:
    """The picture of :mod:`elastic_operator.local.render`, kept up to date on a terminal."""

    def __init__(self, console: Console, hints: Hints, clock: Callable[[], float] = time.time) -> None:
        from rich.live import Live

        self._console = console
        self._hints = hints
        self._clock = clock
        self._snapshot: Mapping[str, Any] = {}
        self._acts: Sequence[Act] = ()
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
        """The job has changed; the next repaint shows it."""
        self._snapshot = snapshot
        if not self._live.is_started and not self._over:
            # Only now: what is wrong with the input is told on the screen that stays.
            self._live.start(refresh=True)

    def show_acts(self, acts: Sequence[Act]) -> None:
        """An act of the demo has begun or ended."""
        self._acts = tuple(acts)

    def say_ending(self, why: str) -> None:
        """The run is being ended."""
        self._ending = why
        if self._live.is_started:
            self._live.refresh()

    def say_outcome(self, code: int) -> None:
        """The last picture, and below it how the run ended."""
        from rich.text import Text

        if not self._snapshot:
            return
        self._console.print(self._picture(final=True))
        first, *rest = outcome(self._snapshot, self._clock(), code, self._hints)
        self._console.print()
        self._console.print(Text(f" {first}", style="bold green" if code == 0 else "bold red" if code == 1 else "bold"))
        for line in rest:
            self._console.print(Text(f" {line}"), soft_wrap=True)

    def _picture(self, *, final: bool = False) -> RenderableType:
        from elastic_operator.local.render import render

        return render(
            self._snapshot,
            self._clock(),
            self._console.width,
            None if final else self._console.height,
            hints=None if final else self._hints,
            acts=() if final else self._acts,
            ending="" if final else self._ending,
            places=not final,
        )


class PlainView:
    """A line for whatever changes, each with the time of day."""

    def __init__(self, output: TextIO, hints: Hints, clock: Callable[[], float] = time.time) -> None:
        self._output = output
        self._hints = hints
        self._clock = clock
        self._shown: Shown | None = None
        self._snapshot: Mapping[str, Any] = {}
        self._said_progress = 0.0
        self._acts: tuple[Act, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        pass

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Say what has changed since the last one."""
        before, after = self._shown, Shown.of(snapshot)
        self._snapshot, self._shown = snapshot, after
        if before is None:
            self._begin(after)
        for event in _new(before.events if before else (), after.events):
            text = words.printed(event.message.replace("\n", " ")) or event.reason
            self._say(f"! {text}" if event.warning else text)
        self._say_state(before, after)
        self._say_progress(after)

    def show_acts(self, acts: Sequence[Act]) -> None:
        """Say which act of the demo begins, or what came of it."""
        for number, act in enumerate(acts):
            old = self._acts[number] if number < len(self._acts) else None
            if old != act and act.mark:
                self._say(f"--- {act.title}" if act.mark == NOW else f"--- {act.title}: {act.result}")
        self._acts = tuple(acts)

    def say_ending(self, why: str) -> None:
        """The run is being ended."""
        self._say(why)

    def say_outcome(self, code: int) -> None:
        """How the run ended."""
        for line in outcome(self._snapshot, self._clock(), code, self._hints) if self._snapshot else ():
            self._say(line)

    def _begin(self, shown: Shown) -> None:
        for label, place in _places(shown):
            self._say(f"{label}: {words.home(place)}")
        self._say("in a second terminal:")
        for command, why in suggestions(shown, self._hints):
            self._say(f"  {command}   # {why}")

    def _say_state(self, before: Shown | None, after: Shown) -> None:
        # Epochs and sizes are told by the events, the end by the outcome.
        if after.status.finished or (before is not None and before.status.state == after.status.state):
            return
        self._say(f"{after.name} is {after.status.state}")

    def _say_progress(self, shown: Shown) -> None:
        progress = shown.progress
        if progress is None or progress.time < self._said_progress + PROGRESS_EVERY:
            return
        line = words.printed(progress.line)
        if line:
            self._said_progress = progress.time
            self._say(f"| {line}")

    def _say(self, line: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        # A reader that goes away (`| head`) is no reason to end the training.
        with contextlib.suppress(BrokenPipeError):
            self._output.write(f"{stamp}  {line}\n")
            self._output.flush()
