"""A counter of changes that tasks can wait on without missing one."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class ChangeSignal:
    """Counts changes and wakes the tasks that wait for one. All calls belong to one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def send(self) -> None:
        """Announce a change."""
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def after(self, seen: int, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - waking is the point
        """Wait until :attr:`count` differs from ``seen``, or the timeout has passed; return the count."""
        if self.count == seen:
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await future
            finally:
                self._waiting.discard(future)
        return self.count
