"""The first steps of a worker that is executed rather than forked; then the program takes its place.

A separate, tiny program, since none of this can be asked of posix_spawn. Arguments: the agent's process id, and the
program with its arguments.
"""

from __future__ import annotations

import os
import signal
import sys

from torchelastic.agent import error_file, prctl
from torchelastic.agent.inherited import close_inherited

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def main() -> None:
    """Tie the process to the agent's life and execute the program."""
    agent, argv = int(sys.argv[1]), sys.argv[2:]
    close_inherited(3)
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # what the interpreter itself has changed
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "there is no such command" if missing else f"it cannot be executed: {error.strerror}"
        message = f"{argv[0]}: {reason}"
        error_file.write_message(message)
        sys.stderr.write(f"{message}\n")
        sys.exit(_NOT_FOUND if missing else _NOT_EXECUTABLE)
