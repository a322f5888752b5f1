"""A process that the fork server has forked: it waits for its role, and then runs the user's program or a TCPStore.

A worker sees what it would see if its program had been started by hand.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
import types
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torchelastic.training.progress  # noqa: F401 - a signal handler may need it while the program imports it
from torchelastic.agent import error_file
from torchelastic.agent.workers import ipc
from torchelastic.agent.workers.exec import execute, python_command
from torchelastic.agent.workers.linux import TREE_MARK, set_mark, set_parent_death_signal, set_title
from torchelastic.agent.workers.program import absolute, changed_imports, is_container, search_path
from torchelastic.metrics import worker as worker_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OURS: Final = f"{Path(__file__).parent}{os.sep}"
_CANNOT_OPEN: Final = 2


def play_role(link: socket.socket, agent: int, inherited: Mapping[str, str], set_by_imports: Mapping[str, str]) -> None:
    """Wait for the role of this process, and play it until it ends.

    Args:
        link: the socket to the agent.
        agent: the agent's process id.
        inherited: the environment of the fork server before it imported anything.
        set_by_imports: what the imports have changed in it.
    """
    os.setsid()
    set_title(["torchelastic: spare process"])
    try:
        message, descriptors = ipc.receive(link)
    except (EOFError, OSError):  # the agent is gone, or no longer needs this process
        os._exit(1)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    memory, out, err, *extra = descriptors
    content = ipc.from_memory_file(memory)
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if message["role"] == ipc.STORE:
        _serve_store(link, extra[0], **content)
    link.close()
    environment = content["environment"]
    for name, value in set_by_imports.items():
        if environment.get(name) == inherited.get(name):
            environment[name] = value
    _run_worker(content["kind"], content["argv"], environment, content["report"])


def _serve_store(link: socket.socket, listener: int, *, host: str, port: int) -> None:
    """Serve the round's TCPStore until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    _store = TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    link.send(ipc.READY)
    set_title(["torchelastic: store of the round"])
    while True:
        signal.pause()


def _run_worker(kind: str, argv: Sequence[str], environment: Mapping[str, str], report: str) -> None:
    if _shadows_imported_module(search_path(kind, argv[0])):
        execute(*python_command(kind, argv, environment))
    _reset_process(environment)
    module = ["-m"] if kind == "module" else []
    sys.orig_argv[:] = [sys.executable, *module, *argv]
    set_title(sys.orig_argv)
    set_mark(environment[TREE_MARK])
    worker_metrics.attach()
    _report_training(report)
    try:
        run_program(kind, argv)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        error_file.write(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = _nothing  # it has been told already, without our frames
        raise


def _shadows_imported_module(folder: str) -> bool:
    """Whether this folder has a module that the program would import in place of one that is imported already."""
    with contextlib.suppress(OSError):
        names = {name.partition(".")[0] for name in os.listdir(folder)} if folder else set()  # noqa: PTH208
        for name in (names & sys.modules.keys()) - {*sys.builtin_module_names, "__main__"}:
            spec, imported = PathFinder.find_spec(name, [folder]), getattr(sys.modules[name], "__spec__", None)
            if spec is not None and spec.origin and (imported is None or imported.origin != spec.origin):
                return True
    return False


def _reset_process(environment: Mapping[str, str]) -> None:
    """Replace what a process that was just started would not have inherited."""
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A new interpreter takes its seeds from the system; forked ones would have the same in all ranks.
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # the CPU's; those of devices have the same seed in every process
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    sys._torchelastic_quiet_end = _QuietEnd()  # type: ignore[attr-defined]  # noqa: SLF001 - sys is cleared last
    # A file or pipe would get the output in blocks.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class _QuietEnd:
    """Silences standard error at the very end of the interpreter.

    Modules imported before the fork are not destroyed then, because that would copy all their memory pages. Some
    libraries report this as leaks.
    """

    def __init__(self) -> None:
        self._steps = (os.open, os.devnull, os.O_WRONLY, os.dup2)  # global names are gone then

    def __del__(self) -> None:
        open_, nowhere, mode, dup2 = self._steps
        dup2(open_(nowhere, mode), 2)


def _report_training(address: str) -> None:
    """Tell the agent when the program trains for the first time: the fork server then imports torch's compiler.

    The first step of an optimizer imports it, which takes longer than all else in a restart. A program that has changed
    what the compiler reads at import does not report.
    """
    if not address or "torch._dynamo" in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    before = dict(os.environ)

    def report(*_: object) -> None:
        handle.remove()
        if not changed_imports(before, os.environ):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.setblocking(False)
                connection.sendto(b"trains", address.encode("latin-1"))

    handle = register_optimizer_step_pre_hook(report)


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def _nothing(*_: object) -> None:
    pass


def run_program(kind: str, argv: Sequence[str]) -> None:
    """Run a script or a module as ``__main__``, as the interpreter does."""
    main = _new_main_module()
    name = argv[0]
    sys.argv[:] = ["-m", *argv[1:]] if kind == "module" else argv
    if first := search_path(kind, name):
        sys.path.insert(0, first)
    if kind == "module":
        _run_as_module(name, alter_argv=True)
    elif is_container(name):
        _run_as_module("__main__", alter_argv=False)
    else:
        exec(_script(main, name), main.__dict__)  # noqa: S102 - this runs the program


def _new_main_module() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"])
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    former = sys.modules["__main__"]
    for name, module in [*sys.modules.items()]:
        if module is former:  # as __main__ and as __mp_main__
            sys.modules[name] = main
    return main


def _run_as_module(name: str, *, alter_argv: bool) -> None:
    try:
        # The function that the interpreter itself calls for -m, folders and archives.
        runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001
    except SystemExit as end:
        message = str(end.code)
        if message.startswith(f"{sys.executable}: "):
            error_file.write_message(message.removeprefix(f"{sys.executable}: "))
        raise


def _script(main: types.ModuleType, name: str) -> Any:  # noqa: ANN401 - code
    path = absolute(name)
    main.__file__ = path
    main.__spec__ = None
    main.__dict__["__cached__"] = None
    main.__loader__ = SourceFileLoader("__main__", path)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        error_file.write_message(f"the program {name} cannot be opened: {error.strerror}")
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(_CANNOT_OPEN) from None
    return compile(source, path, "exec", dont_inherit=True)
