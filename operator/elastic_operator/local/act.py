"""An act of the demo, as it is shown while it is played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOW: Final = ">"
"""An act that is being played."""
DONE: Final = "+"
"""An act that had its effect."""
FAILED: Final = "-"
"""An act that had not."""


@dataclass(frozen=True, slots=True)
class Act:
    """An act of the demo, as the picture shows it.

    Attributes:
        title: what is done.
        mark: "" while it is to come, then one of :data:`NOW`, :data:`DONE` and :data:`FAILED`.
        result: what came of it.
    """

    title: str
    mark: str = ""
    result: str = ""
