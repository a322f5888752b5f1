"""Which processes there are and whose they are, read from /proc in one pass.

A worker's *tree* is everything that has to end with it. Three things tell it, since a process can shed any one of them:
its descent (lost when a parent in between dies), its session (lost with setsid) and a mark in the environment that it
was started with (lost when the environment is emptied).
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TREE_MARK: Final = "TORCHELASTIC_PROCESS_TREE"
"""The environment variable that marks all processes of an agent's workers: ``<agent>``, or ``<agent>.<worker>``."""

_ENVIRONMENT_LIMIT: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process, as it was when the table was read.

    Attributes:
        pid: its id.
        parent: the id of its parent.
        session: the id of its session.
        dead: it has ended, and waits to be reaped.
        started: when it was started, in clock ticks since boot; with the id it names a process for all time.
    """

    pid: int
    parent: int
    session: int
    dead: bool
    started: int


Table = dict[int, ProcessEntry]


def read_process(pid: int) -> ProcessEntry | None:
    """The process with this id, or None if there is none."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 4096)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    # The second field is the command's name in parentheses, which may hold anything, parentheses included.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessEntry(
        pid=pid, parent=int(fields[1]), session=int(fields[3]), dead=fields[0] in b"ZX", started=int(fields[19])
    )


def read_table() -> Table:
    """All processes that can be seen."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed, of hundreds of processes
        if name.isdigit() and (entry := read_process(int(name))) is not None:
            table[entry.pid] = entry
    return table


def read_mark(pid: int) -> str:
    """The mark in the environment with which the process was started, or an empty string."""
    wanted = f"{TREE_MARK}=".encode()
    for variable in _environment(pid).split(b"\0"):
        if variable.startswith(wanted):
            return variable[len(wanted) :].decode(errors="replace")
    return ""


def _environment(pid: int) -> bytes:
    found = b""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(found) < _ENVIRONMENT_LIMIT and (more := os.read(descriptor, 1 << 16)):
                found += more
        finally:
            os.close(descriptor)
    return found


def carries(mark: str, owner: str) -> bool:
    """Whether a process with this mark belongs to the owner: an agent, or one of its workers."""
    return mark == owner or mark.startswith(f"{owner}.")


def with_descendants(table: Mapping[int, ProcessEntry], roots: Iterable[int]) -> set[int]:
    """The roots that are in the table and all that descend from them."""
    children = defaultdict(list)
    for entry in table.values():
        children[entry.parent].append(entry.pid)
    found: set[int] = set()
    pending = [pid for pid in roots if pid in table]
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending.extend(children[pid])
    return found
