"""The guard: a small process that ends the workers' trees when the agent dies, however it dies.

The kernel ends the workers themselves (their parent-death signal), but not what they have started: that is not passed
on to children. The guard imports nothing large, and depends on neither the agent nor the fork server: it watches the
agent's own process, not a pipe that some other process may hold open.

It reads lines from its standard input: ``+PID`` and ``-PID``, the workers that there are.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

from torchelastic.agent import process_table
from torchelastic.agent.title import set_title

if TYPE_CHECKING:
    from collections.abc import Collection

_PATIENCE = 10.0


def main() -> None:
    """Wait for the agent's end. Arguments: the agent's process id, the mark of its processes, folders to be removed."""
    agent, mark, folders = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
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
    end(mark, watched.workers)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


class Watched:
    """The workers that the agent has told of."""

    def __init__(self) -> None:
        self.workers: set[int] = set()
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
                (self.workers.add if line.startswith(b"+") else self.workers.discard)(int(line[1:]))


def end(mark: str, workers: Collection[int]) -> None:
    """Kill all that belongs to the agent's workers until nothing is left."""
    for worker in workers:  # at once what can be named without looking
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    dying: dict[int, int] = {}
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and (living := _living(mark, workers)):
        found = [pid for pid in living if pid not in dying]
        for pid in found:
            with contextlib.suppress(OSError):  # it is another user's now, or gone
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                dying[pid] = os.pidfd_open(pid)
        if not found:  # nor has any of them started another one since: the processors are theirs, to end on
            _await(dying, deadline)


def _living(mark: str, workers: Collection[int]) -> list[int]:
    table = process_table.read_table()
    roots = [
        entry.pid
        for entry in table.values()
        if entry.session in workers or process_table.carries(process_table.read_mark(entry.pid), mark)
    ]
    return [pid for pid in process_table.with_descendants(table, roots) if not table[pid].dead]


def _await(dying: dict[int, int], deadline: float) -> None:
    """Wait until these processes, given with their pidfds, are dead."""
    poll = select.poll()
    pids = {pidfd: pid for pid, pidfd in dying.items()}
    for pidfd in pids:
        poll.register(pidfd, select.POLLIN)
    while dying and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            os.close(pidfd)
            del dying[pids[pidfd]]
