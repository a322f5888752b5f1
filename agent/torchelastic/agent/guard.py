"""The guard: a small process that ends the workers' trees when the agent dies, however it dies.

The kernel ends the workers themselves (their parent-death signal), but not what they have started: that is not passed
on to children. The guard imports nothing large, and depends on neither the agent nor the fork server: it watches the
agent's own process, not a pipe that some other process may hold open.

It reads lines from its standard input: ``+PID`` and ``-PID``, the workers that there are; ``/PATH``, a folder to be
removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

from torchelastic.agent import process_table
from torchelastic.agent.title import set_title

_PATIENCE = 10.0


def main() -> None:
    """Wait for the agent's end. Arguments: the agent's process id and the mark of its processes."""
    agent, mark = int(sys.argv[1]), sys.argv[2]
    try:
        pidfd = os.pidfd_open(agent)
    except ProcessLookupError:
        pidfd = -1
    os.set_blocking(0, False)
    set_title(["torchelastic: guard"])
    watched = Watched()
    while pidfd >= 0 and os.getppid() == agent:
        ready, _, _ = select.select([pidfd, 0], [], [])
        if not watched.read() or pidfd in ready:
            break
    watched.read()  # what was told to a guard that was still starting when the agent died
    end(mark, watched)


class Watched:
    """What the agent has told of."""

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.folders: list[str] = []
        self._rest = b""

    def read(self) -> bool:
        """Take in what was written; False when nothing more will come."""
        while True:
            try:
                data = os.read(0, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"+"):
                    self.workers.add(int(line[1:]))
                elif line.startswith(b"-"):
                    self.workers.discard(int(line[1:]))
                else:
                    self.folders.append(os.fsdecode(line))


def end(mark: str, watched: Watched) -> None:
    """Kill all that belongs to the agent's workers until nothing is left."""
    for worker in watched.workers:  # at once what can be named without looking
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        table = process_table.read_table()
        roots = [
            entry.pid
            for entry in table.values()
            if entry.session in watched.workers or process_table.carries(process_table.read_mark(entry.pid), mark)
        ]
        living = [pid for pid in process_table.with_descendants(table, roots) if not table[pid].dead]
        if not living:
            break
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    for folder in watched.folders:
        shutil.rmtree(folder, ignore_errors=True)
