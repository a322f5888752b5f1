"""The processes of a benchmark, which all end with the benchmark.

Each started process leads its own session. Orphans become children of the benchmark, so all processes are its
descendants. If the benchmark itself is killed, a watchdog kills the processes and removes the folder.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.agent.workers.process_tree import TREE_MARK, ProcessEntry, read_table, with_descendants
from torchelastic.agent.workers.processes import Reaper, Watchdog, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchelastic.agent.workers.process_tree import Table
    from torchelastic.agent.workers.processes import Child


_POLL: Final = 0.005


async def until(condition: Callable[[], bool], limit: float, what: str) -> None:
    """Wait until a condition holds; look every 5 ms.

    Raises:
        TimeoutError: the condition does not hold within `limit` seconds; `what` says what is missing.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {limit:g} s")
        await asyncio.sleep(_POLL)


class ProcessTree:
    """All processes of a benchmark and a folder for their files; an async context manager that removes both.

    Attributes:
        folder: the folder for all files.
        scratch: the subfolder for the temporary files of the processes.
    """

    def __init__(self) -> None:
        self.folder: Path
        self.scratch: Path
        self._mark = secrets.token_hex(8)
        self._reaper = Reaper(owns_process=True)
        self._stack = AsyncExitStack()
        self._watchdog: Watchdog
        self._watchdog_pids: set[int] = set()
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.scratch = self.folder / "tmp"
            self.scratch.mkdir()
            await stack.enter_async_context(self._reaper)
            self._watchdog = Watchdog(self._reaper, self._mark, [self.folder])
            self._watchdog.start()
            self._watchdog_pids = {entry.pid for entry in read_table().values() if entry.parent == os.getpid()}
            stack.push_async_callback(self.end_all)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def start(self, argv: Sequence[str], output: Path, env: Mapping[str, str] | None = None) -> Child:
        """Start a process.

        Args:
            argv: a program (a path, or a name on PATH) and its arguments.
            output: the file to which the program's output is appended.
            env: variables that are added to a copy of this process's environment.
        """
        environment = {**os.environ, "TMPDIR": str(self.scratch), **(env or {}), TREE_MARK: self._mark}
        program = shutil.which(argv[0])
        if program is None:
            raise FileNotFoundError(f"there is no program {argv[0]}")
        with Path(os.devnull).open("rb") as nothing, output.open("ab") as log:
            pid = spawn([program, *argv[1:]], environment, {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()})
        child = self._reaper.adopt(pid)
        self._children.append(child)
        return child

    def all(self, roots: Iterable[int] | None = None) -> dict[int, ProcessEntry]:
        """Return the ``roots`` and their descendants, including zombies; without roots, the whole benchmark's."""
        table = read_table()
        return {pid: table[pid] for pid in with_descendants(table, self._roots(table) if roots is None else roots)}

    def living(self, roots: Iterable[int] | None = None) -> dict[int, ProcessEntry]:
        """Return the same as :meth:`all`, without zombies."""
        return {pid: entry for pid, entry in self.all(roots).items() if not entry.dead}

    async def end_all(self) -> None:
        """Kill all processes."""
        await self._reaper.kill_trees(self._children, self._mark)

    def _roots(self, table: Table) -> list[int]:
        return [
            entry.pid
            for entry in table.values()
            if entry.parent == os.getpid() and entry.pid not in self._watchdog_pids
        ]
