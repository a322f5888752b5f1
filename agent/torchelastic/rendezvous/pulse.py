"""Waking whoever waits for "something changed", without losing a change that comes while they are busy."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Pulse:
    """A counter of changes that can be waited on. All calls belong to one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def send(self) -> None:
        """Something changed."""
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def after(self, seen: int, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - waking is the point
        """Wait until something has changed since ``seen`` was read from :attr:`count`.

        Args:
            seen: the count that the caller last acted upon.
            timeout: seconds to wait at most; None for as long as it takes.

        Returns:
            The count now; equal to ``seen`` where the time ran out.
        """
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
