"""The two settings of prctl(2) that supervision needs, which Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_SET_PARENT_DEATH_SIGNAL: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_GET_CHILD_SUBREAPER: Final = 37


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent dies.

    It concerns the parent at the time of that death, so a process that was forked twice calls this once it has its
    last parent, and then looks whether that one is still there. It survives exec, but children do not inherit it.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(number))


def set_subreaper(*, on: bool) -> None:
    """Have descendants of the calling process whose parent dies become its own children, as if it were PID 1."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(on))


def is_subreaper() -> bool:
    """Whether orphaned descendants become children of the calling process."""
    value = ctypes.c_int()
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)
