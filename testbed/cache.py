"""The test bed's folder below the user's cache folder, shared by all runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Missing(Exception):  # noqa: N818 - `raise Missing` reads as a sentence
    """A part of the test bed is unavailable on this machine.

    Attributes:
        part: the missing part, such as "Go 1.26 or later".
        remedy: how to provide it, as a sentence.
    """

    def __init__(self, part: str, remedy: str) -> None:
        super().__init__(f"{part}: {remedy}")
        self.part = part
        self.remedy = remedy


def cache_folder() -> Path:
    """Return the test bed's folder; create the folder if it is missing."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "elastic-operator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of this name against all other runs on this machine; the exit of the process releases it."""
    with (cache_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
