"""Running a script or a module as ``__main__``, as the interpreter itself would."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pkgutil
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader, all_suffixes
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchelastic.agent import error_file

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = f"{Path(__file__).parent}{os.sep}"
_CANNOT_OPEN = 2
_NO_MODULE = 1


def run(kind: str, argv: Sequence[str]) -> None:
    """Run the program.

    Args:
        kind: script or module.
        argv: the script or module, and its arguments.
    """
    main = _fresh_main()
    code = _module(main, argv) if kind == "module" else _script(main, argv)
    exec(code, main.__dict__)  # noqa: S102 - this is what it is for


def _fresh_main() -> types.ModuleType:
    """A module without a past, in the place of the one that there was."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"])
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    former = sys.modules["__main__"]
    for name, module in [*sys.modules.items()]:
        if module is former:  # as __main__, and as __mp_main__
            sys.modules[name] = main
    return main


def search_path(kind: str, name: str) -> str:
    """Where a program looks for modules first, before all of ``sys.path``; empty where it is to look there only.

    Args:
        kind: script or module.
        name: the script or module.
    """
    if kind == "module":
        return "" if sys.flags.safe_path else str(Path.cwd())
    if _is_container(name):
        return _absolute(name)
    return "" if sys.flags.safe_path else str(Path(name).resolve().parent)


def hides_imported_modules(folder: str) -> bool:
    """Whether a folder has a module that would have been imported in the place of one that is there already.

    Args:
        folder: where a program looks first; what was imported here was not looked for there.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(_hides(entry) for entry in entries)
    return False


def _hides(entry: os.DirEntry[str]) -> bool:
    name = entry.name.partition(".")[0]
    if name not in sys.modules or name in sys.builtin_module_names or name == "__main__":
        return False
    path = Path(entry.path)
    if entry.is_dir():
        path /= "__init__.py"
    if not entry.name.endswith((name, *all_suffixes())) or not path.is_file():
        return False
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is None or spec.origin is None or Path(spec.origin).resolve() != path.resolve()


def of_the_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that lies in the program, without our own frames before it."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def _script(main: types.ModuleType, argv: Sequence[str]) -> types.CodeType:
    name = argv[0]
    path = Path(name)
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, *argv]
    if first := search_path("script", name):
        sys.path.insert(0, first)
    if _is_container(name):
        return _container(main, name)
    main.__file__ = _absolute(name)
    main.__spec__ = None
    main.__dict__["__cached__"] = None
    if path.suffix == ".pyc":
        main.__loader__ = SourcelessFileLoader("__main__", main.__file__)
        return _of_spec(main, ModuleSpec("__main__", main.__loader__, origin=main.__file__))
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    try:
        source = path.read_bytes()
    except OSError as error:
        _refuse(
            f"can't open file {main.__file__!r}: [Errno {error.errno}] {error.strerror}",
            f"the program {name} cannot be opened: {error.strerror}",
            _CANNOT_OPEN,
        )
    return compile(source, main.__file__, "exec", dont_inherit=True)


def _is_container(name: str) -> bool:
    """Whether it is a folder or an archive with a __main__ in it."""
    return pkgutil.get_importer(name) is not None


def _absolute(name: str) -> str:
    """The path as the interpreter makes it absolute: dots in it are kept."""
    if name == ".":
        return str(Path.cwd())
    return name if name.startswith("/") else f"{Path.cwd()}/{name}"


def _container(main: types.ModuleType, name: str) -> types.CodeType:
    path = _absolute(name)
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None:
        line = f"can't find '__main__' module in {path!r}"
        _refuse(line, f"there is no __main__.py in {name}", _NO_MODULE)
    return _of_spec(main, spec)


def _module(main: types.ModuleType, argv: Sequence[str]) -> types.CodeType:
    name = argv[0]
    sys.orig_argv[:] = [sys.executable, "-m", *argv]
    sys.argv[:] = ["-m", *argv[1:]]
    if first := search_path("module", name):
        sys.path.insert(0, first)
    spec = _find(name)
    sys.argv[0] = spec.origin or name
    return _of_spec(main, spec)


def _find(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        _refuse(f"No module named {name}", f"there is no module {name}", _NO_MODULE)
    if spec.submodule_search_locations is not None:
        inner = importlib.util.find_spec(f"{name}.__main__")
        if inner is None:
            _refuse(
                f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed",
                f"the package {name} has no __main__",
                _NO_MODULE,
            )
        return inner
    return spec


def _of_spec(main: types.ModuleType, spec: ModuleSpec) -> types.CodeType:
    loader = spec.loader
    get_code = getattr(loader, "get_code", None)  # the loader of an archive has it, and is of no kind that says so
    code: types.CodeType | None = None if get_code is None else get_code(spec.name)
    if code is None:
        _refuse(f"No code object available for {spec.name}", f"the module {spec.name} has no Python code", _NO_MODULE)
    main.__spec__ = spec
    main.__loader__ = loader
    main.__package__ = spec.parent
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    return code


def _refuse(line: str, message: str, exit_code: int) -> NoReturn:
    """End as the interpreter does when it cannot run a program, with a sentence for the agent."""
    error_file.write_message(message)
    sys.stderr.write(f"{sys.executable}: {line}\n")
    raise SystemExit(exit_code)
