"""The fork server's process: it imports torch and the modules to preload, and is forked into workers.

A fork copies only the calling thread, and a CUDA context does not work in the child. So a module that leaves threads
or initializes CUDA is refused. A worker is forked twice, so that its parent is the agent, which watches and reaps it.
The garbage collector is off during imports, to make them faster. Afterwards, the collector ignores all imported
objects, so that a collection in a worker does not copy shared memory pages.

A forked process waits for its task, and then serves a TCPStore or runs the user's program, in the same environment
as a program that is started from a shell.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
import zlib
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, cast

from torchelastic.agent.workers.fork_server import (
    CONTROL,
    DESCRIPTOR_LIMIT,
    MESSAGE_LIMIT,
    TORCH,
    absolute,
    is_container,
    is_installed,
    python_command,
    search_path,
    send,
)
from torchelastic.agent.workers.process_tree import close_fds, set_parent_death_signal, set_title
from torchelastic.metrics import worker as worker_metrics
from torchelastic.metrics.api import forward_torch
from torchelastic.protocol import worker
from torchelastic.training.connection import AGENT_CONNECTION
from torchelastic.training.error_file import record_message
from torchelastic.training.errors import record_exception
from torchelastic.training.progress import REPORTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_OWN_FOLDER: Final = f"{Path(__file__).parent}{os.sep}"
_OF_A_WORKER: Final = frozenset(
    ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
"""Variables that have another value in each worker or round."""
_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127


def main() -> None:
    """Serve the agent until it exits; in a forked process, run the task of that process."""
    close_fds(CONTROL + 1)
    agent = os.getppid()
    set_parent_death_signal(signal.SIGKILL)
    set_title(["torchelastic: fork server"])
    inherited = dict(os.environ)
    with socket.socket(fileno=CONTROL) as control:
        connection = _serve(control, _import_torch())
    _run_task(connection, agent, inherited)


def _serve(control: socket.socket, error: str = "") -> socket.socket:
    """Serve the agent until it closes the connection, and exit; in a forked process, return its connection."""
    with contextlib.suppress(EOFError, ConnectionError):  # the agent has exited, or has canceled a request
        while True:
            message, descriptors = _receive(control)
            match message:
                case {"preload": modules, "search_path": search_path}:  # the first message
                    send(control, {"error": error or _preload(modules, search_path)})
                case {"import": module, "changed": changed, "silent": silent}:
                    with _without_output() if silent else contextlib.nullcontext():
                        problem = _import_learned(module, changed)
                    send(control, {"problem": problem})
                case _:
                    answer, connection = _fork_each([socket.socket(fileno=descriptor) for descriptor in descriptors])
                    if connection is not None:
                        return connection
                    send(control, answer)
    os._exit(0)  # imported modules must not do anything at exit: only workers use them


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors; raise EOFError at the end."""
    data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT, DESCRIPTOR_LIMIT)
    if not data:
        raise EOFError
    return json.loads(data), descriptors


def _fork() -> int:
    """Fork without a warning about threads; flush the output first, so that it appears only once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader or a module has closed the stream
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_each(connections: Sequence[socket.socket]) -> tuple[dict[str, Any], socket.socket | None]:
    """Fork a process for each connection.

    An intermediate process forks them, reports their ids and exits; the agent then becomes their parent. In the fork
    server, return the response for the agent. In a forked process, return its connection.
    """
    reading, writing = os.pipe()
    middle = _fork()
    if middle == 0:
        os.setsid()  # the agent kills the fork server's process group when the fork server exits
        answer: dict[str, Any] = {"pids": []}
        try:
            for connection in connections:
                if (pid := _fork()) == 0:
                    os.close(reading)
                    os.close(writing)
                    for other in connections:
                        if other is not connection:
                            other.close()
                    return {}, connection
                answer["pids"].append(pid)
        except OSError as error:
            answer["error"] = f"no process can be forked: {error.strerror}"
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    os.waitpid(middle, 0)  # the agent is now the parent of the forked processes
    for connection in connections:
        connection.close()
    return json.loads(text) if text else {"error": "the process that forks workers has exited"}, None


def _import_torch() -> str:
    """Import torch; return why that failed, or an empty string."""
    with _collector_off():
        error = _import("torch") or _import("torch.distributed") or _import("torch.distributed.elastic.metrics")
        forward_torch()
    return f"torch cannot be imported by {sys.executable}: {error}" if error else ""


def _preload(modules: Sequence[str], search_path: str) -> str:
    """Import the user's modules; return why one of them cannot be preloaded, or an empty string."""
    if search_path:
        sys.path.insert(0, search_path)
    try:
        threads = _threads()
        with _collector_off():
            for module in modules:
                if error := _import(module):
                    return f"--preload {module}: the module cannot be imported: {error}"
                if problem := _problem(_threads() - threads):
                    return f"--preload {module}: {problem}. Remove it from --preload; then the program imports it."
    finally:
        if search_path in sys.path:
            sys.path.remove(search_path)
    return ""


