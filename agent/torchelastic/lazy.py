"""Names that are imported at their first use: attributes of modules, and torch's modules under torchelastic's names.

``import torchelastic.timer.api`` imports ``torch.distributed.elastic.timer.api``, and both names mean the same module.
So do the names of torchelastic 0.1 for the modules of :mod:`torchelastic.inprocess`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType, ModuleType

_PACKAGE: Final = "torchelastic"
_TORCHS: Final = "torch.distributed.elastic"

_OLDER: Final = (
    *("checkpoint", "checkpoint.api", "checkpoint.file_system_checkpoint", "p2p", "p2p.coordinator_p2p"),
    *("coordinator", "state", "train_loop", "worker_stats"),
)
"""The modules of torchelastic 0.1 whose content is in ``torchelastic.inprocess``; two of them were packages."""

_ORIGINS: Final = {f"{_PACKAGE}.{name}": f"{_PACKAGE}.inprocess.{name.partition('.')[0]}" for name in _OLDER}


def lazy_attributes(module: str, sources: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a module, which imports an attribute at its first use.

    Args:
        module: the name of the module.
        sources: the names of the attributes, separated by spaces, by the module that defines them.
    """
    source_of = {name: source for source, names in sources.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in source_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = getattr(import_module(source_of[name]), name)
        setattr(sys.modules[module], name, found)  # some functions are called often
        return found

    return find


class _TorchModules:
    """Finds and loads modules for the import system: torchelastic's own, else torch's of the same name."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - the import system's signature
        """Return how to import a module: torchelastic's own, or torch's; None if neither has it."""
        parent, _, child = name.rpartition(".")
        if parent.partition(".")[0] != _PACKAGE:
            return None
        if name in _ORIGINS:
            return ModuleSpec(name, cast("Any", self), origin=_ORIGINS[name])
        real = getattr(sys.modules.get(parent), "__name__", parent)
        if real == parent:
            if (spec := PathFinder.find_spec(name, cast("Any", path))) is not None:
                if name in _ORIGINS.values():
                    spec.submodule_search_locations = []  # allows imports of modules in it
                return spec
            real = parent.replace(_PACKAGE, _TORCHS, 1)
        from importlib.util import find_spec

        try:
            found = find_spec(f"{real}.{child}")
        except ModuleNotFoundError:  # torch does not have the package
            return None
        return found and ModuleSpec(name, cast("Any", self), origin=f"{real}.{child}")

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of a module, for ``python -m``."""
        from importlib.util import find_spec

        torchs = find_spec(cast("Any", self.find_spec(name)).origin)
        return cast("CodeType | None", cast("Any", torchs).loader.get_code(cast("Any", torchs).name))

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create a module, which :meth:`exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put torch's module in the place of this module."""
        sys.modules[module.__name__] = import_module(cast("Any", module.__spec__).origin)


def install() -> None:
    """Make torch's modules importable under torchelastic's names."""
    # First, because the import system would otherwise load a module of a package of torch a second time.
    sys.meta_path.insert(0, cast("Any", _TorchModules()))
