"""System calls for namespaces that Python 3.11 lacks."""

from __future__ import annotations

import ctypes
import enum
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


class Namespace(enum.IntFlag):
    """Namespace flags of unshare(2) and setns(2)."""

    MOUNT = 0x00020000
    CGROUP = 0x02000000
    UTS = 0x04000000
    IPC = 0x08000000
    PID = 0x20000000
    NET = 0x40000000


class Mount(enum.IntFlag):
    """Flags of mount(2)."""

    NONE = 0
    READ_ONLY = 0x1
    NO_SUID = 0x2
    NO_DEVICES = 0x4
    NO_EXEC = 0x8
    REMOUNT = 0x20
    BIND = 0x1000
    RECURSIVE = 0x4000
    PRIVATE = 0x40000


def unshare(namespaces: Namespace) -> None:
    """Move the calling process to new namespaces; a new PID namespace is for its children only."""
    _succeeded(_libc.unshare(int(namespaces)), "unshare", str(namespaces))


def mount(source: Path | str, target: Path | str, kind: str = "", flags: Mount = Mount.NONE, options: str = "") -> None:
    """Mount a folder, a file or a file system.

    Args:
        source: a folder or file for a bind mount; otherwise a label.
        target: the mount point.
        kind: the file system type; empty for a bind mount, a remount or a change of propagation.
        flags: the flags of mount(2).
        options: the options of the file system.

    Raises:
        OSError: the kernel refuses the mount.
    """
    # Paths need not be UTF-8, so they are passed as bytes.
    arguments = [os.fsencode(value) for value in (source, target, kind)]
    _succeeded(_libc.mount(*arguments, ctypes.c_ulong(int(flags)), os.fsencode(options)), "mount", str(target))


def die_with_parent() -> None:
    """Have the kernel kill the calling process with SIGKILL when the thread that started it ends."""
    _succeeded(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl", "PR_SET_PDEATHSIG")


def _succeeded(result: int, call: str, about: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", about)
