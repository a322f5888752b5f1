"""Modules of ours whose names are torch's: torch is imported when one of them is first used, and not before."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container


def names_of(source: str, module: str, names: Container[str]) -> Callable[[str], object]:
    """The ``__getattr__`` of a module whose names are those of one of torch's.

    Args:
        source: torch's module.
        module: the module's own name.
        names: those that it has.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 - that is what it becomes
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(source), name)

    return __getattr__
