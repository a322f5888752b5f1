"""``elasticjob suspend`` and ``elasticjob resume``: have a job rest, and have it go on."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING

from elastic_operator.commands import place

if TYPE_CHECKING:
    from elastic_operator.kube.user_api import UserApi

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


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    suspend = commands.add_parser(
        "suspend",
        help="have a job rest: its pods go, and what it has reached stays",
        description="Have a job rest. Its workers get the time to save; then all its pods are gone, its etcd too.\n"
        "What is counted of it stays, and while it rests nearly everything in its spec may be changed.",
        epilog=_SUSPEND_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    resume = commands.add_parser(
        "resume",
        help="have a job go on that rests",
        description="Have a job go on that was suspended, from its last checkpoint.",
        epilog=_RESUME_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for parser, rest in ((suspend, True), (resume, False)):
        parser.add_argument("name", metavar="NAME", help="the job's name")
        place.add_flags(parser)
        parser.set_defaults(execute=functools.partial(_execute, rest=rest))


def _execute(arguments: argparse.Namespace, *, rest: bool) -> int:
    if place.is_on_cluster(arguments):
        place.on_cluster(arguments, lambda api: _on_cluster(api, arguments.name, rest=rest))
    else:
        from elastic_operator.local.client import connect

        connect(arguments.name).suspend(rest=rest)
    sys.stdout.write(f"elasticjob {arguments.name} {'suspended' if rest else 'resumed'}\n")
    return 0


async def _on_cluster(api: UserApi, name: str, *, rest: bool) -> None:
    from elastic_operator.kube.jobs import ClusterJobs

    await ClusterJobs(api, place.tell).suspend(name, rest=rest)
