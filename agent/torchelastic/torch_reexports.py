"""For modules that offer the names of one of torch's: torch is imported when one of them is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def reexport(source: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module that offers the public names of one of torch's modules."""

    def __getattr__(name: str) -> object:  # noqa: N807 - that is what it becomes
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"there is no attribute {name!r}")
        module = import_module(source)
        if name == "__all__":
            return getattr(module, name, [each for each in vars(module) if not each.startswith("_")])
        return getattr(module, name)

    return __getattr__
