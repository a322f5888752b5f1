"""The commands that run, show or change a job: ``elasticjob run``, ``get``, ``logs``, ``scale`` and so on."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from elastic_operator.client.cluster import ClusterJobs
    from elastic_operator.client.local import LocalJobs
    from elastic_operator.views.top import JobMetrics, RateTracker

    JobClient = LocalJobs | ClusterJobs
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - argparse has no public name for it

_INTERVAL: Final = 2.0
"""Seconds between two readings of ``elasticjob top``."""

_RUN = """\
Run the ElasticJob of a manifest on this machine until it has finished. Ctrl-C ends the run.

examples:
  elasticjob run examples/digits.yaml
  elasticjob run --resume digits-20260102-101500-3fa2 examples/digits.yaml

While the job runs, each save of the manifest is applied, as by `kubectl apply`.
Exit codes: 0 succeeded, 1 failed, 2 bad input, 3 deleted, 130 interrupted.
"""
_DEMO = """\
Run a job until it has succeeded; meanwhile scale it up, kill a worker, kill an agent and scale it back.
At the end, print a table of what happened and how long each recovery took.

examples:
  elasticjob demo                        run examples/digits.yaml
  elasticjob demo --plain my-job.yaml    run your own job, and print plain lines

Exit codes: 0 all steps and the job succeeded, 1 otherwise, 2 bad input, 3 deleted, 130 interrupted.
"""
_GET = """\
List the jobs on this machine, each with its latest run, or the jobs on a cluster.

examples:
  elasticjob get                   the latest run of each job on this machine
  elasticjob get digits -o yaml    one job, as kubectl prints it
  elasticjob get -o wide           with each job's round, run and folder
  elasticjob get --all             every run whose folder exists
  elasticjob get -n team           the jobs in a namespace of kubectl's current cluster
  elasticjob get -A                the jobs in all namespaces of that cluster
"""
_DESCRIBE = """\
Show the details of a job: its spec, status, pods and events.

examples:
  elasticjob describe digits
  elasticjob describe digits-20260102-101500-3fa2    an earlier run, by its id
  elasticjob describe digits -n team                 a job on a cluster
"""
_LOGS = """\
Print the output of a job's workers in one round, by default the current one.
On a cluster, this output is in the logs of the job's pods, as far back as the cluster keeps them.

examples:
  elasticjob logs digits                     all ranks in the current round, each line with its rank
  elasticjob logs digits --rank 0 -f         follow one rank, in this and later rounds
  elasticjob logs digits --round 2 --rank 1  one rank in an earlier round
  elasticjob logs digits --agent --tail 20   the last lines of the agents' own logs
  elasticjob logs digits -n team -f          follow all ranks of a job on a cluster, also in new pods
"""
_REPORT = """\
Write an HTML report about a job that has ended or is suspended: its rounds, its failures and
their root causes, where its time went, and how much work was lost. The file is self-contained.

examples:
  elasticjob report digits                    writes digits-report.html
  elasticjob report digits -n team -o a.html  about a job on a cluster, to another file
  elasticjob report digits -o - | gzip        to the standard output
"""
_SCALE = """\
Change the number of a running job's pods, between its minReplicas and maxReplicas.

examples:
  elasticjob scale digits --replicas 3            on this machine
  elasticjob scale digits --replicas 3 -n team    on a cluster, like `kubectl scale`
"""
_SUSPEND = """\
Suspend a job: give its workers time to save a checkpoint, then delete all its pods and its etcd.
Its counters are kept. While it is suspended, almost every field of its spec may be changed.

examples:
  elasticjob suspend digits            on this machine
  elasticjob suspend digits -n team    on a cluster, like `kubectl patch` of spec.suspend
"""
_RESUME = """\
Resume a suspended job from its last checkpoint.

examples:
  elasticjob resume digits            on this machine
  elasticjob resume digits -n team    on a cluster
"""
_DELETE = """\
End a job and wait until it is gone. On this machine, its logs and checkpoints stay in the run's
folder; on a cluster, files that its pods wrote to their own volumes are deleted with the pods.

examples:
  elasticjob delete digits            on this machine
  elasticjob delete digits -n team    on a cluster; returns when its pods are gone
"""
_TOP = """\
Show the current metrics of a job, as its agents report them, or one line for each job.
On a terminal, the display is updated every 2 seconds until the job ends or you press Ctrl-C.

