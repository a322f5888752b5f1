"""Reads JSON that nobody has checked: whatever stands there, the answer has the type that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_operator.spec import Json


def mapping(value: object, *path: str) -> Json:
    """The mapping to which the keys lead; an empty one where they lead to none."""
    found = at(value, *path)
    return found if isinstance(found, dict) else {}


def mappings(value: object, *path: str) -> tuple[Json, ...]:
    """The mappings in the list to which the keys lead."""
    return tuple(entry for entry in listing(value, *path) if isinstance(entry, dict))


def listing(value: object, *path: str) -> tuple[object, ...]:
    """What stands in the list to which the keys lead; nothing where they lead to none."""
    found = at(value, *path)
    return tuple(found) if isinstance(found, list) else ()


def text(value: object, *path: str) -> str:
    """The text to which the keys lead; an empty one where they lead to none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def integer(value: object, *path: str) -> int | None:
    """The whole number to which the keys lead; None where they lead to none."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def at(value: object, *path: str) -> object:
    """What the keys lead to; None where they lead nowhere."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
