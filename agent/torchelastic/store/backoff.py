"""The delays between attempts to reach a store that is away."""

from __future__ import annotations

import asyncio
import random
from typing import Final

RETRY_MIN: Final = 0.1
RETRY_MAX: Final = 1.0
"""Seconds between attempts; with jitter, so that a thousand nodes do not return in step."""


class Backoff:
    """Delays that grow with each attempt that failed, until one succeeds.

    Attributes:
        attempts: how many attempts have failed since the last one that succeeded.
    """

    def __init__(self) -> None:
        self.attempts = 0

    async def wait(self) -> None:
        """Wait after an attempt that failed."""
        longest: float = min(RETRY_MIN * 2 ** min(self.attempts, 10), RETRY_MAX)
        self.attempts += 1
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def reset(self) -> None:
        """Take note of an attempt that succeeded."""
        self.attempts = 0
