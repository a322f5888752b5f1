"""Telling the user of variables that a program sets too late: before its own imports, but after ours.

A program that sets ``os.environ["OMP_NUM_THREADS"]`` and then imports torch is used to have an effect. In a worker that
was forked from a process with torch in it there is none, and nothing would say so. Nothing can be done about it here:
such a program is to be started by ``--start-method exec``.

The watch costs nothing but while ``os.environ`` is written to, and ends when the program imports torch: from then on it
would be too late by hand as well. An import of a module that is there already calls nothing, but the interpreter asks
the module's specification whether it is still being imported; that is what is listened to.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from torchelastic.agent.import_environment import READ_BY_LIBRARIES, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet


class LateSettings:
    """Watches a program until it imports what was imported before it began.

    Args:
        known: the environment as the imports have seen it.
        read: the variables that were read, by the module that was imported.
        tell: is called, once for each variable that is set too late, with its name and the module that has read it.
    """

    def __init__(
        self, known: Mapping[str, str], read: Mapping[str, AbstractSet[str]], tell: Callable[[str, str], None]
    ) -> None:
        self._known = known
        self._tell = tell
        self._told: set[str] = set()
        self._read = {module: names for module, names in read.items() if names or module == TORCH}
        self._plain = type(os.environ)

    def watch(self) -> None:
        """Begin."""
        os.environ.__class__ = _reporting(self._plain, self._changed)
        for module in [*self._read]:
            spec = getattr(sys.modules.get(module), "__spec__", None)
            if type(spec) is ModuleSpec:
                spec.__class__ = _listening(lambda module=module: self._imported(module))  # type: ignore[misc]

    def _changed(self, name: str) -> None:
        if name in self._told or os.environ.get(name) == self._known.get(name):
            return
        for module, names in self._read.items():
            if name in names or (module == TORCH and name.startswith(READ_BY_LIBRARIES)):
                self._told.add(name)
                self._tell(name, module)
                return

    def _imported(self, module: str) -> None:
        self._read.pop(module, None)
        if not self._read:
            os.environ.__class__ = self._plain


def _reporting(plain: type[os._Environ[str]], changed: Callable[[str], None]) -> type[os._Environ[str]]:
    """The class of ``os.environ`` with a call whenever a variable is set or removed."""

    class Reporting(plain):  # type: ignore[misc, valid-type] # a class is what it is
        def __setitem__(self, name: str, value: str) -> None:
            super().__setitem__(name, value)
            changed(name)

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            changed(name)

    return Reporting


def _listening(imported: Callable[[], None]) -> type[ModuleSpec]:
    """The class of a module's specification with a call at the next import of the module."""

    class Listening(ModuleSpec):
        @property
        def _initializing(self) -> bool:
            self.__class__ = ModuleSpec  # type: ignore[assignment] # as it was
            imported()
            return False

    return Listening
