"""The output of ``elasticjob run`` while a job runs: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import abc
import contextlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from elastic_operator.views import formatting
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_operator.views.job_view import EventView

PROGRESS_INTERVAL: Final = 5.0
"""Seconds between two lines of the program's progress in plain lines."""
_OUTCOMES: Final = {0: "succeeded", 1: "failed", 3: "was deleted", 130: "was interrupted"}

NOW: Final = ">"
DONE: Final = "+"
FAILED: Final = "-"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the demo.

    Attributes:
        title: what is done.
        mark: "" before it begins, then :data:`NOW`, and at last :data:`DONE` or :data:`FAILED`.
        result: its result.
    """

    title: str
    mark: str = ""
    result: str = ""


@dataclass(frozen=True, slots=True)
class Hints:
    """How ``elasticjob`` is called.

    Attributes:
        command: how to call it in a second terminal.
        first: what has to be typed there first; empty if there is nothing.
        here: how to call it in this terminal.
    """

    command: str = "elasticjob"
    first: str = ""
    here: str = "elasticjob"


def own_hints(argv0: str, environ: Mapping[str, str]) -> Hints:
    """Return how ``elasticjob`` is called, given how it was started and the PATH."""
    path, on_path = Path(argv0), shutil.which("elasticjob", path=environ.get("PATH"))
    if path.name != "elasticjob" or not path.is_file():  # python -m
        module = f"{formatting.shell_path(sys.executable)} -m elastic_operator.cli.main"
        return Hints() if on_path else Hints(command=module, here=module)
    found = on_path is not None and Path(on_path).samefile(path)
    here = "elasticjob" if found else formatting.shell_path(argv0)
    activate = path.absolute().parent / "activate"
    if activate.is_file() and (not found or "VIRTUAL_ENV" in environ):  # the next terminal has not activated it
        return Hints(first=f". {formatting.shell_path(str(activate))}", here=here)
    return Hints() if found else Hints(command=formatting.shell_path(str(path.absolute())), here=here)


def suggestions(job: JobView, hints: Hints) -> list[tuple[str, str]]:
    """Return what to try in a second terminal: the command, and what it does."""
    name, command = job.name, hints.command
    rows = [(hints.first, "once, in each new terminal")] if hints.first else []
    if job.status.state == "Suspended":
        rows.append((f"{command} resume {name}", "resume it"))
    else:
        low, high = job.spec.get("minReplicas", 1), job.spec.get("maxReplicas", 1)
        size = job.status.desired or job.spec.get("replicas") or high
        if low < high:
            other = size + 1 if size < high else size - 1
            rows.append((f"{command} scale {name} --replicas {other}", "change its size while it trains"))
        rows.append((f"{command} logs {name} --rank 0 -f", "follow one rank's output"))
        if victim := next((pod for pod in reversed(job.living_pods) if pod.pid and pod.ready), None):
            rows.append((f"kill -9 {victim.pid}", f"kill pod {victim.name}"))
    rows.append((f"{command} describe {name}", "show its details"))
    rows.append((f"{command} get", "list all jobs on this machine"))
    rows.append((f"{command} delete {name}", "end it"))
    return rows


def outcome(snapshot: Mapping[str, Any], now: float, code: int, hints: Hints) -> list[str]:
    """Return how a run ended with this exit code, and where its files are, in lines."""
    job = JobView.of(snapshot)
    first = f"{job.name} {_OUTCOMES.get(code, f'ended with {code}')} after {formatting.duration(job.age(now))}"
    why = job.run.ended.message if job.run.ended else ""
    if code == 0 and job.progress is not None:
        why = job.progress.line
    elif code == 1:
        failed = (each.message for each in job.status.conditions if each.type == "Failed")
        why = why or job.status.what_failed or next(failed, "")
    why = formatting.printed(why.replace("\n", " "))
    lines = [f"{first}: {why}" if why else f"{first}."]
    lines += [f"{label:<12} {formatting.home_relative(path)}" for label, path in paths(job)]
    if code in (1, 130) and job.run.id:
        manifest = formatting.shell_path(job.run.manifest_path) if job.run.manifest_path else "FILE"
        lines.append(f"{'go on with':<12} {hints.here} run --resume {job.run.id} {manifest}")
    return lines


def paths(job: JobView) -> list[tuple[str, str]]:
    """Return where the files of a run are: label and path."""
    return [(label, path) for label, path in (("logs", job.run.logs), ("checkpoints", job.run.checkpoints)) if path]


def event_text(event: EventView) -> str:
    """Return the message of an event in one line."""
    return formatting.printed(event.message.replace("\n", " ")) or event.reason


class View(contextlib.AbstractContextManager["View"]):
    """Shows a job while it runs; a context manager, which restores the terminal."""

    @abc.abstractmethod
    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Show that the job has changed."""

    @abc.abstractmethod
    def on_steps(self, steps: Sequence[Step]) -> None:
        """Show that a step of the demo has begun or ended."""

    @abc.abstractmethod
    def on_ending(self, sentence: str) -> None:
        """Show that the run is ending."""

    @abc.abstractmethod
    def say_outcome(self, code: int) -> None:
        """Print how the run has ended, after the view has ended."""

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""


class PlainView(View):
    """Prints a line for each change, with the time of day."""

    def __init__(self, output: TextIO, hints: Hints, clock: Callable[[], float] = time.time) -> None:
        self._output = output
        self._hints = hints
        self._clock = clock
        self._job: JobView | None = None
        self._snapshot: Mapping[str, Any] = {}
        self._said_progress = 0.0
        self._steps: tuple[Step, ...] = ()

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
        # Events report rounds and sizes; the outcome reports the end.
        if not job.status.finished and (before is None or before.status.state != job.status.state):
            self._say(f"{job.name} is {job.status.state}")
        progress = job.progress
        due = progress is not None and progress.time >= self._said_progress + PROGRESS_INTERVAL
        if progress is not None and due and (line := formatting.printed(progress.line)):
            self._said_progress = progress.time
            self._say(f"| {line}")

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Print which step of the demo begins, and the result of each."""
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
