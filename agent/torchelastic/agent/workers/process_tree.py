"""Linux processes: the table in /proc, the attributes that a process sets on itself, and the watchdog.

A worker's process tree contains all processes that must exit with it. Three properties identify them, because a process
can lose any one of the three: its ancestry (lost when a parent in between exits), its session (lost with setsid), and a
mark in its initial environment (lost when the environment is cleared).

The watchdog kills these trees when the agent exits for any reason. The kernel kills the workers themselves, by their
parent-death signal, but not the processes that they have started. The watchdog watches the agent through a pidfd, and
reads the workers' sessions from a file. The watchdog imports only this module, which imports no large module.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import struct
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TREE_MARK: Final = "TORCHELASTIC_PROCESS_TREE"
"""The environment variable that marks the processes of an agent's workers."""

TITLE_ROOM: Final = " " * 512
"""An argument that reserves space for :func:`set_title` in forked processes."""

SESSIONS: Final = "sessions"
"""The name of the file with the workers' sessions."""

CLEANUP_TIMEOUT: Final = 2.0
"""Seconds that helpers of killed processes get to remove shared memory."""

_SHARED_MEMORY_HELPER: Final = re.compile(rb"\.resource_tracker import main|torch_shm_manager\0")
"""Matches the command lines of the resource trackers of Python and loky, and of torch's manager."""

_KILL_TIMEOUT: Final = 10.0
_SET_PARENT_DEATH_SIGNAL: Final = 1
_SET_CHILD_SUBREAPER: Final = 36

_SET_MEMORY_MAP: Final = (35, 14)
"""PR_SET_MM and PR_SET_MM_MAP, which needs no privilege."""

_CODE: Final = 22
_DATA: Final = 41
"""Indexes of the first address of the code and of the data in /proc/self/stat, counted after the state."""

_MEMORY_SIZE: Final = 20
_ENVIRONMENT: Final = 47
"""Indexes of the size of the memory, and of the first address of the environment, counted from the state."""

