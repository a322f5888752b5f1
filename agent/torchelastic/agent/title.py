"""How a forked process appears to others: as the command that would have started it, and with its mark.

What /proc shows of both is the memory in which the kernel laid down the arguments and the environment that the *fork
server* was started with. The interpreter has long made copies of its own, so parts of it can be written over.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.agent.process_table import TREE_MARK

if TYPE_CHECKING:
    from collections.abc import Sequence

MARK_ROOM: Final = "." + "-" * 60
"""What is put behind the fork server's own mark, so that there is room for any worker's."""

_ARGUMENTS: Final = 47
_ENVIRONMENT: Final = 49
"""Fields of /proc/self/stat, counted from 0: where each begins; the next one says where it ends."""


def set_title(argv: Sequence[str]) -> None:
    """Write another command line over this process's own, as far as there is room for it."""
    start, end = _region(_ARGUMENTS)
    room = end - start
    if room > 0:
        title = b"\0".join(argument.encode(errors="surrogateescape") for argument in argv)[: room - 1]
        ctypes.memmove(start, title.ljust(room, b"\0"), room)


def set_mark(mark: str) -> None:
    """Write a worker's mark over that of the fork server, for the processes that the worker forks.

    Only this one variable is written over: a library may have kept the address of any other one's value.
    """
    start, end = _region(_ENVIRONMENT)
    block = b"\0" + ctypes.string_at(start, max(end - start, 0))
    name = f"{TREE_MARK}=".encode()
    at = block.find(b"\0" + name)
    if at < 0:
        return
    room = block.index(b"\0", at + 1) - at - 1 - len(name)
    ctypes.memmove(start + at + len(name), mark.encode()[:room].ljust(room, b"\0"), room)


def _region(field: int) -> tuple[int, int]:
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the command's name in parentheses, which may hold anything.
    fields = ["", "", *text[text.rindex(")") + 2 :].split()]
    return int(fields[field]), int(fields[field + 1])
