"""How long to wait before a store that is away is asked again."""

from __future__ import annotations

import random
from typing import Final

RETRY_MIN: Final = 0.1
RETRY_MAX: Final = 1.0
"""Seconds between tries while the store is away; with jitter, so that a thousand nodes don't come back in step."""


def retry_delay(tries: int) -> float:
    """Seconds to wait before the next try, growing with the number of tries that failed."""
    longest: float = min(RETRY_MIN * 2 ** min(tries, 10), RETRY_MAX)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
