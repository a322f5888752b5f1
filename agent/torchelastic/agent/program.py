"""What a program is, given the command that would start it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.settings import Program, ProgramKind, StartMethod

if TYPE_CHECKING:
    from collections.abc import Sequence


def program_of_command(argv: Sequence[str], start_method: StartMethod = StartMethod.FORK_SERVER) -> Program:
    """The program that a command line starts.

    ``python x.py …`` and ``python -m x …`` are Python programs like any other; whatever else is a command. So is an
    interpreter with flags of its own, or one of another path or version than this one: it is executed as it stands.

    Args:
        argv: the command and its arguments.
        start_method: how a Python program is to be started.
    """
    command, *rest = argv
    if rest and _is_this_python(command):
        if rest[0] == "-m" and len(rest) > 1:
            return Program(ProgramKind.MODULE, tuple(rest[1:]), start_method)
        if not rest[0].startswith("-"):
            return Program(ProgramKind.SCRIPT, tuple(rest), start_method)
    return Program(ProgramKind.COMMAND, tuple(argv), start_method)


def _is_this_python(command: str) -> bool:
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    return command in names or ("/" in command and Path(command) == Path(sys.executable))
