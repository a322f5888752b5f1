"""``elasticjob demo``: scale a job, kill a worker and an agent with kill -9, and wait for its success."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_command

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_EXAMPLES = """\
examples:
  elasticjob demo                        with examples/digits.yaml
  elasticjob demo --plain my-job.yaml    with a job of your own, in plain lines

Exit codes: 0 every step had its effect and the job succeeded, 1 not so, 2 bad input, 3 deleted, 130 interrupted.
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "demo",
        _execute,
        summary="see a job scaled, killed and recovering",
        description="Run a job, scale it up, kill a worker, kill an agent and scale it back, until it has succeeded.\n"
        "At the end a table says what happened and how long each recovery took.",
        examples=_EXAMPLES,
    )
    parser.add_argument("file", nargs="?", default="examples/digits.yaml", metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--plain", action="store_true", help="plain lines and no live view (default without a terminal)"
    )


def _execute(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from elastic_operator.local.demo import perform
    from elastic_operator.local.run_dir import home_dir
    from elastic_operator.local.runner import RunRequest
    from elastic_operator.local.view import choose_view
    from elastic_operator.local.view_text import own_hints
    from elastic_operator.manifest.loader import load_checked

    request = RunRequest(manifest=load_checked(Path(arguments.file)), home=home_dir(os.environ), environ=os.environ)
    hints = own_hints(sys.argv[0], os.environ)
    with choose_view(plain=arguments.plain, hints=hints, output=sys.stdout, environ=os.environ) as view:
        performance = asyncio.run(perform(request, view))
    view.say_outcome(performance.run)
    for line in performance.lines():
        sys.stdout.write(f"{line}\n")
    return performance.code
