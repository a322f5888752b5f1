"""The texts that the live view and the plain lines share: steps of the demo, suggestions, the outcome of a run."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.views import formatting
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.views.job_view import EventView

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
        result: what came of it.
    """

    title: str
    mark: str = ""
    result: str = ""


@dataclass(frozen=True, slots=True)
class Hints:
    """How ``elasticjob`` is called.

    Attributes:
        command: how to call it in a second terminal.
        first: what has to be typed there before; empty if nothing has.
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
