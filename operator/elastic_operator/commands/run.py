"""``elasticjob run``: one job on this machine, from its manifest to its exit code."""

from __future__ import annotations

import argparse
import os
import sys

_EXAMPLES = """\
examples:
  elasticjob run examples/digits.yaml
  elasticjob run --resume digits-20260102-101500-3fa2 examples/digits.yaml

While it goes on, saving the changed file does what `kubectl apply` would.
Exit codes: 0 succeeded, 1 failed, 2 bad input, 3 deleted, 130 interrupted.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        help="run a job on this machine until it has ended",
        description="Run the ElasticJob of a manifest on this machine until it has ended. Ctrl-C ends it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the manifest, the same that `kubectl apply` takes")
    parser.add_argument("--resume", metavar="RUN", help="go on with an earlier run: its folder and its checkpoints")
    parser.add_argument(
        "--plain", action="store_true", help="plain lines and no live view (default without a terminal)"
    )
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from elastic_operator.local.hints import own_hints
    from elastic_operator.local.run import RunRequest, run_job
    from elastic_operator.local.run_folder import home_folder
    from elastic_operator.local.view import choose_view
    from elastic_operator.manifest import load_checked

    request = RunRequest(
        manifest=load_checked(Path(arguments.file)),
        home=home_folder(os.environ),
        environ=os.environ,
        resume=arguments.resume,
    )
    hints = own_hints(sys.argv[0], os.environ)
    with choose_view(plain=arguments.plain, hints=hints, output=sys.stdout, environ=os.environ) as view:
        code = asyncio.run(run_job(request, observer=view))
    view.say_outcome(code)
    return code
