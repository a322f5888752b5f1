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

_LONGEST_PAUSE: Final = 30.0
"""Seconds after which one is started again at the latest where none lives for long."""


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
        self._pause = 0.0
        self._later: asyncio.TimerHandle | None = None
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
        except OSError:
            os.close(self._pipe)
            self._pipe = -1
            raise
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
        if self._later is not None:
            self._later.cancel()
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
        if asyncio.get_running_loop().time() - self._started >= _STEADY:
            self._pause = 0.0
            self._start_again()
        else:
            self._rest("died as soon as it was started")

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:
            self._rest(f"cannot be started: {error.strerror}")

    def _rest(self, why: str) -> None:
        """Try it later, and later each time."""
        if self._pause == 0.0:
            logger.error(
                "The process that guards the workers %s. Until another one lives, what they have started may go on "
                "where this agent is killed.",
                why,
            )
        self._pause = min(max(2 * self._pause, _STEADY), _LONGEST_PAUSE)
        self._later = asyncio.get_running_loop().call_later(self._pause, self._start_again)
