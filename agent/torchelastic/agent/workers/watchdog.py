"""The watchdog: a small process that ends the workers' process trees when the agent dies, however it dies.

The kernel ends the workers themselves (their parent-death signal), but not the processes that they have started. The
watchdog's process imports nothing large, and watches the agent through a pidfd. It reads lines from its standard
input: ``+PID`` when a worker starts, and ``-PID`` when a worker and its tree are gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Final

from torchelastic.agent.workers.linux import has_mark, read_table, set_title, with_descendants

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from torchelastic.agent.workers.processes import Child, Reaper

_KILL_TIMEOUT: Final = 10.0
_RESTART_DELAY: Final = 0.2
_CHUNK: Final = 1 << 16


class Watchdog:
    """The agent's side: starts the process, tells it the workers, and restarts it if it dies.

    Args:
        reaper: adopts the process.
        mark: the tree mark of all workers.
        folders: to be removed after the agent's death.
    """

    def __init__(self, reaper: Reaper, mark: str, folders: Sequence[Path]) -> None:
        self._reaper = reaper
        self._mark = mark
        self._folders = folders
        self._workers: set[int] = set()
        self._child: Child
        self._pipe = -1
        self._restart: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process; it is restarted whenever it ends."""
        from torchelastic.agent.workers.processes import python_code, spawn

        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        command = python_code(__name__, minimal=True)
        try:
            pid = spawn(
                [*command, str(os.getpid()), self._mark, *map(str, self._folders)], {}, {0: reading, 1: 2, 2: 2}
            )
        except OSError:
            os.close(self._pipe)
            self._pipe = -1
            raise
        finally:
            os.close(reading)
        self._child = self._reaper.adopt(pid)
        self._child.ended.add_done_callback(self._ended)
        for worker in self._workers:
            self._write(f"+{worker}")

    def add(self, pid: int) -> None:
        """A worker has started."""
        self._workers.add(pid)
        self._write(f"+{pid}")

    def remove(self, pid: int) -> None:
        """A worker and its tree are gone."""
        self._workers.discard(pid)
        self._write(f"-{pid}")

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        self._child.signal(signal.SIGKILL)
        await self._child.ended

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a new process gets all lines
            os.write(self._pipe, f"{line}\n".encode())

    def _ended(self, ended: asyncio.Future[int]) -> None:
        os.close(self._pipe)
        self._pipe = -1
        if not self._closed:
            self._restart = ended.get_loop().call_later(_RESTART_DELAY, self._start_again, ended)

    def _start_again(self, ended: asyncio.Future[int]) -> None:
        try:
            self.start()
        except OSError:  # no process can be started for now
            self._restart = ended.get_loop().call_later(_RESTART_DELAY, self._start_again, ended)


def main() -> None:
    """Wait for the agent's end. Arguments: the agent's process id, the tree mark, and folders to be removed."""
    agent, mark, folders = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    try:
        pidfd = os.pidfd_open(agent)
    except ProcessLookupError:
        pidfd = -1
    os.set_blocking(0, False)
    set_title(["torchelastic: watchdog"])
    told = b""
    while pidfd >= 0 and os.getppid() == agent:
        ready, _, _ = select.select([pidfd, 0], [], [])
        data = os.read(0, _CHUNK) if 0 in ready else b""
        told += data
        if pidfd in ready or not data:
            break
    with contextlib.suppress(BlockingIOError):
        while data := os.read(0, _CHUNK):  # written while this process was starting
            told += data
    workers: set[int] = set()
    for line in told.split():
        (workers.add if line.startswith(b"+") else workers.discard)(int(line[1:]))
    _kill_trees(mark, workers)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _kill_trees(mark: str, workers: Collection[int]) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_TIMEOUT
    while time.monotonic() < deadline and (living := _living(mark, workers)):
        if killed.issuperset(living):
            time.sleep(0.01)
        for pid in living:
            if pid not in killed:
                with contextlib.suppress(OSError):  # it has ended, or runs as another user
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)


def _living(mark: str, workers: Collection[int]) -> list[int]:
    table = read_table()
    roots = [entry.pid for entry in table.values() if entry.session in workers or has_mark(entry.pid, mark)]
    return [pid for pid in with_descendants(table, roots) if not table[pid].dead]
