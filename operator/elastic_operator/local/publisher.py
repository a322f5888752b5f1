"""Tells those who look on that something has changed, as often as they can bear and no more often.

Each of them gets snapshots at its own pace: one at once, one after each change (several close together are one), and
the last one when there will be no more.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    Snapshot = dict[str, Any]


class Publisher:
    """Makes snapshots for those who ask, whenever something has changed."""

    def __init__(self, make: Callable[[], Snapshot]) -> None:
        self._make = make
        self._subscribers: set[asyncio.Event] = set()
        self._closed = asyncio.Event()

    def touch(self) -> None:
        """Something has changed."""
        for changed in self._subscribers:
            changed.set()

    def close(self) -> None:
        """Nothing will change any more: everybody gets a last snapshot."""
        self._closed.set()
        self.touch()

    def now(self) -> Snapshot:
        """How things stand."""
        return self._make()

    async def snapshots(self, *, interval: float) -> AsyncGenerator[Snapshot, None]:
        """Snapshots until the last one.

        Args:
            interval: seconds between two of them, at least.
        """
        changed = asyncio.Event()
        changed.set()
        self._subscribers.add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                last = self._closed.is_set()
                yield self._make()
                if last:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await self._closed.wait()
        finally:
            self._subscribers.discard(changed)
