"""The exception with which a program ends its run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Self

from torchelastic.agent_socket import CHANNEL

if TYPE_CHECKING:
    from types import TracebackType


class NonRetryableException(Exception):  # noqa: N818 - the name that torchelastic's users know
    """Raised by a program to end the run: the run fails with this exception, and is not restarted.

    A program's own exceptions may derive from it. Only the exception that ends the worker counts.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Make sure that the agent learns of this exception if it ends the program."""
        _install_hook()
        return super().__new__(cls, *args, **kwargs)


def _install_hook() -> None:
    before = sys.excepthook
    if hasattr(before, "reports_to_agent") or not os.environ.get(CHANNEL):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, NonRetryableException):
            from torchelastic.agent.failures import record_exception

            record_exception(error)
        before(kind, error, trace)

    report.reports_to_agent = True  # type: ignore[attr-defined]
    sys.excepthook = report
