"""Carrying a function to the workers that call it, and its results back.

Both are files in the agent's scratch folder, which only this user can read and which is removed with the agent. They
are written by the program that starts the workers and by the workers; nothing from elsewhere is unpickled.

Classes and functions of the launching program itself are carried by value, and are found in the worker where they were
found there: in ``__main__``. So a worker can save them, or hand them to its own processes, which import the launching
program by its name.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torchelastic.config.settings import Program, ProgramKind
from torchelastic.errors import SettingsError
from torchelastic.training.agent_socket import CHANNEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchelastic.config.settings import StartMethod

_CALL: Final = "call"


def pickled(*things: object) -> bytes:
    """A function and its arguments as bytes, with what of ``__main__`` they use, by name.

    Raises:
        SettingsError: they cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError:
        raise SettingsError("Functions are carried to workers by cloudpickle: pip install cloudpickle.") from None
    seen: set[int] = set()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
        def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 - whatever cloudpickle returns
            seen.add(id(obj))
            return super().reducer_override(obj)

    try:
        Pickler(io.BytesIO()).dump(things)
        mains = vars(sys.modules["__main__"]).items()
        used = {name: thing for name, thing in mains if id(thing) in seen and _is_defined_there(thing)}
        return cast("bytes", cloudpickle.dumps((*things, used)))
    except Exception as error:
        raise SettingsError(
            f"The function {getattr(things[0], '__qualname__', things[0])!s} or what it is called with cannot be "
            f"carried to a worker: {type(error).__name__}: {error}. Open files, locks, sockets and the like have "
            "to be made in the function itself."
        ) from error


class FunctionCall:
    """A call of a function, made by each worker.

    Args:
        function: the function.
        arguments: its arguments.

    Raises:
        SettingsError: they cannot be carried to a worker.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        # The worker sets the path before it unpickles the function, whose module may be found there only.
        self._carried = pickle.dumps((sys.path, sys.argv, _main(), pickled(function, arguments)))

    @staticmethod
    def program(start_method: StartMethod) -> Program:
        """The program that makes the call in a worker."""
        return Program(ProgramKind.MODULE, ("torchelastic.agent.function_worker",), start_method)

    def put(self, scratch: Path) -> None:
        """Write the call to the agent's scratch folder.

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
    def results(scratch: Path, round: int, ranks: Iterable[int]) -> dict[int, Any]:
        """What the workers of a round returned, by global rank; None for one that ended in another way."""
        paths = {rank: scratch / _result_name(round, rank) for rank in ranks}
        return {
            rank: pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301 - written by our own worker
            for rank, path in paths.items()
        }


def make_call() -> None:
    """In a worker: call the function, and keep what it returns."""
    scratch = Path(os.environ[CHANNEL]).parent
    path, argv, (name, file), call = pickle.loads((scratch / _CALL).read_bytes())  # noqa: S301 - written by the agent
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv[:] = argv
    function, arguments, used = pickle.loads(call)  # noqa: S301 - likewise
    main = sys.modules["__main__"]
    main.__spec__ = ModuleSpec(name, None) if name else None
    main.__file__ = file
    vars(main).update(used)
    result = function(*arguments)

    import cloudpickle

    name = _result_name(int(os.environ["TORCHELASTIC_ROUND"]), int(os.environ["RANK"]))
    _write(scratch / name, cloudpickle.dumps(result))


def _main() -> tuple[str | None, str | None]:
    """The name and the file of the launching program, as far as it has them."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    file = Path(
        getattr(main, "__file__", None) or ""
    ).absolute()  # code that was typed in has none, or none that exists
    return name, str(file) if file.is_file() else None


def _is_defined_there(thing: object) -> bool:
    """Whether a class or function is one of ``__main__``."""
    return issubclass(type(thing), type | types.FunctionType) and thing.__module__ == "__main__"


def _result_name(round: int, rank: int) -> str:
    return f"result.{round}.{rank}"


def _write(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, as a whole or not at all."""
    partial = path.with_name(f"{path.name}.part")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
    partial.rename(path)
