"""``elasticjob suspend`` and ``elasticjob resume``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_SUSPEND_EXAMPLES = """\
examples:
  elasticjob suspend digits            on this machine
  elasticjob suspend digits -n team    on a cluster, as `kubectl patch` of spec.suspend does it
"""
_RESUME_EXAMPLES = """\
examples:
  elasticjob resume digits            on this machine
  elasticjob resume digits -n team    on a cluster
"""


def add_to(commands: Commands) -> None:
    """Declare the commands."""
    suspend = add_command(
        commands,
        "suspend",
        _execute,
        summary="suspend a job: delete its pods, keep its progress",
        description="Suspend a job. Its workers get the time to save; then all its pods and its etcd are deleted.\n"
        "Its counters stay, and while it is suspended nearly everything in its spec may be changed.",
        examples=_SUSPEND_EXAMPLES,
    )
    resume = add_command(
        commands,
        "resume",
        _execute,
        summary="resume a suspended job",
        description="Resume a suspended job from its last checkpoint.",
        examples=_RESUME_EXAMPLES,
    )
    for parser, suspended in ((suspend, True), (resume, False)):
        parser.add_argument("name", metavar="NAME", help="the job's name")
        add_cluster_flags(parser)
        parser.set_defaults(suspended=suspended)


def _execute(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as jobs:
        jobs.suspend(arguments.name, suspended=arguments.suspended)
    sys.stdout.write(f"elasticjob {arguments.name} {'suspended' if arguments.suspended else 'resumed'}\n")
    return 0
