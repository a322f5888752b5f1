"""The exceptions that end a worker."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.protocol.worker import ERROR_FILE, WORKER_SOCKET
from torchelastic.training.error_file import record_message

if TYPE_CHECKING:
    from types import TracebackType

_RECORD: Final = '/torch/distributed/elastic/multiprocessing/errors/__init__.py"'
"""The file of ``@record`` in the traceback of an exception that it has recorded."""


class NonRetryableException(Exception):  # noqa: N818 - the established name
    """Raised by a program to end the run: the run fails with this exception and is not restarted.

    A program's own exceptions may derive from this class. Only the exception that ends the worker counts. If
    torchelastic has raised it, the worker prints no traceback; the error file has it.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Install the hook that reports this exception to the agent if it ends the program."""
        _install_hook()
        return super().__new__(cls, *args, **kwargs)


def _install_hook() -> None:
    before = sys.excepthook
    if hasattr(before, "reports_to_agent") or not os.environ.get(WORKER_SOCKET):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, NonRetryableException):
            record_exception(error)
            if _is_ours(trace):  # its sentence says what to change
                error, trace = error.with_traceback(None), None
        before(kind, error, trace)

    report.reports_to_agent = True  # type: ignore[attr-defined]
    sys.excepthook = report


def _is_ours(trace: TracebackType | None) -> bool:
    """Return whether a function of torchelastic has raised an exception with this traceback, not the program."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace)]
    return bool(modules) and modules[-1].startswith("torchelastic.")


def record_exception(error: BaseException) -> None:
    """Write an uncaught exception to the error file, unless ``@record`` has written it.

    An exception that ``@record`` has written is replaced only if it is final, because ``@record`` does not record this.
    """
    name, text, final = type(error).__qualname__, _text_of(error), isinstance(error, NonRetryableException)
    trace = "".join(traceback.format_exception(error))
    if final or _RECORD not in trace or not Path(os.environ.get(ERROR_FILE, "")).is_file():
        record_message(f"{name}: {text}" if text else name, trace, final=final)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the program's class may raise anything
        return ""
