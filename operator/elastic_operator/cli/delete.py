"""``elasticjob delete``: end a job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_EXAMPLES = """\
examples:
  elasticjob delete digits            on this machine
  elasticjob delete digits -n team    on a cluster; comes back when its pods are gone
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "delete",
        _execute,
        summary="end a job",
        description="End a job and wait until it is gone. On this machine its logs and checkpoints stay in the run's\n"
        "folder; on a cluster what its pods have written to volumes of their own goes with them.",
        examples=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is gone (on a cluster only)")
    add_cluster_flags(parser)


def _execute(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as jobs:
        jobs.delete(arguments.name, wait=not arguments.no_wait)
    sys.stdout.write(f"elasticjob {arguments.name} deleted\n")
    return 0
