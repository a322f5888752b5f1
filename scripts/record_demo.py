"""Records a run of the demo as an animated SVG for the README.

    .venv/bin/python scripts/record_demo.py        (writes docs/demo.svg; takes as long as `make demo`)

The script runs ``elasticjob demo`` and keeps each frame of the live view. It shortens periods in which only progress
changes; the clock in the frames shows the real time. The SVG has no scripts: the frames are stacked vertically and move
past a window, each line is stored once, and text remains text. Run the script on an idle machine, because readers will
expect the times in the recording.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

from elastic_operator.cli.run import perform
from elastic_operator.local.run import RunRequest
from elastic_operator.local.run_dir import home_dir
from elastic_operator.local.view import NOW, LiveView, render
from elastic_operator.manifest.loader import load_checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.color import Color
    from rich.console import RenderableType
    from rich.style import Style

    from elastic_operator.local.view import Step
    from elastic_operator.views.job_view import JobView

COLUMNS: Final = 80
ROWS: Final = 30
PROMPT: Final = "$ make demo"
LARGEST: Final = 400_000
"""The maximum size of the SVG in bytes, which keeps the README quick to load."""
CALM_FRAMES: Final = 6
"""The maximum number of frames of a period in which only progress changes."""
SHORTEST, LONGEST, LAST = 0.15, 1.0, 10.0
"""The minimum and maximum seconds of a frame, and the seconds of the last frame."""

CELL: Final = 8.4
LINE: Final = 18
MARGIN: Final = 16
TITLE: Final = 30
COLORS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
STYLE: Final = """\
.film{animation:play %(seconds).2fs steps(1,end) infinite}
@media (prefers-reduced-motion:reduce){.film{animation:none;transform:translateY(-%(end)dpx)}}
@keyframes play{%(keyframes)s}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace;\
fill:#d6dbe3;white-space:pre}
.red{fill:#ff7b72}.green{fill:#56d364}.yellow{fill:#e3b341}.cyan{fill:#76d9e6}.black{fill:#0b0e13}.white{fill:#fff}
.dim{opacity:.62}.bold{font-weight:700}
.on-green{fill:#3fa34d}.on-red{fill:#c93c37}.on-yellow{fill:#c99a2e}
"""

Line = tuple[tuple[str, str, str], ...]
"""The parts of a line, each with its text, the classes of its style, and the class of its background."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of the recording.

    Attributes:
        at: the time of the frame in seconds since the Unix epoch.
        lines: the lines of the frame.
        happening: a value that is equal for frames between which only progress has changed.
    """

    at: float
    lines: tuple[Line, ...]
    happening: object


class RecordingView(LiveView):
    """A live view that keeps its frames instead of showing them, and prints the current step."""

    def __init__(self) -> None:
        self.console = Console(
            file=io.StringIO(),
            width=COLUMNS,
            height=ROWS,
            force_terminal=True,
            color_system="standard",
            highlight=False,
        )
        super().__init__(self.console, "elasticjob")
        self.frames: list[Frame] = []

    def on_snapshot(self, job: JobView) -> None:
        """Keep the frame."""
        self.job = job
        self._keep(job)

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Keep the frame, and print the current step."""
        self.steps = tuple(steps)
        step = next((step for step in reversed(self.steps) if step.mark), None)
        if step is not None:
            print(f"{time.strftime('%X')}  {step.title} {'…' if step.mark == NOW else step.result}")
        if self.job is not None:
            self._keep(self.job)

    def keep_end(self, code: int, lines: Sequence[str]) -> None:
        """Keep the final frame."""
        with self.console.capture() as captured:
            self.say_outcome(code)
            self.console.out("\n".join(lines))
        shown = lines_of(self.console, Text.from_ansi(captured.get().rstrip()))
        self.frames.append(Frame(time.time(), shown[-ROWS:], "the end"))

    def _keep(self, job: JobView) -> None:
        now = time.time()
        picture = render(job, now, self.command, steps=self.steps)
        lines = lines_of(self.console, picture)[:ROWS]
        pods = tuple((pod.name, pod.phase, pod.ready, pod.ranks) for pod in job.pods)
        self.frames.append(Frame(now, lines, (self.steps, len(job.events), pods, job.status.state)))


def lines_of(console: Console, picture: RenderableType) -> tuple[Line, ...]:
    """Return the lines of a frame."""
    rendered = console.render_lines(picture, pad=False)
    return tuple(tuple((text, *_look(style)) for text, style, _ in line if text) for line in rendered)


def _look(style: Style | None) -> tuple[str, str]:
    if style is None:
        return "", ""
    classes = [_name(style.color), *(name for name, on in (("bold", style.bold), ("dim", style.dim)) if on)]
    behind = _name(style.bgcolor)
    return " ".join(filter(None, classes)), f"on-{behind}" if behind else ""


def _name(color: Color | None) -> str:
    return "" if color is None or color.number is None else COLORS[color.number]


def thinned(frames: Iterable[Frame]) -> list[tuple[Frame, float]]:
    """Return the frames to show, with the seconds of each."""
    kept: list[Frame] = []
    for _, group in itertools.groupby(frames, key=lambda frame: frame.happening):
        stretch = list(group)
        stride = max(1, math.ceil(len(stretch) / CALM_FRAMES))
        kept += stretch[::stride]
    shown = [(frame, min(max(after.at - frame.at, SHORTEST), LONGEST)) for frame, after in itertools.pairwise(kept)]
    return [*shown, (kept[-1], LAST)]


def animation(frames: Sequence[tuple[Frame, float]]) -> str:
    """Return the SVG of the frames."""
    height, width = ROWS * LINE, COLUMNS * CELL
    seconds = sum(shown for _, shown in frames)
    numbers: dict[Line, int] = {}
    film, keyframes, at = [], [], 0.0
    for number, (frame, shown) in enumerate(frames):
        for row, line in enumerate(frame.lines):
            if any(text.strip() or behind for text, _, behind in line):
                id_ = numbers.setdefault(line, len(numbers))
                film.append(f'<use href="#l{id_}" y="{number * height + row * LINE}"/>')
        keyframes.append(f"{100 * at / seconds:.3f}%{{transform:translateY(-{number * height}px)}}")
        at += shown
    style = STYLE % {"seconds": seconds, "end": (len(frames) - 1) * height, "keyframes": "".join(keyframes)}
    lines = "".join(f'<g id="l{number}">{_line(line)}</g>' for line, number in numbers.items())
    full_width, full_height = width + 2 * MARGIN, height + TITLE + MARGIN
    buttons = "".join(
        f'<circle cx="{20 + 20 * place}" cy="16" r="6" fill="{color}"/>'
        for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width:g} {full_height:g}" role="img">'
        "<title>A training job is scaled up, loses a worker and an agent to kill -9, shrinks and succeeds</title>"
        f"<style>{style}</style><defs>{lines}</defs>"
        f'<rect width="{full_width:g}" height="{full_height:g}" rx="8" fill="#11151c"/>{buttons}'
        f'<svg x="{MARGIN}" y="{TITLE}" width="{width:g}" height="{height}"><g class="film">{"".join(film)}</g></svg>'
        "</svg>\n"
    )


def _line(line: Line) -> str:
    pieces: list[str] = []
    column = 0
    for behind, group in itertools.groupby(line, key=lambda piece: piece[2]):
        columns = sum(len(text) for text, _, _ in group)
        if behind:
            x, width = column * CELL, columns * CELL
            pieces.append(f'<rect class="{behind}" x="{x:g}" width="{width:g}" height="{LINE}"/>')
        column += columns
    column = 0
    for text, classes, _ in line:
        if word := text.strip():
            x = (column + len(text) - len(text.lstrip())) * CELL
            named = f' class="{classes}"' if classes else ""
            length = f' textLength="{len(word) * CELL:g}"' if len(word) > 1 else ""
            pieces.append(f'<text{named} x="{x:g}" y="13.5"{length}>{escape(word)}</text>')
        column += len(text)
    return "".join(pieces)


def main() -> int:
    """Run the demo and write the SVG."""
    parser = argparse.ArgumentParser(description="Records the demo as an animated SVG.")
    parser.add_argument("--manifest", type=Path, default=Path("examples/digits.yaml"))
    parser.add_argument("--output", type=Path, default=Path("docs/demo.svg"))
    options = parser.parse_args()
    view = RecordingView()
    request = RunRequest(manifest=load_checked(options.manifest), home=home_dir(os.environ), environ=os.environ)
    begun = time.time()
    ended, code, table = asyncio.run(perform(request, view))
    view.keep_end(ended, table)
    if code != 0:
        print(*table, sep="\n", file=sys.stderr)
        print("The demo failed, so nothing was written.", file=sys.stderr)
        return code
    prompt = Frame(begun - 1, (((PROMPT, "bold", ""),),), "the prompt")
    picture = animation(thinned([prompt, *view.frames]))
    if len(picture.encode()) > LARGEST:
        print(
            f"The recording has {len(picture.encode())} bytes, more than {LARGEST}; lower CALM_FRAMES.", file=sys.stderr
        )
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(picture)
    print(f"{options.output}: {len(picture.encode()) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
