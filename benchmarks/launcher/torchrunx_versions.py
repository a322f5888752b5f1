"""Versions of torchrunx from the package index, installed below the user's cache folder; the project needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.support.packages import installed

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS: Final = ("0.4.0", "0.2.4")
"""The newest version, and the newest one with ``torchrunx.launch()``."""


def packages(version: str) -> Path:
    """Return the folder with a version and those of its requirements that this environment lacks.

    Raises:
        Missing: the package index cannot be reached.
    """
    return installed("torchrunx", version)
