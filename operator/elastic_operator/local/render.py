"""The picture of a running job: a pure function of a snapshot, the time and the room that there is.

The picture is made of blocks whose heights are known, so that it fits a small terminal: what matters least goes first
(older events, then what to try, then the places), and the header with the pods stays to the last.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from elastic_operator.local.act import DONE, FAILED, NOW
from elastic_operator.local.hints import suggestions
from elastic_operator.showing import words
from elastic_operator.showing.shown import Shown, ShownEvent, ShownPod

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from elastic_operator.local.act import Act
    from elastic_operator.local.hints import Hints

_BAR: Final = {"Running": "black on green", "Succeeded": "black on green", "Failed": "white on red"}
_TONE: Final = {True: "green", None: "yellow", False: "red"}
_WIDEST: Final = 120
_FEW_HINTS: Final = 3
_DOTS: Final = 16
"""More pods than this are not drawn one by one."""


@dataclass(frozen=True, slots=True)
class _Block:
    content: RenderableType
    height: int


def render(
    snapshot: Mapping[str, Any],
    now: float,
    width: int,
    height: int | None = None,
    *,
    hints: Hints | None = None,
    acts: Sequence[Act] = (),
    ending: str = "",
    places: bool = True,
) -> RenderableType:
    """The picture of a job.

    Args:
        snapshot: of the job.
        now: seconds since the Unix epoch.
        width: columns of the terminal.
        height: its lines; None for as many as are needed.
        hints: how commands are spelled; None to suggest none.
        acts: of the demo, where one is played.
        ending: said instead of the hints when the run is being ended.
        places: say where logs and checkpoints are.
    """
    shown = Shown.of(snapshot)
    width = min(width, _WIDEST)
    start = shown.created or now
    header = [_header(shown, now, width)]
    if ending:
        header.append(_lines([Text(), Text(f" {ending}", style="bold yellow")]))
    top = [*header, *_progress(shown, width), *_acts(acts)]
    where = list(_places(shown, width)) if places else []
    hints = None if ending or shown.status.finished else hints
    every, few = list(_hints(shown, hints, width)), list(_hints(shown, hints, width, most=_FEW_HINTS))
    room = height if height is not None else 1 << 16
    # From all to little; the first that fits is taken.
    for pods, events, rest in (
        (16, 8, [*where, *every]),
        (16, 5, [*where, *every]),
        (8, 3, [*where, *every]),
        (8, 2, [*where, *every]),
        (8, 3, [*where, *few]),
        (8, 2, [*where, *few]),
        (8, 2, where),
        (8, 2, []),
        (4, 1, []),
    ):
        blocks = [*top, *_pods(shown, now, width, pods), *_events(shown.events, start, width, events), *rest]
        if _height(blocks) <= room:
            break
    else:
        # A blank line, the titles and "and 3 more pods" come with the pods.
        blocks = [*header, *_pods(shown, now, width, room - _height(header) - 3)]
    return Group(*(block.content for block in blocks))


def _height(blocks: Iterable[_Block]) -> int:
    return sum(block.height for block in blocks)


def _lines(lines: Iterable[Text]) -> _Block:
    """A block of lines of which none is wrapped."""
    kept = list(lines)
    for line in kept:
        line.no_wrap = True
        line.overflow = "ellipsis"
    return _Block(Group(*kept), len(kept))


def _header(shown: Shown, now: float, width: int) -> _Block:
    status = shown.status
    left, right = f" {shown.name}  {shown.state}", f"{words.clock(shown.age(now))} "
    gap = " " * max(1, width - len(left) - len(right))
    bar = Text(left + gap + right, style=_BAR.get(shown.state, "black on yellow"))
    bar.stylize("bold", 0, len(left))
    most = shown.spec.get("maxReplicas") or status.desired
    facts = Text(" ")
    for label, value in (
        ("epoch", str(status.epoch) if status.epoch else "-"),
        ("world size", str(status.world_size)),
        ("pods", f"{status.ready}/{status.desired}"),
        ("restarts", str(status.restarts)),
    ):
        if label == "pods" and shown.completed:
            continue
        facts.append(f"{label} ", style="dim").append(value, style="bold")
        if label == "pods" and isinstance(most, int) and 0 < most <= _DOTS and width >= 70:
            facts.append(" ").append("●" * status.ready, style="green")
            facts.append("●" * max(0, status.desired - status.ready), style="yellow")
            facts.append("·" * max(0, most - max(status.desired, status.ready)), style="dim")
        facts.append("   ")
    facts.rstrip()
    return _lines([bar, facts])


def _progress(shown: Shown, width: int) -> Iterable[_Block]:
    line = words.printed(shown.progress.line) if shown.progress else ""
    if line:
        yield _lines([Text(), Text(f" {line}"[: width * 2], style="bold cyan")])


def _acts(acts: Sequence[Act]) -> Iterable[_Block]:
    if not acts:
        return
    signs = {"": ("·", "dim"), NOW: ("▶", "bold yellow"), DONE: ("✔", "green"), FAILED: ("✘", "red")}
    longest = max(len(act.title) for act in acts)
    lines = [Text()]
    for act in acts:
        sign, style = signs[act.mark]
        line = Text().append(f" {sign} ", style=style).append(act.title.ljust(longest), style="" if act.mark else "dim")
        if act.result:
            line.append(f"  {act.result}", style=style if act.mark == FAILED else "bold")
        lines.append(line)
    yield _lines(lines)


def _pods(shown: Shown, now: float, width: int, most: int) -> Iterable[_Block]:
    living, ended = shown.living_pods, shown.ended_pods
    if most < 1 or (not living and not ended):
        return
    # The latest that ended tell what happened; when all have ended, each tells how.
    rows = [*living, *ended[:2]][:most] if living else sorted(ended[:most], key=lambda pod: pod.index)
    hidden = len(living) - len([pod for pod in rows if not pod.over])
    wide = width >= 72
    titles = [" POD", *(["PID"] if wide else []), "STATE", "RANKS", "AGE", "LAST WORDS"]
    cells = [[Text(title, style="dim") for title in titles]]
    cells += [list(_row(pod, now, wide=wide)) for pod in rows]
    if not any(row[-1] for row in cells[1:]):
        cells = [row[:-1] for row in cells]
    else:
        # Where it is too narrow, the last words give way.
        others = sum(max(cell.cell_len for cell in column) + 2 for column in list(zip(*cells, strict=True))[:-1])
        for row in cells:
            row[-1].truncate(max(0, width - others), overflow="ellipsis")
    table = Table.grid(*(Column(no_wrap=True) for _ in cells[0]), padding=(0, 2, 0, 0))
    for row in cells:
        table.add_row(*row)
    yield _Block(Text(), 1)
    yield _Block(table, len(rows) + 1)
    if hidden > 0:
        yield _lines([Text(f" and {words.count(hidden, 'more pod')}", style="dim")])


def _row(pod: ShownPod, now: float, *, wide: bool) -> Iterable[Text]:
    doing = words.doing(pod)
    dim = "dim" if pod.over else ""
    yield Text(f" {pod.name}", style=dim)
    if wide:
        yield Text(str(pod.pid) if pod.pid and not pod.over else "-", style=dim)
    yield Text(doing.word, style=_TONE[doing.good])
    yield Text(words.ranks(() if pod.over else pod.ranks), style=dim)
    yield Text(words.duration((pod.ended or now) - pod.created), style=dim)
    yield Text(_last_words(pod), style=dim)


def _last_words(pod: ShownPod) -> str:
    """What a pod that ended had to say, in one line; nothing where its state says it all."""
    if pod.exit_code == 0 or (isinstance(pod.message, str) and words.signal_name(pod.exit_code)):
        return ""
    # Where it died without a word, these are the last lines of its log: the last one says most.
    return words.printed((pod.words.splitlines() or [""])[-1])


def _events(events: Sequence[ShownEvent], start: float, width: int, most: int) -> Iterable[_Block]:
    if not events or not most:
        return
    lines: list[Text] = []
    for event in events[-most:]:
        at = words.clock(event.time - start).rjust(6)
        text = words.printed(event.message.replace("\n", " ")) or event.reason
        first, *more = textwrap.wrap(text, max(20, width - 9), max_lines=3, placeholder=" …") or [""]
        style = "red" if event.warning else ""
        lines.append(Text().append(at, style="dim").append("  ").append(first, style=style))
        lines += [Text(" " * 8).append(line, style=style) for line in more]
    yield _lines([Text(), *lines])


def _places(shown: Shown, width: int) -> Iterable[_Block]:
    run = shown.run
    rows = [("logs", run.logs), ("checkpoints", run.checkpoints)]
    if all(len(words.home(place)) + 14 <= width for _, place in rows):
        lines = [
            Text().append(f" {label:<12} ", style="dim").append(words.home(place)) for label, place in rows if place
        ]
    else:
        # A path is there to be copied: it is never shortened.
        inside = run.directory and all(place.startswith(f"{run.directory}/") for _, place in rows)
        lines = []
        for label, place in [("logs and checkpoints are below", run.directory)] if inside else rows:
            lines.append(Text(f" {label}", style="dim"))
            path = words.home(place)
            path = path if len(path) > width - 3 else f"   {path}"
            lines += [Text(path[at : at + width]) for at in range(0, len(path), width)]
    if lines:
        yield _lines([Text(), *lines])


def _hints(shown: Shown, hints: Hints | None, width: int, most: int | None = None) -> Iterable[_Block]:
    if hints is None:
        return
    rows = suggestions(shown, hints)[:most]
    longest = max(len(command) for command, _ in rows)
    lines = [Text(), Text(" In a second terminal", style="dim")]
    for command, why in rows:
        line = Text("   ").append(command, style="cyan")
        if longest + max(len(why) for _, why in rows) + 5 <= width:
            line.append(" " * (longest - len(command) + 2)).append(why, style="dim")
        lines.append(line)
    yield _lines(lines)
