"""Writing to the agent's own standard streams, from a thread.

So a reader that is slow stops the workers' output, and never the agent.

Whole lines are written in pieces that the kernel does not interleave with what other processes write to the same pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_HELD_LIMIT: Final = 1 << 20


class Console:
    """The agent's standard output and standard error, as workers' output reaches them.

    Its thread ends with :meth:`close`, or with the process.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._held = 0
        self._waiting: list[Callable[[], None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._broken: set[int] = set()
        threading.Thread(target=self._write_all, name="console", daemon=True).start()

    def write(self, descriptor: int, lines: bytes) -> None:
        """Have whole lines written to a descriptor."""
        self._held += len(lines)
        self._idle.clear()
        self._queue.put((descriptor, lines))

    @property
    def full(self) -> bool:
        """Whether so much waits to be written that no more should be read."""
        return self._held > _HELD_LIMIT

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call this once when the console is no longer full."""
        self._waiting.append(resume)

    async def close(self, patience: float) -> None:
        """Wait until all is written, for some seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), patience)
        self._queue.put(None)

    def _written(self, size: int) -> None:
        self._held -= size
        if not self._held:
            self._idle.set()
        if not self.full:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, lines = item
            if descriptor not in self._broken:
                try:
                    for piece in _pieces(lines):
                        _write(descriptor, piece)
                except OSError:  # nobody reads it any more; the workers' output is then dropped
                    self._broken.add(descriptor)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._written, len(lines))


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
