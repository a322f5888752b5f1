"""The processes of a benchmark: all of them are known, and none outlives it, however it ends.

Whatever a benchmark starts leads a session of its own. What loses its parent becomes the benchmark's child, so all that
there is can be found below it. The watchdog of the agent ends everything and removes the
folder should the benchmark itself be killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torchelastic.agent.workers.linux import TREE_MARK, ProcessEntry, read_table, with_descendants
from torchelastic.agent.workers.processes import Reaper, spawn
from torchelastic.agent.workers.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchelastic.agent.workers.linux import Table
    from torchelastic.agent.workers.processes import Child


class Household:
    """All processes of a benchmark and a folder for their files; an async context manager that ends and removes them.

    Attributes:
        folder: for whatever files are needed.
        scratch: a folder in it, where all processes make their temporary files.
    """

    def __init__(self) -> None:
        self.folder: Path
        self.scratch: Path
        self._mark = secrets.token_hex(8)
        self._reaper = Reaper(owns_process=True)
        self._stack = AsyncExitStack()
        self._guard: Watchdog
        self._guards: set[int] = set()
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.scratch = self.folder / "tmp"
            self.scratch.mkdir()
            stack.enter_context(self._reaper)
            self._guard = Watchdog(self._reaper, self._mark, [self.folder])
            self._guard.start()
            self._guards = {entry.pid for entry in read_table().values() if entry.parent == os.getpid()}
            stack.push_async_callback(self._guard.close)
            stack.push_async_callback(self.end_all)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def start(self, argv: Sequence[str], output: Path, env: Mapping[str, str] | None = None) -> Child:
        """Start a process.

        Args:
            argv: a program, looked up on PATH unless it is a path, and its arguments.
            output: the file to which its output is added.
            env: laid over this process's own environment.
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
        """These processes and all their descendants, the dead included; with none given, all that was started here."""
        table = read_table()
        return {pid: table[pid] for pid in with_descendants(table, self._roots(table) if roots is None else roots)}

    def living(self, roots: Iterable[int] | None = None) -> dict[int, ProcessEntry]:
        """The same without the dead."""
        return {pid: entry for pid, entry in self.all(roots).items() if not entry.dead}

    async def end_all(self) -> None:
        """Kill all that lives."""
        await self._reaper.kill_trees(self._children, self._mark)

    def _roots(self, table: Table) -> list[int]:
        return [entry.pid for entry in table.values() if entry.parent == os.getpid() and entry.pid not in self._guards]
