"""The agent's side of the guard: it is started first, told what there is, and started anew if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING, Final

from torchelastic.agent.processes import python_code, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchelastic.agent.processes import Child, Reaper

logger = logging.getLogger(__name__)

_STEADY: Final = 0.5
"""Seconds of life after which a guard's death is somebody's doing and not its own."""


class Guard:
    """The process that ends the workers' trees if this one dies.

    Args:
        reaper: which gets to know the guard.
        mark: the mark in the environment of all that belongs to the workers.
        folders: to be removed with them.
    """

    def __init__(self, reaper: Reaper, mark: str, folders: Sequence[Path]) -> None:
        self._reaper = reaper
        self._mark = mark
        self._folders = folders
        self._workers: set[int] = set()
        self._child: Child
        self._started = 0.0
        self._pipe = -1
        self._closed = False

    def start(self) -> None:
        """Start the process, and again whenever it ends."""
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        command = python_code("torchelastic.agent.guard", minimal=True)
        try:
            pid = spawn(
                [*command, str(os.getpid()), self._mark, *map(str, self._folders)],
                {},
                {0: reading, 1: 2, 2: 2},
            )
        finally:
            os.close(reading)
        self._started = asyncio.get_running_loop().time()
        self._child = self._reaper.adopt(pid)
        self._child.ended.add_done_callback(self._ended)
        for worker in self._workers:
            self._tell(f"+{worker}")

    def add(self, pid: int) -> None:
        """A worker was started."""
        self._workers.add(pid)
        self._tell(f"+{pid}")

    def remove(self, pid: int) -> None:
        """A worker and its tree are gone."""
        self._workers.discard(pid)
        self._tell(f"-{pid}")

    async def close(self) -> None:
        """End the guard: nothing is left to be guarded."""
        self._closed = True
        self._child.signal(signal.SIGKILL)
        await self._child.ended

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it is dead, and its successor is told everything
            os.write(self._pipe, f"{line}\n".encode())

    def _ended(self, _: asyncio.Future[int]) -> None:
        os.close(self._pipe)
        self._pipe = -1
        if self._closed:
            return
        if asyncio.get_running_loop().time() - self._started < _STEADY:
            logger.error(
                "The process that guards the workers cannot live: should this agent be killed, they may go on."
            )
            return
        self.start()
