"""What the fork server imports for its workers, and what none of that may leave behind.

A fork copies memory and nothing else: a thread is not there in the child, and what it was to do is never done; a
device or a CUDA context is of no use in it. So each module that the user wants to be there is looked after when it is
imported, and refused with a sentence where it would break the workers.

The garbage collector rests meanwhile, which makes importing torch faster by a fifth, and all that there is afterwards
is exempt from it: a collection in a worker does not write to, and so copy, the pages that the worker shares.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import stat
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchelastic.agent.import_environment import ImportEnvironment

_FOR_ALL: Final = ("torch", "torch.distributed")

_HARMLESS_DEVICES: Final = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/pts/",
)


class Importer:
    """Imports modules into this process.

    Args:
        environment: gets to know what they read of the environment.
    """

    def __init__(self, environment: ImportEnvironment) -> None:
        self._environment = environment

    def import_torch(self) -> str:
        """Import torch; why that cannot be, or an empty string."""
        with _collector_at_rest():
            for module in _FOR_ALL:
                if error := self._import(module):
                    return f"torch cannot be imported by {sys.executable}: {error}"
        return ""

    def import_later(self, modules: Sequence[str]) -> str:
        """Import parts of torch that programs need when they run; without them, each worker does so for itself.

        Returns:
            Why this process should fork no more workers, or an empty string.
        """
        left = _Left()
        with _collector_at_rest():
            for module in modules:
                self._import(module, early=False)
        tempfile.tempdir = None  # where temporary files belong is not to be settled for all workers
        return left.problem()

    def preload(self, modules: Sequence[str], search_path: str) -> str:
        """Import the user's modules.

        Args:
            modules: their names.
            search_path: where the program looks for modules first, or an empty string.

        Returns:
            Why one of them cannot be there, or an empty string.
        """
        if search_path:
            sys.path.insert(0, search_path)
        try:
            with _collector_at_rest():
                for module in modules:
                    if problem := self._preload(module):
                        return f"--preload {module}: {problem}"
        finally:
            if search_path in sys.path:
                sys.path.remove(search_path)
        return ""

    def _preload(self, module: str) -> str:
        left = _Left()
        if error := self._import(module):
            return f"it cannot be imported: {error}"
        problem = left.problem() or _about_ranks(self._environment.of_workers(module))
        return f"{problem}. Leave it out: the program then imports it by itself." if problem else ""

    def _import(self, module: str, *, early: bool = True) -> str:
        try:
            with self._environment.importing(module, early=early):
                importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the module raises
            return f"{type(error).__name__}: {error}"
        return ""


def fork() -> int:
    """Fork, and say nothing of the threads that there are: what is there was looked after.

    What was printed before is printed once, and not by each process that is forked.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or a module has closed it
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Left:
    """What is left behind by what is imported after this was made."""

    def __init__(self) -> None:
        self._threads, self._devices = _lasting_threads(), _open_devices()

    def problem(self) -> str:
        """Why processes that are forked from here would be broken, or an empty string."""
        return (
            _about_threads(_lasting_threads() - self._threads)
            or _about_cuda()
            or _about_devices(_open_devices() - self._devices)
        )


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _lasting_threads() -> set[int]:
    """The threads that are still there when this process has forked.

    There are libraries that end their threads before a fork and start them again at need, as numpy's OpenBLAS does.
    """
    if len(_tasks()) > 1:
        pid = fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _tasks() - {threading.get_native_id()}


def _about_threads(left: set[int]) -> str:
    if not left:
        return ""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    known = sorted(f"{names[thread]!r}" for thread in left if thread in names)
    if native := len(left) - len(known):
        known.append(f"{native} of native code, as an OpenMP pool has them")
    threads = "a thread" if len(left) == 1 else f"{len(left)} threads"
    return f"it leaves {threads} behind ({', '.join(known)}), and no worker would have that: threads are not forked"


def _about_cuda() -> str:
    initialised = sys.modules["torch"].cuda.is_initialized()
    return "it initialises CUDA, which does not work in a process that is forked after that" if initialised else ""


def _open_devices() -> set[str]:
    devices = set()
    for link in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # that of the listing itself
            if stat.S_ISCHR(link.stat().st_mode) and not (name := str(link.readlink())).startswith(_HARMLESS_DEVICES):
                devices.add(name)
    return devices


def _about_devices(left: set[str]) -> str:
    names = " and ".join(sorted(left))
    return f"it leaves {names} open, and forked processes cannot share a device" if left else ""


def _about_ranks(names: Sequence[str]) -> str:
    return f"it reads {' and '.join(names)}, which has its value in a worker only" if names else ""
