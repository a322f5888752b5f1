"""Reads values of unchecked JSON; each function returns its type whatever the JSON contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json


def mapping(value: object, *path: str) -> Json:
    """The mapping at the path; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, dict) else {}


def mappings(value: object, *path: str) -> tuple[Json, ...]:
    """The mappings in the list at the path."""
    return tuple(entry for entry in listing(value, *path) if isinstance(entry, dict))


def listing(value: object, *path: str) -> tuple[object, ...]:
    """The items of the list at the path; empty if there is none."""
    found = at(value, *path)
    return tuple(found) if isinstance(found, list) else ()


def text(value: object, *path: str) -> str:
    """The text at the path; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def integer(value: object, *path: str) -> int | None:
    """The integer at the path; None if there is none."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def at(value: object, *path: str) -> object:
    """The value at the path; None if there is none."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