examples:
  elasticjob top                   one line for each job on this machine
  elasticjob top digits            where a job's time goes, its recoveries, each rank's steps and memory
  elasticjob top digits -n team    a job on a cluster, read through its API server
  elasticjob top -A                the jobs in all namespaces of a cluster

In the list, RESTARTS is the number of restarts that count against maxRestarts + the number of others.
"""


def add_to(commands: Commands) -> None:
    """Add the subcommands to the parser of ``elasticjob``."""
    run = add_command(commands, "run", _run, "run a job on this machine", _RUN)
    run.add_argument("file", metavar="FILE", help="the manifest, as for `kubectl apply`")
    run.add_argument("--resume", metavar="RUN", help="continue an earlier run, in its folder and from its checkpoints")
    run.add_argument(
        "--spares",
        type=_number,
        metavar="N",
        help="pods that stand by to take the place of a lost one (default: spec.spares)",
    )
    run.set_defaults(demo=False)
    demo = add_command(commands, "demo", _run, "scale a job and kill its processes, to show how it recovers", _DEMO)
    demo.add_argument("file", nargs="?", default="examples/digits.yaml", metavar="FILE", help="default: %(default)s")
    demo.set_defaults(demo=True, resume=None, spares=None)
    for parser in (run, demo):
        parser.add_argument(
            "--plain",
            action="store_true",
            help="print plain lines with the workers' output instead of a live view (default without a terminal)",
        )
    add = functools.partial(_add, commands)
    get = add("get", _get, "list jobs", _GET, name_optional=True)
    get.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the whole objects")
    get.add_argument(
        "--all", action="store_true", help="on this machine, every run whose folder exists, not only each job's latest"
    )
    add("describe", _describe, "show the details of a job", _DESCRIBE)
    logs = add("logs", _logs, "print the output of a job's workers", _LOGS)
    logs.add_argument("--rank", type=_number, metavar="R", help="only this rank (default: all ranks, with labels)")
    logs.add_argument("--round", type=_number, metavar="N", help="only this round (default: the current one)")
    logs.add_argument("-f", "--follow", action="store_true", help="print new lines, of all rounds, until the job ends")
    logs.add_argument("--tail", type=_number, metavar="N", help="only the last N lines of each rank, or of each agent")
    logs.add_argument("--pod", metavar="POD", help="only the workers (with --agent, the agent) of this pod")
    logs.add_argument("--agent", action="store_true", help="the agents' own logs instead of the workers' output")
    report = add("report", _report, "write an HTML report about a job", _REPORT)
    report.add_argument(
        "-o", "--output", metavar="FILE", help="the file to write (default: NAME-report.html); - for standard output"
    )
    scale = add("scale", _scale, "change the number of a running job's pods", _SCALE)
    scale.add_argument("--replicas", type=int, required=True, metavar="N", help="the number of pods")
    suspend = functools.partial(_suspend, suspended=True)
    add("suspend", suspend, "suspend a job: delete its pods, keep its progress", _SUSPEND)
    add("resume", functools.partial(_suspend, suspended=False), "resume a suspended job", _RESUME)
    delete = add("delete", _delete, "end a job", _DELETE)
    delete.add_argument("--no-wait", action="store_true", help="do not wait until it is gone (on a cluster only)")
    top = add("top", _top, "show the current metrics of jobs: goodput, steps, memory", _TOP, name_optional=True)
    top.add_argument("--once", action="store_true", help="print the metrics once (default without a terminal)")


def _add(
    commands: Commands,
    name: str,
    execute: Callable[[JobClient, argparse.Namespace], str],
    summary: str,
    text: str,
    *,
    name_optional: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that takes the name of a job, or may take it; ``execute`` returns the text to print."""

    def run(arguments: argparse.Namespace) -> int:
        from elastic_operator.views.formatting import visible

        with contextlib.closing(open_client(arguments)) as client:
            sys.stdout.write(visible(execute(client, arguments)))
        return 0

    parser = add_command(commands, name, run, summary, text)
    which = "the job's name; on this machine also a run's id" + (" (default: all jobs)" if name_optional else "")
    parser.add_argument("name", nargs="?" if name_optional else None, metavar="NAME", help=which)
    group = parser.add_argument_group(
        "on a cluster", "Each of these flags selects jobs on a Kubernetes cluster; the default is jobs on this machine."
    )
    group.add_argument("-n", "--namespace", metavar="NAMESPACE", help="the jobs' namespace (default: the context's)")
    if name_optional:
        group.add_argument("-A", "--all-namespaces", action="store_true", help="the jobs of all namespaces")
    group.add_argument("--context", metavar="CONTEXT", help="the kubeconfig's context (default: its current one)")
    group.add_argument(
        "--kubeconfig", metavar="FILE", help="the kubeconfig (default: as for kubectl, $KUBECONFIG or ~/.kube/config)"
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from elastic_operator.cli.run import execute

    return execute(arguments)


def _get(client: JobClient, arguments: argparse.Namespace) -> str:
    from elastic_operator.views.formatting import objects, table

    jobs = client.jobs(arguments.name, every_run=arguments.all)
    if arguments.output in ("json", "yaml"):
        return objects(jobs, arguments.output, single=arguments.name is not None)
    if not jobs:
        notify(f"no jobs {client.place}; start one with `{client.start_command}`")
        return ""
    wide = arguments.output == "wide"
    return "\n".join([*table(jobs, time.time(), wide=wide, namespaces=arguments.all_namespaces), ""])


def _describe(client: JobClient, arguments: argparse.Namespace) -> str:
    from elastic_operator.views.formatting import description

    return "\n".join([*description(client.describe(arguments.name), time.time()), ""])


def _logs(client: JobClient, arguments: argparse.Namespace) -> str:
    from elastic_operator.client import LogSelector
    from elastic_operator.errors import BadInput
    from elastic_operator.views.formatting import LogFilter

    if arguments.agent and (arguments.rank is not None or arguments.round is not None):
        raise BadInput("an agent's log is about all ranks and rounds: leave out --agent, or --rank and --round")

    output_filter = LogFilter() if sys.stdout.isatty() else None

    def write(output: bytes) -> None:
        sys.stdout.buffer.write(output if output_filter is None else output_filter.filtered(output))
        sys.stdout.buffer.flush()

    selector = LogSelector(
        rank=arguments.rank,
        pod=arguments.pod,
        agents=arguments.agent,
        round=arguments.round,
        tail=arguments.tail,
        follow=arguments.follow,
    )
    if not client.logs(arguments.name, selector, write):
        sys.exit(1)  # the client has reported which logs could not be read
    return ""


def _report(client: JobClient, arguments: argparse.Namespace) -> str:
    from pathlib import Path

    from elastic_operator.api.status import decode_report
    from elastic_operator.errors import BadInput
    from elastic_operator.reports.page import page

    kept, ended = client.report(arguments.name)
    report = decode_report(kept)
    data = page(report, ended).encode(errors="replace")
    if arguments.output == "-":
        sys.stdout.buffer.write(data)
        return ""
    # The name comes from the stored report, and becomes part of a path.
    file = Path(arguments.output or f"{re.sub(r'[^A-Za-z0-9.-]', '-', report.name)}-report.html")
    try:
        file.write_bytes(data)
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}; name another file with -o") from None
    return f"the report of {report.name} is in {file}\n"


