"""Tells when files change, as the kernel tells it: the manifest, and what the workers print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from watchfiles import awatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_SETTLING: Final = 100
"""Milliseconds for which changes that belong together are gathered: an editor writes a file in several steps."""

_GATHERED: Final = 1000
"""Milliseconds after which changes are told though more are coming."""

_LOOK_FOR_STOP: Final = 60_000
"""Milliseconds after which the watching thread comes up for air; nothing depends on it."""


async def saves(file: Path) -> AsyncIterator[None]:
    """Once each time that the file may have changed.

    Its folder is watched, not the file: most editors write a new one and give it the old one's name.

    Raises:
        OSError: the folder can't be watched.
    """
    async for _ in awatch(
        file.parent,
        watch_filter=lambda _, path: path == str(file),
        recursive=False,
        step=_SETTLING,
        debounce=_GATHERED,
        rust_timeout=_LOOK_FOR_STOP,
    ):
        yield


async def writes_below(folder: Path) -> AsyncIterator[None]:
    """Once each time that something below the folder may have been written.

    Raises:
        OSError: the folder can't be watched.
    """
    async for _ in awatch(folder, watch_filter=None, step=_SETTLING, debounce=_GATHERED, rust_timeout=_LOOK_FOR_STOP):
        yield
