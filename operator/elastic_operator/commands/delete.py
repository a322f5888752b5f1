"""``elasticjob delete``: end a job. What it has written stays; on a cluster, as far as it is on volumes that stay."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from elastic_operator.commands import place

if TYPE_CHECKING:
    from elastic_operator.kube.user_api import UserApi

_EXAMPLES = """\
examples:
  elasticjob delete digits            on this machine
  elasticjob delete digits -n team    on a cluster; comes back when its pods are gone
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "delete",
        help="end a job",
        description="End a job and wait until it is gone. On this machine its logs and checkpoints stay in the run's\n"
        "folder; on a cluster what its pods have written to volumes of their own goes with them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is gone (on a cluster only)")
    place.add_flags(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    if place.is_on_cluster(arguments):
        place.on_cluster(arguments, lambda api: _on_cluster(api, arguments))
    elif arguments.no_wait:
        from elastic_operator.errors import BadInput

        raise BadInput("--no-wait is for jobs on a cluster; name one with -n or --context, or leave --no-wait out")
    else:
        from elastic_operator.local.client import connect

        connect(arguments.name).delete()
    sys.stdout.write(f"elasticjob {arguments.name} deleted\n")
    return 0


async def _on_cluster(api: UserApi, arguments: argparse.Namespace) -> None:
    from elastic_operator.kube.jobs import ClusterJobs

    await ClusterJobs(api, place.tell).delete(arguments.name, wait=not arguments.no_wait)