def _import_learned(module: str, changed: Mapping[str, int]) -> str:
    """Import a module as a worker does; return why workers must not be forked from this process, or nothing.

    `changed` has hashes of the variables that differed from the worker's first environment when it began the import.
    """
    environment = dict(os.environ)
    if wrong := [name for name, value in changed.items() if _digest(environment.get(name)) != value]:
        return f"the program sets {', '.join(wrong)}"
    if not is_installed(module, PathFinder.find_spec(module.partition(".")[0])):
        return ""  # each worker imports it itself
    with _collector_off(), _WatchedEnvironment.reads() as read:
        problem = _import(module) or _problem(_threads())
    if read and not module.startswith(TORCH):
        return problem or f"it reads {', '.join(sorted(read))}"
    if module.startswith(TORCH):
        _set_environment(environment)  # the program may set the variables of torch's compiler at any time
    tempfile.tempdir = None  # each worker chooses its own folder for temporary files
    return problem


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    with Path(os.devnull).open("wb") as nothing, contextlib.ExitStack() as stack:
        for number in (1, 2):
            stack.callback(os.close, copy := os.dup(number))
            stack.callback(os.dup2, copy, number)
            os.dup2(nothing.fileno(), number)
        stack.callback(sys.stderr.flush)
        stack.callback(sys.stdout.flush)
        yield


class _WatchedEnvironment(type(os.environ)):  # type: ignore[misc] # os._Environ
    """``os.environ`` while it is watched."""

    _read: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        self._read.update({name} & _OF_A_WORKER)
        return cast("str", super().__getitem__(name))

    @classmethod
    @contextlib.contextmanager
    def reads(cls) -> Iterator[set[str]]:
        """Note which variables of a worker are read in the block."""
        cls._read.clear()
        former, os.environ.__class__ = type(os.environ), cls  # modules may hold references to the object
        try:
            yield cls._read
        finally:
            os.environ.__class__ = former


def _digest(value: str | None) -> int:
    return zlib.crc32(repr(value).encode(errors="surrogateescape"))


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
    """Return the ids of the threads that remain after a fork: OpenBLAS, for example, ends its threads at a fork."""
    if len(_tasks()) > 1:
        pid = _fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _tasks() - {threading.get_native_id()}


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _problem(threads: set[int]) -> str:
    """Return why workers cannot be forked now, given the threads that a module left; empty if they can."""
    if sys.modules["torch"].cuda.is_initialized() or _is_unusable_after_fork():
        return "it initializes CUDA, which processes that are forked later cannot use"
    if threads:
        names = sorted(f"{thread.name!r}" for thread in threading.enumerate() if thread.native_id in threads)
        which = f" ({', '.join(names)})" if names else ", such as those of an OpenMP pool"
        return f"it leaves threads behind{which}; forked workers would not have them"
    return ""


def _is_unusable_after_fork() -> bool:
    """Return whether a forked process cannot use CUDA, for example after ``torch.cuda.is_available()``."""
    pid = _fork()
    if pid == 0:
        os._exit(sys.modules["torch"].cuda._is_in_bad_fork())  # noqa: SLF001 - torch has no public function for it
    return os.waitpid(pid, 0)[1] != 0


# -- a forked process


