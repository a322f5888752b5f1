"""``elasticjob scale``: change the number of a running job's pods."""

from __future__ import annotations

import argparse
import sys

_EXAMPLES = """\
example:
  elasticjob scale digits --replicas 3
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
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.local.client import connect

    connect(arguments.name).scale(arguments.replicas)
    sys.stdout.write(f"elasticjob {arguments.name} scaled to {arguments.replicas}\n")
    return 0
