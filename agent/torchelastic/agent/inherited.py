"""What a process of ours has from the one that started it, and should not have."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def close_inherited(first: int) -> None:
    """Close all open descriptors from this number on: those that are open, since the limit may be a billion."""
    for link in [*Path("/proc/self/fd").iterdir()]:
        if int(link.name) >= first:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(link.name))
