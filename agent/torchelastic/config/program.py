"""Determine the kind of the workers' program, and whether the fork server can start it."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.config.settings import Program, ProgramKind, StartMethod

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READ_AT_IMPORT: Final = (
    "ACC_",  # OpenMP
    "GOMP_",
    "KMP_",
    "OMP_",
    "OPENBLAS_",  # numerical libraries below numpy and torch
    "GOTO_",
    "NPY_",
    "VECLIB_",
    "NUMEXPR_",
    "MKL_",
    "DNNL_",
    "MKLDNN_",
    "ONEDNN_",
    "PYTORCH_",  # torch itself
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
)
"""Prefixes of variables that torch and its libraries read when they are imported."""

_READ_AT_USE: Final = ("TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR")
"""Exceptions: prefixes of variables that torch reads at each use."""

_READ_AT_START: Final = ("PYTHON", "LANG", "LC_", "LD_", "GLIBC_TUNABLES", "MALLOC_")
"""Prefixes of variables that the interpreter, the dynamic linker or the C library read when a process starts."""

_OF_THE_COMPILER: Final = ("TORCHDYNAMO_", "TORCHINDUCTOR_")
"""Prefixes of variables that torch reads when it imports its compiler, which is later than its own import."""

_STARTED_WITH_INTERPRETER: Final = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Variables that ask for a tool that only starts with an interpreter."""

_ASSIGNMENT: Final = re.compile(
    r"\benviron(?:\[|\.setdefault\(|\.update\(\{?)\s*[\"']?(?P<name>[A-Z][A-Z0-9_]+)[\"']?\s*(?:\]\s*=[^=]|[,:]|=[^=])"
)
_IMPORTS_TORCH: Final = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)


def program_of_command(argv: Sequence[str], start_method: StartMethod = StartMethod.FORK_SERVER) -> Program:
    """Return the program that a command line starts.

    ``python x.py …`` and ``python -m x …`` are Python programs. Anything else is a command, including an
    interpreter with flags and any other interpreter.
    """
    command, *rest = argv
    if rest and _is_this_python(command):
        if rest[0] == "-m" and len(rest) > 1:
            return Program(ProgramKind.MODULE, tuple(rest[1:]), start_method)
        if not rest[0].startswith("-"):
            return Program(ProgramKind.SCRIPT, tuple(rest), start_method)
    return Program(ProgramKind.COMMAND, tuple(argv), start_method)


def _is_this_python(command: str) -> bool:
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    return command in names or ("/" in command and Path(command) == Path(sys.executable))


def python_command(
    kind: str, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the command and environment of a script or module in a new interpreter, with unbuffered output."""
    module = ["-m"] if kind == "module" else []
    return [sys.executable, *module, *argv], {"PYTHONUNBUFFERED": "1", **environment}


def search_path(kind: str, name: str) -> str:
    """Return the folder or archive in which a program looks for modules first; empty if there is none.

    Args:
        kind: ``script`` or ``module``.
        name: the name of the script or module.
    """
    if kind == "module":
        return "" if sys.flags.safe_path else str(Path.cwd())
    if is_container(name):
        return absolute(name)
    return "" if sys.flags.safe_path else str(Path(name).resolve().parent)


def is_container(name: str) -> bool:
    """Return whether this is a folder or an archive, which Python runs by its ``__main__``."""
    return pkgutil.get_importer(name) is not None


def absolute(name: str) -> str:
    """Return the absolute path as the interpreter computes it, with its dots."""
    return str(Path.cwd()) if name == "." else os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118


def changed_imports(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the variables that a new interpreter in ``after`` reads, but a process forked in ``before`` does not."""
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    changed = [name for name in names if name.startswith(_READ_AT_START) or is_read_at_import(name)]
    return sorted({*changed, *(name for name in _STARTED_WITH_INTERPRETER if name in after)})


def is_read_at_import(name: str) -> bool:
    """Return whether torch or one of its libraries reads this variable only when it is imported."""
    return name.startswith(READ_AT_IMPORT) and not name.startswith(_READ_AT_USE)


def reason_to_execute(program: Program) -> str:
    """Return why the workers of a Python program need a new interpreter; empty if they can be forked."""
    name = program.argv[0]
    if program.kind is ProgramKind.SCRIPT and name.endswith(".pyc"):
        return f"{name} is compiled"
    path = Path(name) if program.kind is ProgramKind.SCRIPT else Path(f"{name.replace('.', '/')}.py")
    try:
        source = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    before_torch = _IMPORTS_TORCH.split(source, maxsplit=1)[0]
    names = {match["name"] for match in _ASSIGNMENT.finditer(before_torch)}
    names |= {match["name"] for match in _ASSIGNMENT.finditer(source) if match["name"].startswith(_OF_THE_COMPILER)}
    names = {*filter(is_read_at_import, names)}
    return f"{path.name} sets {', '.join(sorted(names))}, which torch reads when it is imported" if names else ""
