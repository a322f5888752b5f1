"""The signals that ask an agent to go: the first one makes it leave in order, a second one ends it at once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from torchelastic.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

Result = TypeVar("Result")

LEAVING_SIGNALS: Final = {signal.SIGTERM: ExitCode.LEFT, signal.SIGINT: ExitCode.INTERRUPTED}
"""With the exit code of an agent that has left on each of them."""


class SignalledFirst(Exception):  # noqa: N818 - control flow within the agent
    """A signal came before something was done."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Listens to the signals that ask the agent to go; a context manager, after which they do nothing any more.

    Args:
        came: called for each of them.

    Attributes:
        hurry: set by the second one.
    """

    def __init__(self, came: Callable[[signal.Signals], None]) -> None:
        self.hurry = asyncio.Event()
        self._came = came
        self._first: asyncio.Future[signal.Signals] | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        for number in LEAVING_SIGNALS:
            loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVING_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # or its last words would be lost to one that comes late

    async def unless_first(self, doing: Coroutine[Any, Any, Result]) -> Result:
        """Do something, unless a signal comes first.

        Raises:
            SignalledFirst: one did; what was being done is cancelled.
        """
        if self._first is None:
            raise RuntimeError("signals are not watched yet")
        task = asyncio.ensure_future(doing)
        try:
            await asyncio.wait((task, self._first), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise SignalledFirst(self._first.result())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def unless_hurried(self, doing: Coroutine[Any, Any, None]) -> None:
        """Do something until it is done, or cancel it when a second signal comes; or do not begin after one."""
        if self.hurry.is_set():
            doing.close()
            return
        task = asyncio.ensure_future(doing)
        hurry = asyncio.ensure_future(self.hurry.wait())
        try:
            await asyncio.wait((task, hurry), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            hurry.cancel()
            await asyncio.gather(task, hurry, return_exceptions=True)

    def _take(self, number: signal.Signals) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(number)
        else:
            self.hurry.set()
        self._came(number)
