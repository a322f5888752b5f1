"""``elasticjob top``: show how jobs train now, from their agents' metrics."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from elastic_operator.cli.options import add_cluster_flags, add_command, is_terminal, open_client, tell

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.text import Text

    from elastic_operator.cli.options import Commands, JobClient
    from elastic_operator.views.top import RateTracker, Reading

_INTERVAL: Final = 2.0
"""Seconds between two readings."""

_TEXT = """\
Show how a job trains now, from its agents' metrics, or all jobs in a line each.
On a terminal it is updated every 2 seconds until Ctrl-C or the job's end.

examples:
  elasticjob top                   a line for each job on this machine
  elasticjob top digits            where a job's time goes, its recoveries, each rank's steps and memory
  elasticjob top digits -n team    a job on a cluster; asks its agents through the API server
  elasticjob top -A                the jobs in all namespaces of a cluster

In the list, RESTARTS are those charged to the job's budget + those that are not.
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "top", _execute, "show how jobs train now: goodput, steps, memory", _TEXT)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a job's name; on this machine also a run's id")
    parser.add_argument("--once", action="store_true", help="read once and print it (default without a terminal)")
    add_cluster_flags(parser, all_namespaces=True)


class Screen:
    """One job, or a table of all jobs.

    Args:
        jobs: the client that reads the jobs.
        name: the name of the job; None for all jobs.
        namespaces: whether to show the jobs' namespaces.
    """

    def __init__(self, jobs: JobClient, name: str | None, *, namespaces: bool = False) -> None:
        self._jobs = jobs
        self._name = name
        self._namespaces = namespaces
        self._rates: dict[tuple[str, str], RateTracker] = {}
        self.readings: list[Reading] = []

    @property
    def over(self) -> bool:
        """Whether the one job has ended."""
        jobs = [reading.job for reading in self.readings]
        return self._name is not None and all(job.status.finished or not job.run.alive for job in jobs)

    def read(self) -> None:
        """Take a reading."""
        from elastic_operator.views.top import RateTracker, Reading

        self.readings = [
            Reading(job, pages, time.time(), self._rates.setdefault((job.namespace, job.name), RateTracker()), notes)
            for job, pages, notes in self._jobs.scrape(self._name)
        ]

    def lines(self) -> list[str]:
        """Return the lines to print."""
        from elastic_operator.views.top import job_lines, jobs_table

        if self._name is not None:
            return job_lines(self.readings[0])
        return jobs_table(self.readings, namespaces=self._namespaces) if self.readings else ["no jobs"]

    def text(self, width: int) -> Text:
        """Return the lines in colors, with a bar for where the job's time went."""
        from rich.text import Text

        from elastic_operator.views.top import STATE_COLORS, states

        text = Text(no_wrap=True, overflow="ellipsis")
        spent = states(self.readings[0]) if self._name is not None else {}
        for line in self.lines():
            text.append(f"{line}\n", "dim" if line.partition(" ")[0].isupper() else "")
            if line.startswith("goodput "):
                ends = [round(end / sum(spent.values()) * width) for end in accumulate(spent.values())]
                for state, begin, end in zip(spent, [0, *ends], ends, strict=False):
                    text.append("█" * (end - begin), STATE_COLORS.get(state, "white"))
                text.append("\n")
        for state in spent:
            text.highlight_words([f"{state} "], STATE_COLORS.get(state, "white"))
        text.rstrip()
        return text


def _execute(arguments: argparse.Namespace) -> int:
    console = None if arguments.once else _console()
    with contextlib.closing(open_client(arguments)) as jobs:
        screen = Screen(jobs, arguments.name, namespaces=arguments.all_namespaces)
        screen.read()
        if not screen.readings:
            tell(f"no jobs {jobs.place}; start one with `{jobs.start_command}`")
        elif console is None:
            sys.stdout.write("".join(f"{line}\n" for line in screen.lines()))
        else:
            _watch(screen, console)
    return 0


def _console() -> Console | None:
    """Return the terminal; None if the output is not one, or cannot be updated."""
    if not is_terminal(sys.stdout, os.environ):
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

    try:
        # On the terminal's alternate screen, like a pager; the last output stays on the normal screen.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            problem = ""
            while True:
                text = screen.text(console.width)
                live.update(Text.assemble((problem, "bold red"), text) if problem else text, refresh=True)
                if screen.over:
                    return
                time.sleep(_INTERVAL)
                try:
                    screen.read()
                    problem = ""
                except ClusterError as error:
                    problem = f"{error}\n"
    finally:
        console.print(screen.text(console.width))
