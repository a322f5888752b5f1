"""What ``ps`` shows for a forked process: the command that would have started it, not that of the fork server."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_ARGUMENTS_START: Final = 47
_ARGUMENTS_END: Final = 48
"""Fields of /proc/self/stat, counted from 0."""


def set_title(argv: Sequence[str]) -> None:
    """Write another command line over this process's own, as far as there is room for it.

    The arguments that the process was started with stand there; the interpreter has long made copies of them.
    """
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the command's name in parentheses, which may hold anything.
    fields = ["", "", *text[text.rindex(")") + 2 :].split()]
    start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
    if not 0 < start < end:
        return  # the kernel does not tell
    title = b"\0".join(argument.encode(errors="surrogateescape") for argument in argv)[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
