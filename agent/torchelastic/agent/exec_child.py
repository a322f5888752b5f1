"""The first steps of a worker that is executed rather than forked; then the program takes its place.

A separate, tiny program, since none of this can be asked of posix_spawn. Arguments: the agent's process id, and the
program with its arguments. A worker that was forked, and finds that it should not have been, ends up here too.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from torchelastic.agent import error_file, prctl
from torchelastic.agent.inherited import close_inherited

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def python_program(
    kind: str, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str]]:
    """The command that runs a Python program, and the environment in which its progress is seen while it is made.

    Args:
        kind: script or module.
        argv: the script or module, and its arguments.
        environment: the environment that it should have.
    """
    module = ["-m"] if kind == "module" else []
    return [sys.executable, *module, *argv], {"PYTHONUNBUFFERED": "1", **environment}


def main() -> None:
    """Tie the process to the agent's life and execute the program."""
    agent, argv = int(sys.argv[1]), sys.argv[2:]
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        sys.exit(1)
    become(argv, os.environ)


def become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Execute a program in the place of this process, with nothing but its standard streams open."""
    close_inherited(3)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # what the interpreter itself has changed
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], [*argv], environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "there is no such command" if missing else f"it cannot be executed: {error.strerror}"
        message = f"{argv[0]}: {reason}"
        error_file.write_message(message)
        sys.stderr.write(f"{message}\n")
        sys.exit(_NOT_FOUND if missing else _NOT_EXECUTABLE)
