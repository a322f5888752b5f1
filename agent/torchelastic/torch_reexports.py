"""For modules that offer torch's names: torch is imported when one of them is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container


def reexport(source: str, module: str, names: Container[str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module that offers these names of one of torch's modules, ``source``."""

    def __getattr__(name: str) -> object:  # noqa: N807 - that is what it becomes
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(source), name)

    return __getattr__
