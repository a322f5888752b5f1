"""Send a function to the workers, and collect the results of their calls.

The function and the results are files in the agent's scratch folder, which only this user can read, and which the agent
removes when it exits. Only the program that starts the workers and the workers themselves write these files; no other
data is unpickled.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torchelastic.errors import SettingsError
from torchelastic.protocol.worker import WORKER_SOCKET
from torchelastic.training.errors import record_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CALL: Final = "call"


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


def serialize_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Serialize the call that each worker makes, as :func:`pickle_call` does. Pass the result to :func:`write_call`."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    file = Path(getattr(main, "__file__", None) or "").absolute()  # interactive code has no real file
    # The worker sets sys.path before it unpickles the function: the module of the function may be on this path only.
    settings = sys.path, sys.argv, name, str(file) if file.is_file() else None
    return pickle.dumps((settings, pickle_call(function, arguments)))


def write_call(scratch: Path, call: bytes) -> None:
    """Write the call to the agent's scratch folder.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        (scratch / _CALL).write_bytes(call)
    except OSError as error:
        raise SettingsError(
            f"The function for the workers cannot be written to {scratch}: {error.strerror}. Free disk space in this "
            "folder, or set TMPDIR to another folder."
        ) from None


def read_results(scratch: Path, round: int, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the results of a round's workers by global rank; None for a worker that did not return."""
    paths = {rank: scratch / _result_name(round, rank) for rank in ranks}
    return {
        rank: pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301 - written by our own worker
        for rank, path in paths.items()
    }


def make_call() -> None:
    """In a worker: call the function, and write its return value to a file."""
    scratch = Path(os.environ[WORKER_SOCKET]).parent
    (path, argv, name, file), call = pickle.loads((scratch / _CALL).read_bytes())  # noqa: S301 - written by the agent
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv[:] = argv
    function, arguments = pickle.loads(call)  # noqa: S301 - likewise
    main = sys.modules["__main__"]
    main.__spec__ = ModuleSpec(name, None) if name else None
    main.__file__ = file
    # With these names, the worker can pickle the program's objects by name, and its child processes can import them.
    for thing in (function, *map(type, arguments)):
        used = {**getattr(thing, "__globals__", {}), getattr(thing, "__name__", ""): thing}
        vars(main).update({key: each for key, each in used.items() if getattr(each, "__module__", None) == "__main__"})
    result = function(*arguments)

    import cloudpickle

    name = _result_name(int(os.environ["TORCHELASTIC_ROUND"]), int(os.environ["RANK"]))
    (scratch / name).write_bytes(cloudpickle.dumps(result))


def _result_name(round: int, rank: int) -> str:
    return f"result.{round}.{rank}"


if __name__ == "__main__":  # in a worker; imports this module by its real name, because the call overwrites __main__
    try:
        importlib.import_module("torchelastic.agent.function_call").make_call()
    except Exception as error:
        record_exception(error)
        raise
