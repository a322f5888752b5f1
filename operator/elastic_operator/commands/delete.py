"""``elasticjob delete``: end a running job. What it has written stays."""

from __future__ import annotations

import argparse
import sys

_EXAMPLES = """\
example:
  elasticjob delete digits
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "delete",
        help="end a running job",
        description="End a running job and wait until it is gone. Its logs and checkpoints stay in the run's folder.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.local.client import connect

    connect(arguments.name).delete()
    sys.stdout.write(f"elasticjob {arguments.name} deleted\n")
    return 0
