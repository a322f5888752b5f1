"""Modules that many programs import only when they train, and that take long to import.

The first step of any optimizer makes torch import its compiler, which takes longer than all the rest of it, and a third
of its memory again. A program that needs it is to have it at once when its workers are started again; one that does not
should not pay for it. So a worker tells the agent when it comes to such an import, and the fork server then imports the
same, for the workers that come after.

It tells what the program has set in its environment by then, too: where the import reads one of those variables, it is
left to the workers. Else the same program would find it honoured in its first epoch, and not in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec

MODULES: Final = ("torch._dynamo",)

_MESSAGE_LIMIT: Final = 16 << 10


class Listener:
    """The agent's side; what comes is not trusted, but only looked up among the modules that there are.

    Args:
        wanted: is called with a module that a worker imports, and the names of the variables that its program has set
            or removed before; again for each worker.

    Attributes:
        address: where workers tell of it; empty where that cannot be, and nobody does.
    """

    def __init__(self, wanted: Callable[[str, Sequence[str]], None]) -> None:
        self.address = ""
        self._wanted = wanted
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # there are kernels that cannot choose a name
            self._socket.bind("")
            self.address = self._socket.getsockname().decode("latin-1")
            self._loop.add_reader(self._socket, self._read)

    def close(self) -> None:
        """Listen no more."""
        if self.address:
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            module, *names = os.fsdecode(self._socket.recv(_MESSAGE_LIMIT)).split("\0")
            if module in MODULES:
                self._wanted(module, names)


class Teller:
    """The worker's side: stands among the finders of modules until there is nothing more to tell.

    Args:
        address: the agent's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._modules = {module for module in MODULES if module not in sys.modules}
        self._environment: Mapping[str, str] = {}

    def watch(self) -> None:
        """Begin."""
        if self._address and self._modules:
            self._environment = dict(os.environ)
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Find nothing, but tell of the module if it is one of ours."""
        if name in self._modules:
            self._modules.discard(name)
            self._tell(name)
            if not self._modules:
                with contextlib.suppress(ValueError):  # the program has removed it
                    sys.meta_path.remove(self)
        return None

    def _tell(self, module: str) -> None:
        now = dict(os.environ)
        names = [name for name in {**self._environment, **now} if now.get(name) != self._environment.get(name)]
        message = os.fsencode("\0".join((module, *names)))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(message[:_MESSAGE_LIMIT], self._address.encode("latin-1"))
