"""``elasticjob run`` and ``elasticjob demo``: run one job on this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from elastic_operator.cli.options import add_command, is_terminal

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from elastic_operator.cli.options import Commands
    from elastic_operator.local.view import View

_RUN = """\
Run the ElasticJob of a manifest on this machine until it has ended. Ctrl-C ends it.

examples:
  elasticjob run examples/digits.yaml
  elasticjob run --resume digits-20260102-101500-3fa2 examples/digits.yaml

While the job runs, saving the changed file does what `kubectl apply` would.
Exit codes: 0 succeeded, 1 failed, 2 bad input, 3 deleted, 130 interrupted.
"""
_DEMO = """\
Run a job, scale it up, kill a worker, kill an agent and scale it back, until it has succeeded.
At the end a table says what happened and how long each recovery took.

examples:
  elasticjob demo                        with examples/digits.yaml
  elasticjob demo --plain my-job.yaml    with a job of your own, in plain lines

Exit codes: 0 every step had its effect and the job succeeded, 1 otherwise, 2 bad input, 3 deleted, 130 interrupted.
"""


def add_to(commands: Commands) -> None:
    """Declare the commands."""
    run = add_command(commands, "run", _execute, "run a job on this machine until it has ended", _RUN)
    run.add_argument("file", metavar="FILE", help="the manifest, the same that `kubectl apply` takes")
    run.add_argument("--resume", metavar="RUN", help="continue an earlier run: its folder and its checkpoints")
    run.set_defaults(demo=False)
    demo = add_command(commands, "demo", _execute, "see a job scaled, killed and recovering", _DEMO)
    demo.add_argument("file", nargs="?", default="examples/digits.yaml", metavar="FILE", help="default: %(default)s")
    demo.set_defaults(demo=True, resume=None)
    for parser in (run, demo):
        parser.add_argument(
            "--plain", action="store_true", help="plain lines and no live view (default without a terminal)"
        )


def choose_view(*, plain: bool, command: str, output: TextIO, environ: Mapping[str, str]) -> View:
    """Return the live view if the output is a terminal that can show it, else plain lines."""
    from elastic_operator.local.view import LiveView, View

    if plain or not is_terminal(output, environ):
        return View(output, command)
    from rich.console import Console

    return LiveView(Console(file=output, highlight=False), command)


def _execute(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from elastic_operator.cli.demo import perform
    from elastic_operator.local.run import RunRequest
    from elastic_operator.local.run_dir import home_dir
    from elastic_operator.local.runner import run_job
    from elastic_operator.local.view import own_command
    from elastic_operator.manifest.loader import load_checked

    request = RunRequest(
        manifest=load_checked(Path(arguments.file)),
        home=home_dir(os.environ),
        environ=os.environ,
        resume=arguments.resume,
    )
    command = own_command(sys.argv[0], os.environ)
    with choose_view(plain=arguments.plain, command=command, output=sys.stdout, environ=os.environ) as view:
        if arguments.demo:
            outcome, code, lines = asyncio.run(perform(request, view))
        else:
            code = asyncio.run(run_job(request, on_snapshot=view.on_snapshot, on_ending=view.on_ending))
            outcome, lines = code, []
    view.say_outcome(outcome)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return code
