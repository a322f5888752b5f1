"""Send a function to the workers, and collect the results or exceptions of their calls.

The function and the results are files in the agent's scratch folder, which only this user can read, and which the agent
removes when it exits; a result is in memory if there is enough. Only the program that starts the workers, and the
workers themselves, write these files; no other data is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime as dt
import errno
import importlib
import io
import json
import logging
import os
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from torchelastic.config.machine import available_memory
from torchelastic.errors import SettingsError
from torchelastic.protocol.worker import MEMORY, WORKER_SOCKET
from torchelastic.training.errors import record_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CALL_MODULE: Final = "torchelastic.agent.function_call"
"""The program of workers that make a call: this module."""

_CALL: Final = "call"
_ENVIRONMENT: Final = "environment"

_MEMORY_RESERVE: Final = 1 << 28
"""Bytes of memory that stay available beside a result and its copy in the launching program."""

_WRITE_SIZE: Final = 1 << 25

RECORD_MARK: Final = "\x1e"
"""The first character of a line of standard error that is a log record: its level, logger and message, as JSON."""


@dataclass(frozen=True)
class Setup:
    """What a worker sets up before it calls the function.

    Attributes:
        backend: the backend of the process group that the worker creates; "auto" for nccl with GPUs and gloo without;
            None for no process group.
        timeout: seconds after which a collective of this group fails.
        records: whether log records go to standard error as :data:`RECORD_MARK` describes.
        exits_at_once: whether the worker exits like the children of multiprocessing: after its threads and the
            functions of atexit, but without the interpreter's teardown, which takes 0.3 s with torch.
    """

    backend: str | None = None
    timeout: float = 600.0
    records: bool = False
    exits_at_once: bool = False


NO_SETUP: Final = Setup()


def pickle_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments as bytes; objects of ``__main__`` are pickled by value.

    Raises:
        SettingsError: the function or its arguments cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError:
        raise SettingsError("cloudpickle is needed to pass a function to workers: pip install cloudpickle.") from None
    try:
        return cast("bytes", cloudpickle.dumps((function, arguments)))
    except Exception as error:
        raise SettingsError(
            f"The function {getattr(function, '__qualname__', function)!s} or its arguments cannot be passed to a "
            f"worker: {type(error).__name__}: {error}. Create open files, locks and sockets in the function itself."
        ) from error


def serialize_call(function: Callable[..., Any], arguments: tuple[Any, ...], setup: Setup = NO_SETUP) -> bytes:
    """Serialize the call that each worker makes, as :func:`pickle_call` does. Pass the result to :func:`write_call`."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    file = Path(getattr(main, "__file__", None) or "").absolute()  # interactive code has no real file
    # The worker sets sys.path before it unpickles the function: the module of the function may be on this path only.
    settings = sys.path, sys.argv, name, str(file) if file.is_file() else None
    return pickle.dumps((settings, setup, pickle_call(function, arguments)))


