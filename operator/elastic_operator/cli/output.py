"""Tell a standard output that cannot be written, as on a full disk, from other errors.

An OSError does not say which file it is about, so the standard output raises an error of its own.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class OutputLost(OSError):  # noqa: N818 - it says what happened
    """The standard output cannot be written; if its reader went away, that is a BrokenPipeError instead."""


class _Output(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from None


def watch() -> None:
    """Make this process's standard output raise :class:`OutputLost`, unless it was replaced.

    Raises:
        OutputLost: there is no standard output.
    """
    own = sys.stdout
    if own is None:
        raise OutputLost(errno.EBADF, os.strerror(errno.EBADF))
    if own is not sys.__stdout__ or not isinstance(own, io.TextIOWrapper):
        return
    raw = _Output(own.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if own.write_through else io.BufferedWriter(raw),
        encoding=own.encoding,
        errors=own.errors,
        line_buffering=own.line_buffering,
        write_through=own.write_through,
    )


def drop() -> None:
    """Discard what is still buffered, which the interpreter would write at its end."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def lost(error: BaseException) -> OutputLost | None:
    """Return the OutputLost that an error, or a group of one, consists of; None if there is none."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, OutputLost) else None