def _scale(client: JobClient, arguments: argparse.Namespace) -> str:
    client.scale(arguments.name, arguments.replicas)
    return f"elasticjob {arguments.name} scaled to {arguments.replicas}\n"


def _suspend(client: JobClient, arguments: argparse.Namespace, *, suspended: bool) -> str:
    client.suspend(arguments.name, suspended=suspended)
    return f"elasticjob {arguments.name} {'suspended' if suspended else 'resumed'}\n"


def _delete(client: JobClient, arguments: argparse.Namespace) -> str:
    client.delete(arguments.name, wait=not arguments.no_wait)
    return f"elasticjob {arguments.name} deleted\n"


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


class TopView:
    """The display of ``elasticjob top``: one job, or a table of all jobs, with the latest ``metrics``."""

    def __init__(self, jobs: JobClient, name: str | None, *, namespaces: bool = False) -> None:
        self._jobs = jobs
        self._name = name
        self._namespaces = namespaces
        self._rates: dict[tuple[str, str], RateTracker] = {}
        self.metrics: list[JobMetrics] = []

    @property
    def finished(self) -> bool:
        """Whether the named job has ended; False if the display shows all jobs."""
        jobs = [each.job for each in self.metrics]
        return self._name is not None and all(job.status.finished or not job.run.alive for job in jobs)

    def read(self) -> None:
        """Read the jobs and their metrics."""
        from elastic_operator.views.top import JobMetrics, RateTracker

        self.metrics = [
            JobMetrics(job, pages, time.time(), self._rates.setdefault((job.namespace, job.name), RateTracker()), notes)
            for job, pages, notes in self._jobs.scrape(self._name)
        ]

    def lines(self) -> list[str]:
        """Return the lines to print."""
        from elastic_operator.views.top import job_lines, jobs_table

        if self._name is not None:
            return job_lines(self.metrics[0])
        return jobs_table(self.metrics, namespaces=self._namespaces) if self.metrics else ["no jobs"]

    def text(self, width: int) -> Text:
        """Return the lines in color and, for one job, with a bar that shows the time spent in each state."""
        from rich.text import Text

        from elastic_operator.views.top import STATE_COLORS, states

        text = Text(no_wrap=True, overflow="ellipsis")
        spent = states(self.metrics[0]) if self._name is not None else {}
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


