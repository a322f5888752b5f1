"""The commands that run, show or change a job: ``elasticjob run``, ``get``, ``logs``, ``scale`` and so on."""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import sys
import time
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.cli.options import Commands, JobClient

_RUN = """\
Run the ElasticJob of a manifest on this machine until it has ended. Ctrl-C ends it.

examples:
  elasticjob run examples/digits.yaml
  elasticjob run --resume digits-20260102-101500-3fa2 examples/digits.yaml

While the job runs, saving the changed file does what `kubectl apply` would.
Exit codes: 0 succeeded, 1 failed, 2 bad input, 3 deleted, 130 interrupted.
"""
_DEMO = """\
Run a job, scale it up, kill a worker, kill an agent and scale it back, until it has succeeded.
At the end a table says what happened and how long each recovery took.

examples:
  elasticjob demo                        with examples/digits.yaml
  elasticjob demo --plain my-job.yaml    with a job of your own, in plain lines

Exit codes: 0 every step had its effect and the job succeeded, 1 otherwise, 2 bad input, 3 deleted, 130 interrupted.
"""
_GET = """\
List the jobs on this machine: all running jobs, and the latest run of each that has ended;
or the jobs on a cluster.

examples:
  elasticjob get                   all running jobs, and the latest run of each that has ended
  elasticjob get digits -o yaml    one job as kubectl would show it
  elasticjob get -o wide           also each job's round, run and folder
  elasticjob get --all             every run that left a folder
  elasticjob get -n team           the jobs in a namespace of kubectl's current cluster
  elasticjob get -A                the jobs in all its namespaces
"""
_DESCRIBE = """\
Show all that is known of a job: its spec, its status, its pods and its events.

examples:
  elasticjob describe digits
  elasticjob describe digits-20260102-101500-3fa2    an earlier run, by its id
  elasticjob describe digits -n team                 a job on a cluster
"""
_LOGS = """\
Print the output of a job's workers in one round, by default the current one.
On a cluster this is read from the logs of the job's pods, as far back as these are kept.

examples:
  elasticjob logs digits                     all ranks in the current round, each line with its rank
  elasticjob logs digits --rank 0 -f         one rank as it goes on, over all rounds that come
  elasticjob logs digits --round 2 --rank 1  what a rank printed in an earlier round
  elasticjob logs digits --agent --tail 20   the agents' own logs
  elasticjob logs digits -n team -f          all ranks of a job on a cluster, also of the pods that come
"""
_REPORT = """\
Write one HTML file about a job that has ended or is suspended: its rounds, its failures and
their root causes, where its time went, and what was lost. The file needs no other files.

examples:
  elasticjob report digits                    writes digits-report.html
  elasticjob report digits -n team -o a.html  of a job on a cluster, into another file
  elasticjob report digits -o - | gzip        to the standard output
"""
_SCALE = """\
Change the number of a running job's pods, within its minReplicas and maxReplicas.

examples:
  elasticjob scale digits --replicas 3            on this machine
  elasticjob scale digits --replicas 3 -n team    on a cluster, as `kubectl scale` does it
"""
_SUSPEND = """\
Suspend a job. Its workers get the time to save; then all its pods and its etcd are deleted.
Its counters stay, and while it is suspended nearly everything in its spec may be changed.

examples:
  elasticjob suspend digits            on this machine
  elasticjob suspend digits -n team    on a cluster, as `kubectl patch` of spec.suspend does it
"""
_RESUME = """\
Resume a suspended job from its last checkpoint.

examples:
  elasticjob resume digits            on this machine
  elasticjob resume digits -n team    on a cluster
"""
_DELETE = """\
End a job and wait until it is gone. On this machine its logs and checkpoints stay in the run's
folder; on a cluster, files that its pods wrote to their own volumes are deleted with the pods.

examples:
  elasticjob delete digits            on this machine
  elasticjob delete digits -n team    on a cluster; returns when its pods are gone
"""


