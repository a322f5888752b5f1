"""Writes HTML and SVG so that no text of anybody's can become markup: whatever is not markup already is escaped."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNWRITABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What no page can hold: controls, and halves of characters."""

_EMPTY: Final = frozenset({"br", "hr", "meta"})
"""Elements without an end."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """An element.

    Args:
        name: of the element, or of the attribute below: an underscore stands for a hyphen, one at the end for nothing.
        children: text, or markup; None for nothing.
        attributes: those that are not None.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_written(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = joined(child for child in children if child is not None)
    return Markup(f"<{name}{written}>" if name in _EMPTY else f"<{name}{written}>{inside}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Parts, of which those that are no markup are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escaped(part) for part in parts))


def escaped(text: str) -> Markup:
    """Text as it has to be written to be seen as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text)))


def _written(value: str | float) -> str:
    """A number as short as it can be; a percentage or a pixel needs no more digits than these."""
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
