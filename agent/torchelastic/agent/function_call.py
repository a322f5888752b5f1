"""Send a function to the workers, and collect the results or exceptions of their calls.

The function and the results are files in the agent's scratch folder, which only this user can read, and which the agent
removes when it exits. Only the program that starts the workers and the workers themselves write these files; no other
data is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import importlib
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

from torchelastic.errors import SettingsError
from torchelastic.protocol.worker import WORKER_SOCKET
from torchelastic.training.errors import record_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CALL_MODULE: Final = "torchelastic.agent.function_call"
"""The program of workers that make a call: this module."""

_CALL: Final = "call"
_ENVIRONMENT: Final = "environment"

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
    for pattern in ("result.*", "exception.*"):
        for left in scratch.glob(pattern):
            left.unlink()
    try:
        (scratch / _ENVIRONMENT).write_text(json.dumps(dict(environment)))
        (scratch / _CALL).write_bytes(call)
    except OSError as error:
        raise SettingsError(
            f"The function for the workers cannot be written to {scratch}: {error.strerror}. Free disk space in this "
            "folder, or set TMPDIR to another folder."
        ) from None


def code_folder(scratch: Path) -> Path:
    """Return the folder with the caller's modules, if they were sent to this host; it comes first in ``sys.path``."""
    return scratch / "code"


def result_file(scratch: Path, round: int, rank: int) -> Path:
    """Return the file with the result of a worker, if it has returned: its value, pickled."""
    return scratch / f"result.{round}.{rank}"


def exception_file(scratch: Path, round: int, rank: int) -> Path:
    """Return the file with the exception that a worker has raised: the pickled traceback and pickled exception."""
    return scratch / f"exception.{round}.{rank}"


def read_results(scratch: Path, round: int, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the results of a round's workers by global rank; None for a worker that did not return."""
    paths = {rank: result_file(scratch, round, rank) for rank in ranks}
    return {
        rank: pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301 - written by our own worker
        for rank, path in paths.items()
    }


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
        _write_result(result_file(*own), function(*arguments))
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


def _write_result(path: Path, result: Any) -> None:  # noqa: ANN401 - the function's value
    import cloudpickle

    try:
        with path.open("wb") as stream:
            cloudpickle.dump(result, stream, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        path.unlink(missing_ok=True)
        raise SettingsError(
            f"The result of the function cannot be passed to the caller: {type(error).__name__}: {error}."
        ) from error


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
