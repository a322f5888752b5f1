"""The process of the watchdog: it ends the workers' process trees when the agent dies, however it dies.

The kernel ends the workers themselves (their parent-death signal), but not the processes that they have started. The
watchdog imports nothing large, watches the agent through a pidfd, and finds those processes by their mark and by their
session, which the agent writes to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.agent.workers.linux import has_mark, read_table, set_title, with_descendants

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSIONS: Final = "sessions"
"""The name of the file."""

_KILL_TIMEOUT: Final = 10.0


def main() -> None:
    """Wait for the agent's end. Arguments: the agent's process id, the tree mark, and folders to be removed then."""
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
    deadline = time.monotonic() + _KILL_TIMEOUT
    while time.monotonic() < deadline and (living := _living(mark, sessions)):
        if killed.issuperset(living):
            time.sleep(0.01)
        for pid in living:
            if pid not in killed:
                with contextlib.suppress(OSError):  # it has ended, or runs as another user
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)


def _living(mark: str, sessions: Mapping[int, int]) -> list[int]:
    table = read_table()
    marked = {pid for pid in table if has_mark(pid, mark)}
    # The id of a session that has ended may belong to another one, with another leader.
    ours = {pid for pid, started in sessions.items() if pid not in table or table[pid].started == started}
    roots = [entry.pid for entry in table.values() if entry.pid in marked or entry.session in marked | ours]
    return [pid for pid in with_descendants(table, roots) if not table[pid].dead]
