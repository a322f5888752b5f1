"""``elasticjob report``: write a page about a job's run."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_EXAMPLES = """\
examples:
  elasticjob report digits                    writes digits-report.html
  elasticjob report digits -n team -o a.html  of a job on a cluster, into another file
  elasticjob report digits -o - | gzip        to the standard output
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "report",
        _execute,
        summary="write a page about a job's run",
        description="Write one HTML file about a job that has ended or is suspended: its rounds, its failures and\n"
        "their root causes, where its time went, and what was lost. The file needs no other files.",
        examples=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name; on this machine also a run's id")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (default: NAME-report.html); - for standard output"
    )
    add_cluster_flags(parser)


def _execute(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from elastic_operator.api.report import decode_report
    from elastic_operator.errors import BadInput
    from elastic_operator.reports.page import page

    if arguments.output == "":
        raise BadInput("-o needs the name of a file, or - for the standard output; it is empty")
    with contextlib.closing(open_client(arguments)) as jobs:
        kept, ended = jobs.report(arguments.name)
    report = decode_report(kept)
    data = page(report, ended).encode(errors="replace")
    if arguments.output == "-":
        sys.stdout.buffer.write(data)
        return 0
    # The name comes from the kept report, and becomes part of a path.
    file = Path(arguments.output or f"{re.sub(r'[^A-Za-z0-9.-]', '-', report.name)}-report.html")
    try:
        file.write_bytes(data)
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}; name another file with -o") from None
    sys.stdout.write(f"the report of {report.name} is in {file}\n")
    return 0
