"""Columns of plain text, as kubectl prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BETWEEN = "   "


def columns(rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Rows as lines, each column as wide as its widest cell."""
    kept = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    return [
        (indent + _BETWEEN.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in kept
    ]
