"""``elasticjob top``: show how jobs train now, from their agents' metrics."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client, tell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from elastic_operator.cli.options import Commands
    from elastic_operator.client import JobClient, ScrapedJob
    from elastic_operator.views.rates import RateTracker
    from elastic_operator.views.top import Line, Reading

_INTERVAL: Final = 2.0
"""Seconds between two readings."""
_REFRESH_RATE: Final = 4
"""Per second; bounds the time until a resized terminal is redrawn."""

_EXAMPLES = """\
examples:
  elasticjob top                   a line for each job on this machine
  elasticjob top digits            where a job's time goes, its recoveries, each rank's steps and memory
  elasticjob top digits -n team    a job on a cluster; asks its agents through the API server
  elasticjob top -A                the jobs in all namespaces of a cluster

In the list, RESTARTS are those charged to the job's budget + those that are not.
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "top",
        _execute,
        summary="show how jobs train now: goodput, steps, memory",
        description="Show how a job trains now, from its agents' metrics, or all jobs in a line each.\n"
        "On a terminal it is updated every 2 seconds until Ctrl-C or the job's end.",
        examples=_EXAMPLES,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a job's name; on this machine also a run's id")
    parser.add_argument("--once", action="store_true", help="read once and print it (default without a terminal)")
    add_cluster_flags(parser, all_namespaces=True)


class Screen:
    """One job, or a table of all jobs.

    Args:
        jobs: reads them.
        name: of the job; None for all jobs.
        namespaces: whether to show the jobs' namespaces.
    """

    def __init__(self, jobs: JobClient, name: str | None, *, namespaces: bool = False) -> None:
        self._jobs = jobs
        self._name = name
        self._namespaces = namespaces
        self._trackers: dict[tuple[str, str], RateTracker] = {}
        self.readings: list[Reading] = []

    @property
    def over(self) -> bool:
        """Whether the one job has ended."""
        return self._name is not None and all(
            reading.job.status.finished or not reading.job.run.alive for reading in self.readings
        )

    def read(self) -> None:
        """Take a reading."""
        jobs = self._jobs.scrape_leaders() if self._name is None else [self._jobs.scrape(self._name)]
        self.readings = [self._reading(each) for each in jobs]

    def _reading(self, scraped: ScrapedJob) -> Reading:
        from elastic_operator.views.job_metrics import JobMetrics
        from elastic_operator.views.rates import RateTracker
        from elastic_operator.views.top import Reading

        job, now = scraped.job, time.time()
        metrics = JobMetrics.of(scraped.pages)
        rates = self._trackers.setdefault((job.namespace, job.name), RateTracker()).update(metrics, now)
        return Reading(job=job, metrics=metrics, rates=rates, now=now, notes=scraped.notes)

    def lines(self, width: int, height: int | None) -> Sequence[Line]:
        """Return the lines for a terminal."""
        from elastic_operator.views.formatting import count
        from elastic_operator.views.top import Piece, job_lines

        if self._name is not None:
            return [
                line for reading in self.readings for line in job_lines(reading, width=width, height=height, bar=True)
            ]
        head, *rest = self.plain() or ["no jobs"]
        if height is not None and len(rest) >= height > 1:
            left = len(rest) - max(0, height - 2)
            rest[height - 2 :] = [f"and {count(left, 'more job')}"]
        return [(Piece(head, "dim"),), *((Piece(line[:width]),) for line in rest)][:height]

    def plain(self) -> Sequence[str]:
        """Return the lines for a file."""
        from elastic_operator.views.top import job_lines, jobs_table, plain

        if self._name is None:
            return jobs_table(self.readings, namespaces=self._namespaces) if self.readings else ()
        return [plain(line) for reading in self.readings for line in job_lines(reading)]


def _execute(arguments: argparse.Namespace) -> int:
    console = None if arguments.once else _console()
    with open_client(arguments) as jobs:
        screen = Screen(jobs, arguments.name, namespaces=arguments.all_namespaces)
        screen.read()
        if not screen.readings:
            tell(f"no jobs {jobs.place}; start one with `{jobs.start_command}`")
        elif console is None:
            sys.stdout.write("".join(f"{line}\n" for line in screen.plain()))
        else:
            _watch(screen, console)
    return 0


def _console() -> Console | None:
    """Return the terminal; None if the output is not one, or cannot be updated."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        tell("to see this updated, install the Python package rich; this is printed once:")
        return None
    return Console(file=sys.stdout, highlight=False)


def _watch(screen: Screen, console: Console) -> None:
    from rich.live import Live
    from rich.text import Text

    from elastic_operator.errors import ClusterError

    problem = ""

    def picture(*, final: bool = False) -> RenderableType:
        height = None if final else console.height - 1
        text = Text("\n").join(
            Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in screen.lines(console.width, height)
        )
        text.no_wrap, text.overflow = True, "ellipsis"
        return text if final or not problem else Text.assemble(text, "\n", (problem, "bold red"))

    try:
        # On the terminal's alternate screen, like a pager; the last picture stays on the normal one.
        with Live(console=console, screen=True, refresh_per_second=_REFRESH_RATE, get_renderable=picture):
            while not screen.over:
                time.sleep(_INTERVAL)
                try:
                    screen.read()
                    problem = ""
                except ClusterError as error:
                    problem = str(error)
    finally:
        console.print(picture(final=True))