def _run_task(connection: socket.socket, agent: int, inherited: Mapping[str, str]) -> None:
    """Wait for the task of this process, and run it.

    `inherited` is the environment of the fork server before it imported anything.
    """
    os.setsid()
    set_title(["torchelastic: spare process"])
    try:
        message, (memory, *descriptors) = _receive(connection)
    except (EOFError, OSError):  # the agent has exited, or no longer needs this process
        os._exit(1)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    with open(memory, "rb") as file:  # noqa: PTH123 - a descriptor
        file.seek(0)
        content = json.loads(file.read())
    for number, descriptor in zip(message["streams"], descriptors, strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if message["task"] == "fork server":
        set_title(["torchelastic: fork server"])
        with connection:
            forked = _serve(connection)
        _run_task(forked, agent, inherited)
        return
    connection.close()
    time.sleep(content.pop("delay", 0))
    match message["task"]:
        case "tcp_store":
            _serve_tcp_store(descriptors[-1], **content)
        case "command":
            os.sched_setaffinity(0, os.sched_getaffinity(agent))  # OpenMP may have changed the affinity
            _bind_near_gpu(content)
            _execute(**content)
        case _:
            _bind_near_gpu(content)
            _run_worker(inherited, **content)


def _bind_near_gpu(content: dict[str, Any]) -> None:
    """With ``--numa-binding``, let torch bind this process to the CPUs near its GPU; exit if it cannot.

    torch initializes CUDA for this. A child process does it, because the program may initialize CUDA differently.
    """
    if (binding := content.pop("numa_binding", None)) is None:
        return
    worker = os.getpid()
    if (child := _fork()) == 0:
        try:
            from torch.numa import binding as numa

            options = numa.NumaOptions(numa.AffinityMode(binding["mode"]))
            apply = numa._maybe_apply_numa_binding_to_current_process  # noqa: SLF001 - torch has no public function
            apply(device_index=binding["device"], numa_options=options)
            os.sched_setaffinity(worker, os.sched_getaffinity(0))
        except Exception as error:  # noqa: BLE001 - torch has logged it
            _set_environment(content["environment"])
            record_exception(error)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        os._exit(1)


def _serve_tcp_store(listener: int, *, host: str, port: int) -> None:
    """Serve the round's TCPStore until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    _store = TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    set_title(["torchelastic: TCPStore of a round"])
    while True:
        signal.pause()


def _execute(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with a command, which inherits only the standard streams."""
    close_fds(3)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # changed by the interpreter
        signal.signal(number, signal.SIG_DFL)
    _set_environment(environment)
    try:
        os.execvp(argv[0], [*argv])  # noqa: S606 - no shell is needed
    except OSError as error:
        message = f"{argv[0]} cannot be executed: {error.strerror}"
        record_message(message)
        os.write(2, f"{message}\n".encode(errors="surrogateescape"))
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _run_worker(
    inherited: Mapping[str, str], *, kind: str, argv: Sequence[str], environment: dict[str, str], learns: bool
) -> None:
    if _shadows_imported_module(search_path(kind, argv[0])):
        _execute(*python_command(kind, argv, environment))
    for name, value in os.environ.items():  # keep the variables that imports have set
        if inherited.get(name) != value and environment.get(name) == inherited.get(name):
            environment[name] = value
    _reset_process(environment)
    module = ["-m"] if kind == "module" else []
    sys.orig_argv[:] = [sys.executable, *module, *argv]
    set_title(sys.orig_argv)
    if worker.METRICS_FILE in environment:
        worker_metrics.attach()
    if learns and PathFinder in sys.meta_path and environment.get("LOCAL_RANK") == "0":
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _ImportReporter())
    # The hook stays, because other hooks may be running when it is called. It costs about 0.1 µs per step.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(REPORTER.first_step)
    try:
        _run_program(kind, argv)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        record_exception(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None  # the exception has been printed, without our frames
        raise


def _shadows_imported_module(folder: str) -> bool:
    """Return whether this folder has a module that would replace an already imported module in the program."""
    with contextlib.suppress(OSError):
        names = {name.partition(".")[0] for name in os.listdir(folder)} if folder else set()  # noqa: PTH208
        for name in (names & sys.modules.keys()) - {*sys.builtin_module_names, "__main__"}:
            spec, imported = PathFinder.find_spec(name, [folder]), getattr(sys.modules[name], "__spec__", None)
            if spec is not None and spec.origin and (imported is None or imported.origin != spec.origin):
                return True
    return False


def _reset_process(environment: Mapping[str, str]) -> None:
    """Reset the state that a fork inherits and a new interpreter would not have."""
    _set_environment(environment)
    worker.own_pid = os.getpid()
    time.tzset()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A new interpreter takes its seeds from the system; forked processes would have the same seeds in all ranks.
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # for the CPU only: devices have the same seed in every process
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    sys._torchelastic_stderr_silencer = _StderrSilencer()  # type: ignore[attr-defined]  # noqa: SLF001 - sys is cleared last
    _open_streams()


def _open_streams() -> None:
    """Open Python's standard streams again, because a stream remembers whether its file can seek.

    Output is written line by line; by default, Python writes to a file or pipe in blocks.
    """
    for name, mode in (("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb")):
        before: Any = getattr(sys, name)
        raw: Any = io.FileIO(before.fileno(), mode, closefd=False)
        raw.name = before.name
        # With PYTHONUNBUFFERED, output is not buffered.
        buffer = io.BufferedReader(raw) if mode == "rb" else raw if before.write_through else io.BufferedWriter(raw)
        stream: Any = io.TextIOWrapper(
            buffer, before.encoding, before.errors, line_buffering=True, write_through=before.write_through
        )
        stream.mode = before.mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _ImportReporter:
    """Finds what PathFinder finds, and reports to the agent which installed modules the program imports.

    It reports no module that another installed module imports.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._importing: Any = None  # the specification of the module that was reported last

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        imports = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"  # noqa: SLF001 - find_spec() only asks
        nested = getattr(self._importing, "_initializing", False)
        if imports and not nested and is_installed(name, spec) and worker.is_worker():
            self._importing = spec
            with contextlib.suppress(Exception):  # the program's import must not fail
                message = worker.WorkerMessage(imported=name, changed=self._changed(name))
                if len(worker.encode_lines(message)) <= worker.LINE_LIMIT:
                    AGENT_CONNECTION.send(message)
        return spec

    def _changed(self, module: str) -> dict[str, int]:
        """Return the variables that have changed, without those of torch, which the agent has looked for."""
        if module.startswith(TORCH):
            return {}
        now, before = dict(os.environ), self._environment
        names = [name for name in now | before if now.get(name) != before.get(name) and not name.startswith("TORCH")]
        return {name: _digest(now.get(name)) for name in names}


class _StderrSilencer:
    """Silences standard error at the end of the interpreter's shutdown.

    The shutdown does not destroy modules imported before the fork, because that would copy all their memory pages. Some
    libraries, for example triton, which torch's compiler imports, report such modules as leaks.
    """

    def __init__(self) -> None:
        self._steps = (os.open, os.devnull, os.O_WRONLY, os.dup2)  # global names no longer exist in __del__

    def __del__(self) -> None:
        open_, nowhere, mode, dup2 = self._steps
        dup2(open_(nowhere, mode), 2)


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        trace = trace.tb_next
    return trace


def _run_program(kind: str, argv: Sequence[str]) -> None:
    """Run a script or a module as ``__main__``, as the interpreter does."""
    main = _new_main_module()
    name = argv[0]
    sys.argv[:] = ["-m", *argv[1:]] if kind == "module" else argv
    if first := search_path(kind, name):
        sys.path.insert(0, first)
    if kind == "module" or is_container(name):
        # The function that the interpreter itself calls for -m, folders and archives.
        run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001
        run(name if kind == "module" else "__main__", kind == "module")
    else:
        exec(_script(main, name), main.__dict__)  # noqa: S102 - this runs the program


def _new_main_module() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"])
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    former = sys.modules["__main__"]
    for name, module in [*sys.modules.items()]:
        if module is former:  # as __main__ and perhaps as __mp_main__
            sys.modules[name] = main
    return main


def _script(main: types.ModuleType, name: str) -> Any:  # noqa: ANN401 - code
    path = absolute(name)
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __spec__=None, __cached__=None, __loader__=loader)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
