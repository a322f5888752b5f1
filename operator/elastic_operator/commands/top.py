"""``elasticjob top``: how jobs train right now, as their agents' metrics tell it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Final, Protocol

from elastic_operator.commands import place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.showing.agent_page import Page
    from elastic_operator.showing.shown import Shown
    from elastic_operator.showing.top_lines import Line, Reading
    from elastic_operator.showing.trend import Trend

_EVERY: Final = 2.0
"""Seconds between two readings."""
_REPAINTS: Final = 4
"""A second: a changed size of the terminal should be seen soon."""

_EXAMPLES = """\
examples:
  elasticjob top                   a line for each job on this machine
  elasticjob top digits            where a job's time goes, its recoveries, each rank's steps and memory
  elasticjob top digits -n team    a job on a cluster; asks its agents through the API server
  elasticjob top -A                the jobs in all namespaces of a cluster

In the list, RESTARTS are those charged to the job's budget + those that are not.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "top",
        help="how jobs train right now: goodput, steps, memory",
        description="Show how a job trains right now, as its agents' metrics tell it, or all jobs in a line each.\n"
        "On a terminal it is renewed every 2 seconds until Ctrl-C or the job's end.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a job's name; on this machine also a run's id")
    parser.add_argument("--once", action="store_true", help="read once and print it (default without a terminal)")
    place.add_flags(parser, all_namespaces=True)
    parser.set_defaults(execute=_execute)


class Source(Protocol):
    """Where jobs are read, with the pages of their agents."""

    async def job(self, name: str) -> tuple[Shown, Sequence[Page], Sequence[str]]:
        """A job, the pages of its agents, and what else is to be said."""

    async def jobs(self) -> list[tuple[Shown, Sequence[Page]]]:
        """All jobs, each with the page of its leader."""


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.errors import BadInput

    everywhere = arguments.all_namespaces
    if arguments.name is not None and everywhere:
        raise BadInput("a job has one namespace: name it with -n instead of -A, or leave out the job's name")
    console = None if arguments.once else _console()
    if place.is_on_cluster(arguments):

        async def ask(api: UserApi) -> None:
            from elastic_operator.kube.agent_pages import ClusterPages

            await _show(ClusterPages(api, all_namespaces=everywhere), arguments, console)

        place.on_cluster(arguments, ask)
    else:
        import asyncio

        asyncio.run(_of_this_machine(arguments, console))
    return 0


async def _of_this_machine(arguments: argparse.Namespace, console: Console | None) -> None:
    from elastic_operator.local.agent_pages import LocalPages

    async with LocalPages() as pages:
        await _show(pages, arguments, console)


def _console() -> Console | None:
    """The terminal, where there is one on which a picture can be renewed."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        place.tell("to see this renewed, install the Python package rich; once it is:")
        return None
    return Console(file=sys.stdout, highlight=False)


async def _show(source: Source, arguments: argparse.Namespace, console: Console | None) -> None:
    screen = (
        _JobsScreen(source, namespaces=arguments.all_namespaces)
        if arguments.name is None
        else _JobScreen(source, arguments.name)
    )
    await screen.read()
    if isinstance(screen, _JobsScreen) and screen.empty:
        where = "with `kubectl apply -f FILE`" if place.is_on_cluster(arguments) else "with `elasticjob run FILE`"
        place.tell(f"no jobs here; start one {where}")
        return
    if console is None:
        for line in screen.plain():
            sys.stdout.write(f"{line}\n")
        return
    await _renew(screen, console)


async def _renew(screen: _Screen, console: Console) -> None:
    import asyncio

    from rich.live import Live
    from rich.text import Text

    from elastic_operator.errors import ClusterError

    trouble = ""

    def picture(*, final: bool = False) -> RenderableType:
        room = None if final else console.height - 1
        text = Text("\n").join(
            Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in screen.lines(console.width, room)
        )
        text.no_wrap, text.overflow = True, "ellipsis"
        return text if final or not trouble else Text.assemble(text, "\n", (trouble, "bold red"))

    try:
        # The terminal's second screen, as a pager takes it; what stays afterwards is the last picture.
        with Live(console=console, screen=True, refresh_per_second=_REPAINTS, get_renderable=picture):
            while not screen.over:
                await asyncio.sleep(_EVERY)
                try:
                    await screen.read()
                    trouble = ""
                except ClusterError as error:
                    trouble = str(error)
    finally:
        console.print(picture(final=True))


class _Screen(Protocol):
    """What is shown, and read again and again."""

    @property
    def over(self) -> bool:
        """Whether nothing of it will change any more."""

    async def read(self) -> None:
        """Read it."""

    def lines(self, width: int, height: int | None) -> Sequence[Line]:
        """It, for a terminal."""

    def plain(self) -> Sequence[str]:
        """It, for anything else."""


class _JobScreen:
    """One job."""

    def __init__(self, source: Source, name: str) -> None:
        from elastic_operator.showing.trend import Trend

        self._source = source
        self._name = name
        self._trend = Trend()
        self._reading: Reading | None = None

    @property
    def over(self) -> bool:
        shown = self._reading.shown if self._reading else None
        return shown is not None and (shown.status.finished or not shown.run.alive)

    async def read(self) -> None:
        shown, pages, notes = await self._source.job(self._name)
        self._reading = _reading(shown, pages, self._trend, notes)

    def lines(self, width: int, height: int | None) -> Sequence[Line]:
        from elastic_operator.showing import top_lines

        return top_lines.lines(self._reading, width=width, height=height, bar=True) if self._reading else ()

    def plain(self) -> Sequence[str]:
        from elastic_operator.showing import top_lines

        return [top_lines.plain(line) for line in top_lines.lines(self._reading)] if self._reading else ()


class _JobsScreen:
    """All jobs."""

    over = False

    def __init__(self, source: Source, *, namespaces: bool) -> None:
        self._source = source
        self._namespaces = namespaces
        self._trends: dict[tuple[str, str], Trend] = {}
        self._readings: list[Reading] = []

    @property
    def empty(self) -> bool:
        """Whether there are no jobs."""
        return not self._readings

    async def read(self) -> None:
        from elastic_operator.showing.trend import Trend

        self._readings = [
            _reading(shown, pages, self._trends.setdefault((shown.namespace, shown.name), Trend()))
            for shown, pages in await self._source.jobs()
        ]

    def lines(self, width: int, height: int | None) -> Sequence[Line]:
        from elastic_operator.showing import words
        from elastic_operator.showing.top_lines import Piece

        head, *rest = self.plain() or ["no jobs"]
        if height is not None and len(rest) >= height > 1:
            left = len(rest) - max(0, height - 2)
            rest[height - 2 :] = [f"and {words.count(left, 'more job')}"]
        return [(Piece(head, "dim"),), *((Piece(line[:width]),) for line in rest)][:height]

    def plain(self) -> Sequence[str]:
        from elastic_operator.showing.top_table import table

        return table(self._readings, namespaces=self._namespaces) if self._readings else ()


def _reading(shown: Shown, pages: Sequence[Page], trend: Trend, notes: Sequence[str] = ()) -> Reading:
    from elastic_operator.showing.figures import figures
    from elastic_operator.showing.top_lines import Reading

    now = time.time()
    told = figures(pages)
    return Reading(shown=shown, figures=told, pace=trend.read(told, now), now=now, notes=notes)
