"""What the source of a Python program shows before its workers start."""

from __future__ import annotations

import ast
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.agent.workers.fork_server import is_installed, search_path
from torchelastic.config.settings import ProgramKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchelastic.config.settings import Program

_READ_AT_IMPORT: Final = (
    *("ACC_", "GOMP_", "KMP_", "OMP_"),  # OpenMP
    *("OPENBLAS_", "GOTO_", "NPY_", "VECLIB_", "NUMEXPR_", "MKL_", "DNNL_", "MKLDNN_", "ONEDNN_"),  # numpy and torch
    *("PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
"""Prefixes of variables that torch and its libraries read when they are imported."""

_READ_AT_USE: Final = ("TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR")
"""Prefixes of variables that torch reads at each use, although they have one of the prefixes above."""

_READ_BY_COMPILER: Final = ("TORCHDYNAMO_", "TORCHINDUCTOR_")
"""Prefixes of variables that torch reads when it imports its compiler, which is later than its own import."""


def path_of(program: Program) -> Path:
    """Return the file of a script, or the file that a module has if it is in the working directory."""
    name = program.argv[0]
    return Path(name) if program.kind is ProgramKind.SCRIPT else Path(f"{name.replace('.', '/')}.py")


def parse(program: Program) -> ast.Module:
    """Return the syntax tree of a program; an empty one if its source cannot be read or is not Python."""
    path = path_of(program)
    try:
        # A pipe, such as /dev/stdin, can be read only once; a command is not Python.
        readable = program.kind is not ProgramKind.COMMAND and path.is_file()
        source = path.read_text(encoding="utf-8", errors="replace") if readable else ""
        with warnings.catch_warnings(action="ignore"):  # the program prints its warnings itself
            return ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deeply nested expressions
        return ast.Module([], [])


def variables_read_by_torch(tree: ast.Module) -> list[str]:
    """Return the variables that a program sets, although torch reads them when it is imported."""
    changed = _changed_variables(tree)
    return sorted(name for name in changed if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_AT_USE))


def first_imports(program: Program, tree: ast.Module) -> list[str]:
    """Return the installed modules that a program imports before it executes anything else.

    So nothing of the program, or of modules that are not installed, can change what these modules do when they are
    imported. torch's compiler is added if the program mentions DistributedDataParallel or ``optim``, which import it.
    """
    name = program.argv[0]
    if program.kind is ProgramKind.MODULE and "." in name:
        return []  # its packages are imported first
    found: list[str] = []
    folder = Path(search_path(program.kind.value, name))
    try:
        own = {entry.name.partition(".")[0] for entry in folder.iterdir()} if folder.is_dir() else set()
    except OSError:
        return []
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(name), level=0):
                names = [name]
            case _:
                break
        tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
        if not (own.isdisjoint(tops) and all(is_installed(top, PathFinder.find_spec(top)) for top in tops)):
            break
        found += names
    if any({"DistributedDataParallel", "optim"} & {*_names(node)} for node in ast.walk(tree)):
        found.append("torch._dynamo")
    return [name for name in found if name != "torch" and name.partition(".")[0] not in sys.stdlib_module_names]


def _names(node: ast.AST) -> list[str]:
    return [getattr(node, field, "") for field in ("id", "attr", "name")]


def _changed_variables(tree: ast.Module) -> set[str]:
    """Return the variables that a program sets in ``os.environ`` before it imports torch, or torch's compiler."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)]
    first_import = min((_position(node) for node in nodes if _imports_torch(node)), default=(sys.maxsize, 0))
    changed: set[str] = set()
    for node in nodes:
        names: Sequence[ast.expr | None] = ()
        match node:
            case ast.Subscript(value=target, slice=name, ctx=ast.Store()):
                names = [name]
            case ast.Call(func=ast.Attribute(value=target, attr="setdefault"), args=[name, *_]):
                names = [name]
            case ast.Call(func=ast.Attribute(value=target, attr="update"), args=values, keywords=keywords):
                names = [key for value in values if isinstance(value, ast.Dict) for key in value.keys]
                names = [*names, *(ast.Constant(keyword.arg) for keyword in keywords)]
            case ast.AugAssign(target=target, value=ast.Dict(keys=names)):
                pass
        if names and "environ" in _names(target):
            found = {str(name.value) for name in names if isinstance(name, ast.Constant)}
            early = _position(node) < first_import
            changed |= {name for name in found if early or name.startswith(_READ_BY_COMPILER)}
    return changed


def _position(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _imports_torch(node: ast.AST) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any(name.partition(".")[0] == "torch" for name in names)
