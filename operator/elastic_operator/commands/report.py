"""``elasticjob report``: a page on what happened to a job, to open in a browser, to send on and to keep."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from elastic_operator.commands import place

if TYPE_CHECKING:
    from elastic_operator.kube.user_api import UserApi

_EXAMPLES = """\
examples:
  elasticjob report digits                    writes digits-report.html
  elasticjob report digits -n team -o a.html  of a job on a cluster, into another file
  elasticjob report digits -o - | gzip        to the standard output
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "report",
        help="write a page on what happened to a job",
        description="Write one HTML file on what happened to a job that has ended, or rests: its epochs, its failures\n"
        "and their root causes, where its time went, and what was lost. It needs nothing beside it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name; on this machine also a run's id")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (default: NAME-report.html); - for standard output"
    )
    place.add_flags(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from elastic_operator.errors import BadInput
    from elastic_operator.report_json import decode_report
    from elastic_operator.showing.report_page import page

    if arguments.output == "":
        raise BadInput("-o needs the name of a file, or - for the standard output; it is empty")
    ended = ""
    if place.is_on_cluster(arguments):
        kept = place.on_cluster(arguments, lambda api: _on_cluster(api, arguments.name))
    else:
        from elastic_operator.local.client import report_of

        kept, ended = report_of(arguments.name)
    report = decode_report(kept)
    data = page(report, ended).encode(errors="replace")
    if arguments.output == "-":
        sys.stdout.buffer.write(data)
        return 0
    # A name comes out of what was kept, and goes into a path.
    file = Path(arguments.output or f"{re.sub(r'[^A-Za-z0-9.-]', '-', report.name)}-report.html")
    try:
        file.write_bytes(data)
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}; name another file with -o") from None
    sys.stdout.write(f"the report of {report.name} is in {file}\n")
    return 0


async def _on_cluster(api: UserApi, name: str) -> bytes:
    from elastic_operator.kube.jobs import ClusterJobs

    return (await ClusterJobs(api, place.tell).report(name)).encode()
