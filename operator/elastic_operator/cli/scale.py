"""``elasticjob scale``: change the number of a running job's pods."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_EXAMPLES = """\
examples:
  elasticjob scale digits --replicas 3            on this machine
  elasticjob scale digits --replicas 3 -n team    on a cluster, as `kubectl scale` does it
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "scale",
        _execute,
        summary="change a running job's size",
        description="Change the number of a running job's pods, within its minReplicas and maxReplicas.",
        examples=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name")
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="the number of pods")
    add_cluster_flags(parser)


def _execute(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as jobs:
        jobs.scale(arguments.name, arguments.replicas)
    sys.stdout.write(f"elasticjob {arguments.name} scaled to {arguments.replicas}\n")
    return 0
