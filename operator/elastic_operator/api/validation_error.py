"""Problems of a manifest, each with its location and a message."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Location = tuple[str | int, ...]
"""The path of a value: keys and list indices from the root."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that has to be changed before the manifest can be accepted.

    Attributes:
        location: the path of the value.
        message: what is wrong with it and what to change; follows ``spec.field: ``.
    """

    location: Location
    message: str

    @property
    def path(self) -> str:
        """The location as text: ``spec.args[0]``, ``metadata.labels[app.kubernetes.io/name]``."""
        return dotted(self.location)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.location else self.message


def dotted(location: Location) -> str:
    """A location as text."""
    path = ""
    for step in location:
        if isinstance(step, int) or not _PLAIN_KEY.fullmatch(step):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def in_words(problems: Sequence[str | Problem]) -> str:
    """The first problem as a sentence; if there are more, their number and a line for each."""
    first, *others = [str(problem) for problem in problems]
    if not others:
        return first
    count = "1 more problem" if len(others) == 1 else f"{len(others)} more problems"
    return "\n".join([f"{first}; and {count}:", *(f"  {other}" for other in others)])


def shown(value: object) -> str:
    """A value quoted as JSON, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 2]} …"
