"""``elasticjob logs``: print what the workers of a job, or its agents, have printed."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_EXAMPLES = """\
examples:
  elasticjob logs digits                     all ranks in the current round, each line with its rank
  elasticjob logs digits --rank 0 -f         one rank as it goes on, over all rounds that come
  elasticjob logs digits --round 2 --rank 1  what a rank printed in an earlier round
  elasticjob logs digits --agent --tail 20   the agents' own logs
  elasticjob logs digits -n team -f          all ranks of a job on a cluster, also of the pods that come
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "logs",
        _execute,
        summary="print the output of a job's workers",
        description="Print the output of a job's workers in one round, by default the current one.\n"
        "On a cluster this is read from the logs of the job's pods, as far back as these are kept.",
        examples=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name; on this machine also a run's id")
    parser.add_argument("--rank", type=_number, metavar="R", help="one rank; without it all, each line with its rank")
    parser.add_argument("--round", type=_number, metavar="E", help="another round than the current one")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on, from round to round, until the job has ended"
    )
    parser.add_argument("--tail", type=_number, metavar="N", help="only the last N lines of each rank, or agent")
    parser.add_argument("--pod", metavar="POD", help="only the workers (or with --agent, the agent) of this pod")
    parser.add_argument("--agent", action="store_true", help="the agents' own logs, not those of the workers")
    add_cluster_flags(parser)


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


_number.__name__ = "number of 0 or more"  # argparse quotes it


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.errors import BadInput
    from elastic_operator.views.log_selector import LogSelector

    if arguments.agent and (arguments.rank is not None or arguments.round is not None):
        raise BadInput("an agent speaks for all ranks and rounds: leave out --agent, or --rank and --round")
    selector = LogSelector(
        rank=arguments.rank,
        pod=arguments.pod,
        agents=arguments.agent,
        round=arguments.round,
        tail=arguments.tail,
        follow=arguments.follow,
    )
    with contextlib.closing(open_client(arguments)) as jobs:
        return 0 if jobs.logs(arguments.name, selector, _write) else 1


def _write(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()