def write_call(scratch: Path, call: bytes, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the call to the agent's scratch folder, and remove what an earlier call has left there.

    Args:
        scratch: the folder.
        call: the result of :func:`serialize_call`.
        environment: variables that the workers set before they unpickle the function.

    Raises:
        SettingsError: the file cannot be written.
    """
    remove_results(scratch)
    try:
        (scratch / _ENVIRONMENT).write_text(json.dumps(dict(environment)))
        (scratch / _CALL).write_bytes(call)
    except OSError as error:
        raise SettingsError(
            f"The function for the workers cannot be written to {scratch}: {error.strerror}. Free disk space in this "
            "folder, or set TMPDIR to another folder."
        ) from None


def remove_results(scratch: Path, *, other_than: int = -1) -> None:
    """Remove the results and exceptions of all rounds, or those of all other rounds."""
    for pattern in ("result.*", "exception.*", f"{MEMORY}/result.*"):
        for left in scratch.glob(pattern):
            if left.suffixes[0] != f".{other_than}":
                left.unlink(missing_ok=True)


def code_folder(scratch: Path) -> Path:
    """Return the folder with the caller's modules, if they were sent to this host; it comes first in ``sys.path``."""
    return scratch / "code"


def result_file(scratch: Path, round: int, rank: int) -> Path:
    """Return the file with the result of a worker, if it has returned: its value, pickled."""
    name = f"result.{round}.{rank}"
    return in_memory if (in_memory := scratch / MEMORY / name).exists() else scratch / name


def exception_file(scratch: Path, round: int, rank: int) -> Path:
    """Return the file with the exception that a worker has raised: the pickled traceback and pickled exception."""
    return scratch / f"exception.{round}.{rank}"


def read_results(scratch: Path, round: int, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the results of a round's workers by global rank; None for a worker that did not return."""
    results = dict.fromkeys(ranks)
    for rank in results:
        with contextlib.suppress(FileNotFoundError), result_file(scratch, round, rank).open("rb") as stream:
            results[rank] = pickle.load(stream)  # noqa: S301 - written by our own worker
    return results


def make_call() -> None:
    """In a worker: call the function, and write its return value, or the exception that it raises, to a file."""
    scratch = Path(os.environ[WORKER_SOCKET]).parent
    own = scratch, int(os.environ["TORCHELASTIC_ROUND"]), int(os.environ["RANK"])
    os.environ.update(json.loads((scratch / _ENVIRONMENT).read_text()))
    (path, argv, name, file), setup, call = pickle.loads((scratch / _CALL).read_bytes())  # noqa: S301 - written by the agent
    path = [f"{code_folder(scratch)}", *path] if code_folder(scratch).exists() else path
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv[:] = argv
    if setup.records:
        logging.basicConfig(
            handlers=[_RecordHandler()], level=logging.INFO, format="%(levelname)s:%(name)s:%(message)s"
        )
    import cloudpickle

    try:
        function, arguments = pickle.loads(call)  # noqa: S301 - likewise
        main = sys.modules["__main__"]
        main.__spec__ = ModuleSpec(name, None) if name else None
        main.__file__ = file
        # With these names, the worker can pickle the program's objects by name, and its child processes import them.
        for thing in (getattr(function, "func", function), *map(type, arguments)):
            names = getattr(thing, "__globals__", None)  # of a function; the type of functions has a descriptor
            used = {**(names if isinstance(names, dict) else {}), getattr(thing, "__name__", ""): thing}
            vars(main).update(
                {key: each for key, each in used.items() if getattr(each, "__module__", None) == "__main__"}
            )
        if setup.backend is not None:
            _init_process_group(setup.backend, setup.timeout)
        _write_result(*own, function(*arguments))
    except Exception as error:
        pickled = b""
        with contextlib.suppress(Exception):  # the text of the exception remains
            pickled = cloudpickle.dumps(error)
        with contextlib.suppress(OSError):  # likewise
            exception_file(*own).write_bytes(pickle.dumps(("".join(traceback.format_exception(error)), pickled)))
        if setup.exits_at_once:
            record_exception(error)
            traceback.print_exception(error)
            _exit_at_once(1)
        raise
    if setup.backend is not None:
        from torch.distributed import destroy_process_group, is_initialized

        if is_initialized():  # the function may have ended it
            destroy_process_group()
    if setup.exits_at_once:
        _exit_at_once(0)


def _exit_at_once(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as in multiprocessing
    atexit._run_exitfuncs()  # noqa: SLF001 - likewise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_result(scratch: Path, round: int, rank: int, result: Any) -> None:  # noqa: ANN401 - the function's value
    remove_results(scratch, other_than=round)
    path = result_file(scratch, round, rank)
    try:
        try:
            _pickle_result(result, _MemoryFile(scratch / MEMORY / path.name, "wb"))
        except OSError:
            (scratch / MEMORY / path.name).unlink(missing_ok=True)
            _pickle_result(result, io.FileIO(path, "wb"))
    except Exception as error:
        result_file(scratch, round, rank).unlink(missing_ok=True)
        raise SettingsError(
            f"The result of the function cannot be passed to the caller: {type(error).__name__}: {error}."
        ) from error


class _MemoryFile(io.FileIO):
    """A file in memory; writing raises OSError if too little memory is available."""

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer, as in io
        """Write a part of the data, and return its size."""
        part = memoryview(data)[:_WRITE_SIZE]
        if len(part) == _WRITE_SIZE and available_memory() < self.tell() + _MEMORY_RESERVE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(part)


def _pickle_result(result: Any, file: io.FileIO) -> None:  # noqa: ANN401 - the function's value
    """Pickle the result, with tensors as :class:`_Memory` describes."""
    import cloudpickle

    memories: dict[tuple[int, int], _Memory] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - of any type
            if type(obj).__module__ == "torch.storage" and type(obj).__name__ in {"TypedStorage", "UntypedStorage"}:
                storage = getattr(obj, "_untyped_storage", obj)
                if storage.device.type == "cpu" and (size := storage.nbytes()):
                    memory = memories.setdefault((storage.data_ptr(), size), _Memory(storage))
                    return _typed_storage, (memory, getattr(obj, "dtype", None))
            return super().reducer_override(obj)

    with io.BufferedWriter(file, _WRITE_SIZE) as stream:
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(result)


class _Memory:
    """The memory of tensors, which is not copied to be pickled; tensors that share it still share what is unpickled."""

    def __init__(self, storage: Any) -> None:  # noqa: ANN401 - agents do not import torch
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        kind = ctypes.c_ubyte * self._storage.nbytes()
        return _storage, (pickle.PickleBuffer(kind.from_address(self._storage.data_ptr())),)


def _storage(memory: bytearray) -> Any:  # noqa: ANN401 - likewise
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:  # noqa: ANN401 - likewise
    import torch

    # Tensors of the newer types have an untyped storage, but are made from a typed one.
    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=untyped, dtype=dtype or torch.uint8, _internal=True)


def _init_process_group(backend: str, timeout: float) -> None:
    import torch

    chosen = ("nccl" if torch.cuda.is_available() else "gloo") if backend == "auto" else backend
    if chosen == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(chosen, timeout=dt.timedelta(seconds=timeout))
    if chosen == "gloo":  # a worker that returns at once must not close connections that its peers are still making
        torch.distributed.barrier()


class _RecordHandler(logging.StreamHandler[Any]):
    """Writes records to standard error as :data:`RECORD_MARK` describes."""

    def format(self, record: logging.LogRecord) -> str:
        return RECORD_MARK + json.dumps([record.levelno, record.name, super().format(record)])


if __name__ == "__main__":  # in a worker; imports this module by its real name, because the call overwrites __main__
    try:
        importlib.import_module(CALL_MODULE).make_call()
    except Exception as error:
        record_exception(error)
        raise