def _top(client: JobClient, arguments: argparse.Namespace) -> str:
    view = TopView(client, arguments.name, namespaces=arguments.all_namespaces)
    view.read()
    if not view.metrics:
        notify(f"no jobs {client.place}; start one with `{client.start_command}`")
    elif arguments.once or (console := _console()) is None:
        return "".join(f"{line}\n" for line in view.lines())
    else:
        _watch(view, console)
    return ""


def _console() -> Console | None:
    """Return a console for standard output; None if it cannot show a live display, or if rich is not installed."""
    from elastic_operator.views.formatting import is_terminal

    if not is_terminal(sys.stdout, os.environ):
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        notify("for a live display, install the Python package rich; this is the current state:")
        return None
    return Console(file=sys.stdout, highlight=False)


def _watch(view: TopView, console: Console) -> None:
    from rich.live import Live
    from rich.text import Text

    from elastic_operator.errors import ClusterError

    try:
        # The display uses the terminal's alternate screen, like a pager. Its last state is printed to the normal one.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            problem = ""
            while True:
                text = view.text(console.width)
                live.update(Text.assemble((problem, "bold red"), text) if problem else text, refresh=True)
                if view.finished:
                    return
                time.sleep(_INTERVAL)
                try:
                    view.read()
                    problem = ""
                except ClusterError as error:
                    problem = f"{error}\n"
    finally:
        console.print(view.text(console.width))


def add_command(
    commands: Commands, name: str, execute: Callable[[argparse.Namespace], int], summary: str, text: str
) -> argparse.ArgumentParser:
    """Add a command; ``execute`` returns its exit code; ``text`` is a description, a blank line, and an epilog."""
    description, _, examples = text.partition("\n\n")
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(execute=execute)
    return parser


def is_on_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether a flag of the command line selects a cluster; a kubeconfig alone does not select one."""
    named = (getattr(arguments, flag, None) for flag in ("namespace", "context", "kubeconfig"))
    return any(value is not None for value in named) or getattr(arguments, "all_namespaces", False)


def open_client(arguments: argparse.Namespace) -> JobClient:
    """Return the client that the command line selects; the caller must close it.

    Raises:
        ElasticJobError: the flags or the kubeconfig are invalid, or a package is missing.
    """
    from elastic_operator.errors import BadInput, ClusterError

    if not is_on_cluster(arguments):
        from elastic_operator.client.local import LocalJobs

        return LocalJobs(notify)
    all_namespaces = getattr(arguments, "all_namespaces", False)
    if all_namespaces and arguments.name is not None:
        raise BadInput("a job has one namespace: name it with -n instead of -A, or leave out the job's name")
    if getattr(arguments, "all", False):
        raise BadInput("--all is about the runs on this machine; -A lists the jobs of all namespaces of a cluster")
    try:
        from elastic_operator.client.cluster import ClusterJobs, connect
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kubernetes", "yaml"):
            raise
        raise ClusterError(
            f"jobs on a cluster need the Python package {error.name}; install the extra `operator`, in a clone of the "
            "project with `pip install '.[operator]'`"
        ) from None
    connection = connect(
        os.environ, kubeconfig=arguments.kubeconfig, context=arguments.context, namespace=arguments.namespace
    )
    return ClusterJobs(connection, notify, all_namespaces=all_namespaces)


def notify(sentence: str) -> None:
    """Print a sentence for the user to standard error."""
    from elastic_operator.views.formatting import visible

    sys.stderr.write(visible(f"elasticjob: {sentence}\n"))
    sys.stderr.flush()
