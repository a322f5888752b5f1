"""Writing to the agent's own standard streams, from a thread.

So a reader that is slow stops the workers' output, and never the agent. That holds for the agent's own words too, which
go the same way where the process is the agent's: only one thread writes, so none of them comes to stand in the middle
of a long line.

Whole lines are written in pieces that the kernel does not interleave with what other processes write to the same pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import select
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_HELD_LIMIT: Final = 1 << 20

_Queue = queue.SimpleQueue[tuple[int, bytes, int] | None]
"""Descriptors and what is to be written to them, with how much of it counts as held; None at the end."""


class Console:
    """The agent's standard output and standard error, as workers' output reaches them.

    Its thread ends with :meth:`close`, or with the process.

    Args:
        carries_log: what is logged to standard error goes this way too, until it is closed.
    """

    def __init__(self, *, carries_log: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: _Queue = queue.SimpleQueue()
        self._held = 0
        self._progress = 0
        self._waiting: list[Callable[[], None]] = []
        self._over = asyncio.Event()
        self._broken: set[int] = set()
        self._carried = _handlers_to_standard_error() if carries_log else []
        for handler in self._carried:
            handler.setStream(_Words(self._queue))
        threading.Thread(target=self._write_all, name="console", daemon=True).start()

    def write(self, descriptor: int, lines: bytes) -> None:
        """Have whole lines written to a descriptor."""
        self._held += len(lines)
        self._queue.put((descriptor, lines, len(lines)))

    @property
    def full(self) -> bool:
        """Whether so much waits to be written that no more should be read."""
        return self._held > _HELD_LIMIT

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call this once when the console is no longer full."""
        self._waiting.append(resume)

    async def close(self, *, patience: float, limit: float) -> None:
        """Wait until all is written.

        Args:
            patience: seconds after which a reader that takes nothing is waited for no more.
            limit: seconds for which one that is slow is waited for at most.
        """
        for handler in self._carried:
            handler.setStream(sys.stderr)
        self._queue.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._while_it_is_read(patience)

    async def _while_it_is_read(self, patience: float) -> None:
        seen = -1
        while not self._over.is_set() and seen != self._progress:
            seen = self._progress
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), patience)

    def _written(self, size: int) -> None:
        self._held -= size
        if not self.full:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, lines, held = item
            if descriptor not in self._broken:
                try:
                    for piece in _pieces(lines):
                        _write(descriptor, piece)
                        self._progress += 1
                except OSError:  # nobody reads it any more; the workers' output is then dropped
                    self._broken.add(descriptor)
            self._tell(self._written, held)
        self._tell(self._over.set)

    def _tell(self, callback: Callable[..., None], *arguments: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)


class _Words:
    """A stream for :mod:`logging`. What is written there by any thread is never waited for, and never held back."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def write(self, text: str) -> None:
        self._queue.put((2, text.encode(errors="backslashreplace"), 0))

    def flush(self) -> None:
        pass


def _handlers_to_standard_error() -> list[logging.StreamHandler[Any]]:
    """Those of the root logger that write there."""
    streams = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    return [handler for handler in streams if handler.stream is sys.stderr]


def _pieces(lines: bytes) -> list[bytes]:
    """Whole lines in pieces that are written at once, or not at all where a single line is longer."""
    pieces = []
    start = 0
    while start < len(lines):
        end = len(lines)
        if end - start > select.PIPE_BUF:
            end = lines.rfind(b"\n", start, start + select.PIPE_BUF) + 1
            if end == 0:
                end = lines.find(b"\n", start) + 1 or len(lines)
        pieces.append(lines[start:end])
        start = end
    return pieces


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody has made it non-blocking
            select.select([], [descriptor], [])
