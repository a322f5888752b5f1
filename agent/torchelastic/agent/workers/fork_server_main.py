"""The fork server's process: it imports torch and the modules to preload, and is forked into workers.

A fork copies memory but no threads, and a device or CUDA context does not work in the child. So a module that would
break the workers is refused. A worker is forked twice, so that its parent is the agent, which watches and reaps it. The
garbage collector is off during imports, which makes them faster, and everything imported is exempt from it afterwards:
a collection in a worker then does not copy shared memory pages.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent.workers import ipc
from torchelastic.agent.workers.forked_worker import play_role
from torchelastic.agent.workers.linux import close_fds, set_parent_death_signal, set_title

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HARMLESS_DEVICES: Final = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/pts/",
)


def main() -> None:
    """Serve the agent until it is gone; in a forked child, play the child's role."""
    close_fds(ipc.CONTROL + 1)
    agent = os.getppid()
    set_parent_death_signal(signal.SIGKILL)
    set_title(["torchelastic: fork server"])
    inherited = dict(os.environ)
    with socket.socket(fileno=ipc.CONTROL) as control:
        link, set_by_imports = _serve(control, inherited)
    if link is not None:
        play_role(link, agent, inherited, set_by_imports)


def _serve(control: socket.socket, inherited: dict[str, str]) -> tuple[socket.socket | None, dict[str, str]]:
    """Serve the agent.

    Returns:
        In a child, its link to the agent and what the imports have set in the environment; None when the agent is gone.
    """
    error = _import_torch()
    set_by_imports: dict[str, str] = {}
    while True:
        try:
            message, descriptors = ipc.receive(control)
        except EOFError:
            return None, {}
        match message:
            case {"preload": modules, "search_path": search_path}:  # the first message
                error = error or _preload(modules, search_path)
                set_by_imports = {name: value for name, value in os.environ.items() if inherited.get(name) != value}
                ipc.send(control, {"error": error})
            case {"import": module}:
                with _collector_off():
                    _import(module)
                tempfile.tempdir = None  # each worker chooses its own folder for temporary files
                ipc.send(control, {})
            case _:
                answer, link = _fork_twice([socket.socket(fileno=descriptor) for descriptor in descriptors])
                if link is not None:
                    return link, set_by_imports
                ipc.send(control, answer)


def _fork() -> int:
    """Fork without a warning about threads; output that was printed before appears once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by its reader, or by a module
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_twice(links: Sequence[socket.socket]) -> tuple[dict[str, Any], socket.socket | None]:
    """Fork an orphan for each link, which the agent inherits.

    Returns:
        The answer to the agent; in such a child, its link.
    """
    reading, writing = os.pipe()
    middle = _fork()
    if middle == 0:
        os.close(reading)
        own = _fork_each(links, writing)
    else:
        own = None
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            text = file.read()
        os.waitpid(middle, 0)  # now the agent is the parent
    for link in links:
        if link is not own:
            link.close()
    if own is not None:
        return {}, own
    return json.loads(text) if text else {"error": "the process that forks workers died"}, None


def _fork_each(links: Sequence[socket.socket], writing: int) -> socket.socket:
    """Fork for each link, report the ids, and exit; returns only in the children."""
    answer: dict[str, Any] = {"pids": []}
    for link in links:
        try:
            pid = _fork()
        except OSError as error:
            answer["error"] = f"no process can be forked: {error.strerror}"
            break
        if pid == 0:
            os.close(writing)
            return link
        answer["pids"].append(pid)
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def _import_torch() -> str:
    """Import torch; returns why that failed, or an empty string."""
    with _collector_off():
        error = _import("torch") or _import("torch.distributed")
    return f"torch cannot be imported by {sys.executable}: {error}" if error else ""


def _preload(modules: Sequence[str], search_path: str) -> str:
    """Import the user's modules; returns why one of them cannot be preloaded, or an empty string.

    Args:
        modules: their names.
        search_path: where the program looks for modules first, or an empty string.
    """
    if search_path:
        sys.path.insert(0, search_path)
    try:
        with _collector_off():
            for module in modules:
                threads, devices = _threads(), _open_devices()
                if error := _import(module):
                    return f"--preload {module}: it cannot be imported: {error}"
                problem = (
                    _about_threads(_threads() - threads) or _about_cuda() or _about_devices(_open_devices() - devices)
                )
                if problem:
                    return f"--preload {module}: {problem}. Leave it out: the program then imports it by itself."
    finally:
        if search_path in sys.path:
            sys.path.remove(search_path)
    return ""


def _import(module: str) -> str:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - anything that the module raises
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _threads() -> set[int]:
    """The threads that remain when this process forks: some libraries end theirs before a fork, such as OpenBLAS."""
    if len(_tasks()) > 1:
        pid = _fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _tasks() - {threading.get_native_id()}


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _about_threads(left: set[int]) -> str:
    if not left:
        return ""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    known = sorted(f"{names[thread]!r}" for thread in left if thread in names)
    if native := len(left) - len(known):
        known.append(f"{native} of native code, as an OpenMP pool has them")
    threads = "a thread" if len(left) == 1 else f"{len(left)} threads"
    return f"it leaves {threads} behind ({', '.join(known)}), and forked workers would not have that"


def _about_cuda() -> str:
    initialised = sys.modules["torch"].cuda.is_initialized()
    return "it initialises CUDA, which does not work in a process that is forked after that" if initialised else ""


def _open_devices() -> set[str]:
    devices = set()
    for link in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor of the listing
            if stat.S_ISCHR(link.stat().st_mode) and not (name := str(link.readlink())).startswith(_HARMLESS_DEVICES):
                devices.add(name)
    return devices


def _about_devices(left: set[str]) -> str:
    return f"it leaves {' and '.join(sorted(left))} open, and forked processes cannot share a device" if left else ""