_EXECUTE_TIMEOUT: Final = 1.0


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process at the time when the table was read.

    Attributes:
        state: the kernel's letter for the state of the process.
        started: the start time in clock ticks since boot; the id and the start time together identify a process.
    """

    pid: int
    parent: int
    session: int
    state: str
    started: int

    @property
    def dead(self) -> bool:
        """Whether the process has exited and waits to be reaped."""
        return self.state in "ZX"


Table = dict[int, ProcessEntry]


def read_process(pid: int) -> ProcessEntry | None:
    """Return the process with this id; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - faster, for hundreds of processes
            text = file.read(4096) or b""
    except OSError:
        return None
    # The second field is the command's name in parentheses, which may contain parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessEntry(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):  # the process has been reaped, or belongs to another user
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def handles(pid: int, number: int) -> bool:
    """Return whether a process has its own handler for a signal."""
    caught = re.search(rb"^SigCgt:\s*([0-9a-f]+)$", _read(pid, "status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def read_table() -> Table:
    """Return all visible processes by id."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - only names are needed
        if name.isdigit() and (entry := read_process(int(name))) is not None:
            table[entry.pid] = entry
    return table


def has_mark(pid: int, mark: str) -> bool:
    """Return whether a process was started with this mark.

    A process that executes a new program (execve) has no environment for a moment, which is waited for.
    """
    until = time.monotonic() + _EXECUTE_TIMEOUT
    with contextlib.suppress(OSError):  # the process has been reaped, or belongs to another user
        while not (environment := Path(f"/proc/{pid}/environ").read_bytes()) and time.monotonic() < until:
            fields = _read(pid, "stat").rpartition(b")")[2].split()
            if not fields or fields[_MEMORY_SIZE] == b"0" or b"0" != fields[_ENVIRONMENT] == fields[_ENVIRONMENT + 1]:
                return False  # the process has exited, or its environment is empty
        return f"{TREE_MARK}={mark}".encode() in environment.split(b"\0")
    return False


def removes_shared_memory(pid: int) -> bool:
    """Return whether a process removes what its clients leave in shared memory, and exits after they have exited."""
    return _SHARED_MEMORY_HELPER.search(_read(pid, "cmdline")) is not None


def with_descendants(table: Mapping[int, ProcessEntry], roots: Iterable[int]) -> set[int]:
    """Return the roots that are in the table, and all their descendants."""
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


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this signal to the calling process when its current parent exits.

    This setting survives exec; children do not inherit it.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(number))


def set_subreaper(*, on: bool) -> None:
    """Make orphaned descendants children of the calling process, as if it were PID 1."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(on))


def _prctl(option: int, argument: ctypes.c_ulong) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def close_fds(first: int) -> None:
    """Close all open descriptors from this number on; the limit may be too high to try each number."""
    for link in [*Path("/proc/self/fd").iterdir()]:
        if int(link.name) >= first:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(link.name))


# setproctitle is unsuitable: it joins the arguments, and overwrites the environment, which contains the mark.


def set_title(argv: Sequence[str]) -> None:
    """Set the command line that /proc shows, cut to the available space: the kernel's arguments end where it ends."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the command's name in parentheses, which may contain any character; the third is a letter.
    numbers = [int(field) for field in text[text.rindex(")") + 4 :].split()]
    code, code_end, stack = numbers[_CODE : _CODE + 3]
    data, data_end, heap, start, _, end, end_of_environment = numbers[_DATA : _DATA + 7]
    room = end - start  # the environment follows the arguments
    if room > 0:
        title = b"\0".join(argument.encode(errors="surrogateescape") for argument in argv)[: room - 1] + b"\0"
        ctypes.memmove(start, title.ljust(room, b"\0"), room)
        libc = ctypes.CDLL(None)
        libc.sbrk.restype = ctypes.c_ulong
        map_ = struct.pack(
            *("12Q2I", code, code_end, data, data_end, heap, libc.sbrk(ctypes.c_long(0)), stack),
            *(start, start + len(title), end, end_of_environment, 0, 0, 0xFFFFFFFF),
        )
        # Where the kernel refuses this, empty arguments follow.
        libc.prctl(*_SET_MEMORY_MAP, map_, ctypes.c_ulong(len(map_)), ctypes.c_ulong(0))


# -- the watchdog


def main() -> None:
    """Wait for the agent's exit. Arguments: the agent's process id, the tree mark, and folders to remove afterwards."""
    agent, mark, folders = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    set_title(["torchelastic: watchdog"])
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(agent)
        if os.getppid() == agent:
            select.select([pidfd], [], [])
    _kill_trees(mark, _read_sessions(Path(folders[0])))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _read_sessions(folder: Path) -> Mapping[int, int]:
    """Return the ids of the workers' sessions with the start times of their leaders."""
    with contextlib.suppress(OSError, ValueError):
        return {int(session): started for session, started in json.loads((folder / SESSIONS).read_bytes()).items()}
    return {}


def _kill_trees(mark: str, sessions: Mapping[int, int]) -> None:
    killed: set[int] = set()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _KILL_TIMEOUT and (living := _living(mark, sessions)):
        chosen = [pid for pid in living if passed > CLEANUP_TIMEOUT or not removes_shared_memory(pid)]
        if killed.issuperset(chosen):
            time.sleep(0.01)
        for pid in chosen:
            if pid not in killed:
                with contextlib.suppress(OSError):  # the process has exited, or runs as another user
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)


def _living(mark: str, sessions: Mapping[int, int]) -> list[int]:
    table = read_table()
    marked = {pid for pid in table if has_mark(pid, mark)}
    # The id of an ended session may be reused by another session, whose leader has another start time.
    ours = {pid for pid, started in sessions.items() if pid not in table or table[pid].started == started}
    roots = [entry.pid for entry in table.values() if entry.pid in marked or entry.session in marked | ours]
    return [pid for pid in with_descendants(table, roots) if not table[pid].dead]
