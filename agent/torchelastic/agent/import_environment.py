"""Environment variables that are read while modules are imported, and what follows for a process forked after that.

A forked worker has its imports behind it before its program begins. Where a variable that they read has another value
in the worker's environment, forking is not the same as a start by hand, and the worker is executed. Where the program
itself sets one and imports torch after that, it is too late (:mod:`torchelastic.agent.late_settings`).

Python code reads the environment through ``os.environ``, so what it reads is recorded while it is imported: exactly,
whatever is imported, and in whatever version. What native code reads can't be seen from here, so it is listed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from types import FrameType

TORCH: Final = "torch"

READ_BY_LIBRARIES: Final = (
    "ACC_",  # GNU's OpenMP, a part of torch's wheels
    "GOMP_",
    "OMP_",  # the same; OpenBLAS and torch itself read OMP_NUM_THREADS too
    "KMP_",  # LLVM's and Intel's OpenMP, with which others build torch
    "OPENBLAS_",  # numpy's OpenBLAS
    "GOTO_",
    "NPY_",  # numpy
    "VECLIB_",  # other numerical libraries, with which others build numpy
    "NUMEXPR_",
    "MKL_",  # Intel's MKL, a part of torch's wheels
    "DNNL_",  # oneDNN, another part of them, by all the names that it has had
    "MKLDNN_",
    "ONEDNN_",
    "PYTORCH_",  # torch's C++ part, from here on: PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_CUSTOM_TERMINATE",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LINALG_PREFER_",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_SYMMMEM",
)
"""Beginnings of names of variables that native code reads while torch is imported, found by tracing getenv(3).

Not among them, since they are read at the first use of what they are about: CUDA_*, CUBLAS_*, NCCL_*, TORCH_NCCL_*,
GLOO_*.
"""

_READ_AT_START: Final = (
    "PYTHON",  # the interpreter
    "LANG",  # the interpreter, for the encoding of text
    "LC_",
    "LD_",  # the dynamic linker
    "GLIBC_TUNABLES",  # the C library
    "MALLOC_",
)
"""Beginnings of names of variables that are read when any process starts."""

_READ_AGAIN: Final = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that torch reads while it is imported, and whenever it needs them."""

_MEASURES_AT_START: Final = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Variables with which a tool asks to be started with the interpreter."""

_OF_WORKERS: Final = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)
_OURS: Final = "TORCHELASTIC_"
"""Variables, and the beginning of names of more of them, that only workers have, each its own."""

_OF_THE_MAPPING: Final = ("os", "collections", "_collections_abc")
"""Where the methods of ``os.environ`` are."""


class ImportEnvironment:
    """What imports have read of this process's environment, and what they have changed in it.

    Attributes:
        at_start: the environment before the first import.
        read: the variables that were read, by the module that was imported.
    """

    def __init__(self) -> None:
        self.at_start: Mapping[str, str] = dict(os.environ)
        self.read: dict[str, AbstractSet[str]] = {}
        self._changes: dict[str, str] = {}

    @contextlib.contextmanager
    def importing(self, module: str, *, early: bool = True) -> Iterator[None]:
        """While a module is imported, with all that it imports.

        Args:
            module: its name.
            early: whether programs import it when they begin, so that what it sets is for them too.
        """
        before = dict(os.environ)
        names: set[str] = set()
        plain = type(os.environ)
        os.environ.__class__ = _recording(plain, names)  # in place: others hold the same object
        try:
            yield
        finally:
            os.environ.__class__ = plain
            vars(os.environ).pop("copying", None)
            self.read[module] = names.difference(_READ_AGAIN)
            if early:
                self._changes |= {name: value for name, value in os.environ.items() if before.get(name) != value}

    def of_workers(self, module: str) -> list[str]:
        """The variables among those that a module has read which only workers have."""
        return sorted(filter(_is_of_workers, self.read[module]))

    def must_be_executed(self, environment: Mapping[str, str]) -> bool:
        """Whether a process that is forked from this one would not be what an environment asks for."""
        return any(name in environment for name in _MEASURES_AT_START) or any(
            environment.get(name) != self.at_start.get(name) and self._counts(name)
            for name in environment.keys() | self.at_start.keys()
        )

    def _counts(self, name: str) -> bool:
        if _is_of_workers(name):
            return False
        return name.startswith((*_READ_AT_START, *READ_BY_LIBRARIES)) or any(
            name in names for names in self.read.values()
        )

    def completed(self, environment: Mapping[str, str]) -> dict[str, str]:
        """An environment with what the imports would have set in it."""
        changes = {
            name: value for name, value in self._changes.items() if environment.get(name) == self.at_start.get(name)
        }
        return {**environment, **changes}


def _is_of_workers(name: str) -> bool:
    return name in _OF_WORKERS or name.startswith(_OURS)


def _recording(plain: type[os._Environ[str]], names: set[str]) -> type[os._Environ[str]]:
    """The class of ``os.environ`` with the names of the variables that are asked for put down."""

    class Recording(plain):  # type: ignore[misc, valid-type] # a class is what it is
        copying: tuple[FrameType, int] | None = None

        def __getitem__(self, name: str) -> str:
            frame = _asker()
            # To make a copy of all is no reading of each. The standard library reads again when it needs to know.
            if (frame, frame.f_lineno) != self.copying and _package(frame) not in sys.stdlib_module_names:
                names.add(name)
            value: str = super().__getitem__(name)
            return value

        def __iter__(self) -> Iterator[str]:
            frame = _asker()
            self.copying = frame, frame.f_lineno
            yield from super().__iter__()

    return Recording


def _asker() -> FrameType:
    """The call that asks for something, behind the methods of ``os.environ`` itself."""
    frame = sys._getframe(2)  # noqa: SLF001 - there is no other way to know
    while frame.f_back is not None and _package(frame) in _OF_THE_MAPPING:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
