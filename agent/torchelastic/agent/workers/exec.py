"""Start a program in a new interpreter, or a command: the first steps of such a worker, before the program replaces it.

posix_spawn cannot do these steps, so this is a small program of its own. Its arguments: the agent's process id, then
the program and its arguments.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from torchelastic.agent import error_file
from torchelastic.agent.workers.linux import close_fds, set_parent_death_signal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def python_command(
    kind: str, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str]]:
    """The command that runs a script or module in a new interpreter, and its environment: output is not buffered."""
    module = ["-m"] if kind == "module" else []
    return [sys.executable, *module, *argv], {"PYTHONUNBUFFERED": "1", **environment}


def main() -> None:
    """End with the agent, and execute the program."""
    agent, argv = int(sys.argv[1]), sys.argv[2:]
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        sys.exit(1)
    execute(argv, os.environ)


def execute(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program that has nothing open but the standard streams."""
    close_fds(3)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # changed by the interpreter
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], [*argv], environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = f"{argv[0]}: " + (
            "there is no such command" if missing else f"it cannot be executed: {error.strerror}"
        )
        error_file.write_message(message)
        sys.stderr.write(f"{message}\n")
        sys.exit(_NOT_FOUND if missing else _NOT_EXECUTABLE)