def add_to(commands: Commands) -> None:
    """Declare the commands."""
    run = add_command(commands, "run", _run, "run a job on this machine until it has ended", _RUN)
    run.add_argument("file", metavar="FILE", help="the manifest, the same that `kubectl apply` takes")
    run.add_argument("--resume", metavar="RUN", help="continue an earlier run: its folder and its checkpoints")
    run.set_defaults(demo=False)
    demo = add_command(commands, "demo", _run, "see a job scaled, killed and recovering", _DEMO)
    demo.add_argument("file", nargs="?", default="examples/digits.yaml", metavar="FILE", help="default: %(default)s")
    demo.set_defaults(demo=True, resume=None)
    for parser in (run, demo):
        parser.add_argument(
            "--plain", action="store_true", help="plain lines and no live view (default without a terminal)"
        )
    add = functools.partial(_add, commands)
    get = add("get", _get, "list jobs", _GET, every=True)
    get.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the whole objects")
    get.add_argument(
        "--all", action="store_true", help="on this machine every run that left a folder, not just each job's latest"
    )
    add("describe", _describe, "show all that is known of a job", _DESCRIBE)
    logs = add("logs", _logs, "print the output of a job's workers", _LOGS)
    logs.add_argument("--rank", type=_number, metavar="R", help="one rank; without it all, each line with its rank")
    logs.add_argument("--round", type=_number, metavar="E", help="another round than the current one")
    logs.add_argument("-f", "--follow", action="store_true", help="go on, from round to round, until the job has ended")
    logs.add_argument("--tail", type=_number, metavar="N", help="only the last N lines of each rank, or agent")
    logs.add_argument("--pod", metavar="POD", help="only the workers (or with --agent, the agent) of this pod")
    logs.add_argument("--agent", action="store_true", help="the agents' own logs, not those of the workers")
    report = add("report", _report, "write a page about a job's run", _REPORT)
    report.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (default: NAME-report.html); - for standard output"
    )
    scale = add("scale", _scale, "change a running job's size", _SCALE)
    scale.add_argument("--replicas", type=int, required=True, metavar="N", help="the number of pods")
    suspend = functools.partial(_suspend, suspended=True)
    add("suspend", suspend, "suspend a job: delete its pods, keep its progress", _SUSPEND)
    add("resume", functools.partial(_suspend, suspended=False), "resume a suspended job", _RESUME)
    delete = add("delete", _delete, "end a job", _DELETE)
    delete.add_argument("--no-wait", action="store_true", help="do not wait until it is gone (on a cluster only)")


def _add(
    commands: Commands,
    name: str,
    execute: Callable[[JobClient, argparse.Namespace], str],
    summary: str,
    text: str,
    *,
    every: bool = False,
) -> argparse.ArgumentParser:
    """Declare a command about one job, or about all jobs if none is named; ``execute`` returns what is printed."""

    def run(arguments: argparse.Namespace) -> int:
        with contextlib.closing(open_client(arguments)) as client:
            sys.stdout.write(execute(client, arguments))
        return 0

    parser = add_command(commands, name, run, summary, text)
    which = "the job's name; on this machine also a run's id"
    if every:
        parser.add_argument("name", nargs="?", metavar="NAME", help=f"{which} (default: all jobs)")
    else:
        parser.add_argument("name", metavar="NAME", help=which)
    add_cluster_flags(parser, all_namespaces=every)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from elastic_operator.cli.run import execute

    return execute(arguments)


def _get(client: JobClient, arguments: argparse.Namespace) -> str:
    from elastic_operator.views.jobs import objects, table

    jobs = client.jobs(arguments.name, every_run=arguments.all, pods=arguments.output == "wide")
    if arguments.output in ("json", "yaml"):
        return objects(jobs, arguments.output, single=arguments.name is not None)
    if not jobs:
        tell(f"no jobs {client.place}; start one with `{client.start_command}`")
        return ""
    wide = arguments.output == "wide"
    return "\n".join([*table(jobs, time.time(), wide=wide, namespaces=arguments.all_namespaces), ""])


def _describe(client: JobClient, arguments: argparse.Namespace) -> str:
    from elastic_operator.views.jobs import description

    return "\n".join([*description(client.describe(arguments.name), time.time()), ""])


def _logs(client: JobClient, arguments: argparse.Namespace) -> str:
    from elastic_operator.client import LogSelector
    from elastic_operator.errors import BadInput

    if arguments.agent and (arguments.rank is not None or arguments.round is not None):
        raise BadInput("an agent speaks for all ranks and rounds: leave out --agent, or --rank and --round")

    def write(output: bytes) -> None:
        sys.stdout.buffer.write(output)
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
        sys.exit(1)  # it has said what could not be read
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
    # The name comes from the kept report, and becomes part of a path.
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)
