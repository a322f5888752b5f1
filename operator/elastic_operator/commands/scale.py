"""``elasticjob scale``: change the number of a running job's pods."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from elastic_operator.commands import place

if TYPE_CHECKING:
    from elastic_operator.kube.user_api import UserApi

_EXAMPLES = """\
examples:
  elasticjob scale digits --replicas 3            on this machine
  elasticjob scale digits --replicas 3 -n team    on a cluster, as `kubectl scale` does it
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "scale",
        help="change a running job's size",
        description="Change the number of a running job's pods, within its minReplicas and maxReplicas.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name")
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="how many pods there should be")
    place.add_flags(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    if place.is_on_cluster(arguments):
        place.on_cluster(arguments, lambda api: _on_cluster(api, arguments))
    else:
        from elastic_operator.local.client import connect

        connect(arguments.name).scale(arguments.replicas)
    sys.stdout.write(f"elasticjob {arguments.name} scaled to {arguments.replicas}\n")
    return 0


async def _on_cluster(api: UserApi, arguments: argparse.Namespace) -> None:
    from elastic_operator.kube.jobs import ClusterJobs

    await ClusterJobs(api, place.tell).scale(arguments.name, arguments.replicas)
