"""Carrying a function to the workers that call it, and what it returned back.

All of it lies in the agent's scratch folder, which only this user can look into and which is removed however the agent
ends. It is written by the program that starts the workers, and by the workers themselves; nothing that comes from
elsewhere is ever unpickled.

What stands in the launching program itself is carried over as it is, and is found in the worker where it was found
there: in ``__main__``. So a worker can save a model of such a class, or hand it to processes of its own, which import
the launching program by its name, as those of any program do.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.errors import SettingsError
from torchelastic.settings import Program, ProgramKind
from torchelastic.worker import CHANNEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchelastic.settings import StartMethod

_CALL: Final = "call"


class FunctionCall:
    """A call of a function, made by each worker.

    Args:
        function: what is called.
        arguments: with which.

    Raises:
        SettingsError: they cannot be carried over.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            import cloudpickle
        except ImportError:
            raise SettingsError("Functions are carried to workers by cloudpickle: pip install cloudpickle.") from None
        try:
            call = cloudpickle.dumps((function, arguments))
        except Exception as error:
            raise SettingsError(
                f"The function {getattr(function, '__qualname__', function)!s} or what it is called with cannot be "
                f"carried to a worker: {type(error).__name__}: {error}. Open files, locks, sockets and the like have "
                "to be made in the function itself."
            ) from error
        # By the time the function is unpickled, its module can be imported from wherever it could be here.
        self._carried = pickle.dumps((sys.path, sys.argv, _main(), call))

    @staticmethod
    def program(start_method: StartMethod) -> Program:
        """What a worker runs to make the call."""
        return Program(ProgramKind.MODULE, ("torchelastic.agent.function_worker",), start_method)

    def put(self, scratch: Path) -> None:
        """Lay the call where the workers find it.

        Args:
            scratch: the agent's scratch folder.

        Raises:
            SettingsError: there is no room for it.
        """
        try:
            _write(scratch / _CALL, self._carried)
        except OSError as error:
            raise SettingsError(
                f"What the workers are to call cannot be written below {scratch}: {error.strerror}. Make room there, "
                "or name another folder in TMPDIR."
            ) from None

    @staticmethod
    def results(scratch: Path, epoch: int, ranks: Iterable[int]) -> dict[int, Any]:
        """What the workers of an epoch returned, by global rank; None for one that ended with 0 in another way."""
        return {rank: _result(scratch / _result_name(epoch, rank)) for rank in ranks}


def make_call() -> None:
    """In a worker: call the function, and keep what it returns."""
    scratch = Path(os.environ[CHANNEL]).parent
    path, argv, main, call = pickle.loads((scratch / _CALL).read_bytes())  # noqa: S301 - written by the agent
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv[:] = argv
    function, arguments = pickle.loads(call)  # noqa: S301 - likewise
    _become(*main)
    result = function(*arguments)

    import cloudpickle

    name = _result_name(int(os.environ["TORCHELASTIC_EPOCH"]), int(os.environ["RANK"]))
    _write(scratch / name, cloudpickle.dumps(result))


def _main() -> tuple[str | None, str | None]:
    """The name and the file of the launching program, as far as it has them."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    # One that is typed in has no file, or one that is not there.
    file = Path(getattr(main, "__file__", None) or "").absolute()
    return name, str(file) if file.is_file() else None


def _become(name: str | None, file: str | None) -> None:
    """Take the launching program's place, with what was carried over of it."""
    main = sys.modules["__main__"]
    main.__spec__ = ModuleSpec(name, None) if name else None
    main.__file__ = file
    made: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: there are objects that warn of being asked for their class
        if issubclass(kind, type | types.FunctionType) and thing.__module__ == "__main__":
            made[thing.__qualname__] = thing
            if kind is types.FunctionType:
                known |= thing.__globals__  # by the names of the program: one that is decorated is there twice
    names = {name: thing for name, thing in {**made, **known}.items() if name.isidentifier()}
    vars(main).update((name, thing) for name, thing in names.items() if not name.startswith("__"))


def _result(path: Path) -> Any:  # noqa: ANN401 - whatever the function returned
    return pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301 - written by our own worker


def _result_name(epoch: int, rank: int) -> str:
    return f"result.{epoch}.{rank}"


def _write(path: Path, data: bytes) -> None:
    """Write a file for this user alone, as a whole or not at all."""
    partial = path.with_name(f"{path.name}.part")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
    partial.rename(path)
