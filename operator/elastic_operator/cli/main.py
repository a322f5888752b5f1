"""The ``elasticjob`` command: parses the command line, and turns errors into an exit code and a sentence.

Exit codes: 0 success (``run``: the job succeeded), 1 failure (``run``: the job failed, or the output cannot be
written), 2 bad input, 3 the job was deleted, 130 interrupted, 141 the reader of the output has exited.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import SupportsWrite

FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_OUTPUT_ERRORS: Final = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}
"""Error numbers that mean that the output cannot be written; errors of other files are caught where they occur."""

_UNWRITABLE: Final = "cannot write the output: {}; redirect it elsewhere"

_DESCRIPTION = """\
Run elastic PyTorch training jobs on this machine from Kubernetes manifests. Show and control jobs on this machine or,
with -n, --context or --kubeconfig, on a cluster.
"""
_EXAMPLES = """\
examples:
  elasticjob run examples/digits.yaml      run a job; Ctrl-C ends it
  elasticjob get                           (in a second terminal) list the jobs
  elasticjob scale digits --replicas 3     change its size while it trains
  elasticjob top digits                    show where its time goes, and the progress of each rank
  elasticjob suspend digits                delete its pods; `elasticjob resume digits` continues it
  elasticjob logs digits --rank 0 -f       follow the output of one rank
  elasticjob report digits                 write an HTML report about it
  elasticjob demo                          scale a job and kill its processes, to show how it recovers
  elasticjob get -n team                   list jobs on a cluster; all commands but run and demo take -n

`elasticjob COMMAND --help` describes a command.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that reports an invalid command line in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"elasticjob: {message}; see `{self.prog} --help`\n")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # The inherited method ignores write errors.
        (sys.stdout if file is None else file).write(self.format_help())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from elastic_operator.cli import commands

    whole: argparse.ArgumentParser = _Parser(
        prog="elasticjob",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    added = whole.add_subparsers(title="commands", metavar="COMMAND")
    commands.add_to(added)
    commands.add_command(
        added, "version", _version, "print the version", "Print the version of elasticjob, Python and torch."
    )
    return whole


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"elasticjob {_installed('elastic-operator')}\n")
    sys.stdout.write(f"python {platform.python_version()}\n")
    sys.stdout.write(f"torch {_installed('torch')}\n")
    return 0


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "is not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Execute a command line (by default this process's own), and return its exit code."""
    if sys.stdout is None:
        return _complain(_UNWRITABLE.format(os.strerror(errno.EBADF)), FAILED)
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        if isinstance(cause, BrokenPipeError):
            _discard_output()
            return BROKEN_PIPE
        if isinstance(cause, OSError) and cause.errno in _OUTPUT_ERRORS:
            _discard_output()
            return _complain(_UNWRITABLE.format(cause.strerror), FAILED)
        error.add_note("This is a bug in elasticjob: please report it with all of the above.")
        raise


def _discard_output() -> None:
    """Discard buffered output, which the interpreter would otherwise write at its exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: Sequence[str] | None) -> int:
    from elastic_operator.cli.commands import is_on_cluster
    from elastic_operator.errors import BadInput, ElasticJobError

    top = parser()
    arguments = top.parse_args(argv)
    if not hasattr(arguments, "execute"):
        top.print_help()
        return 0
    if sys.platform != "linux" and not is_on_cluster(arguments):
        why = "jobs can be run on Linux only; on another system, use a Linux machine or container, or name a cluster"
        return _complain(why, BAD_INPUT)
    try:
        return int(arguments.execute(arguments))
    except BadInput as error:
        return _complain(str(error), BAD_INPUT)
    except ElasticJobError as error:
        return _complain(str(error), FAILED)


def _complain(sentence: str, code: int) -> int:
    sys.stderr.write(f"elasticjob: {sentence}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
