"""The signals that ask an agent to leave its run."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torchelastic.agent.workers.processes import ignored_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from collections.abc import Set as AbstractSet

Result = TypeVar("Result")


class SignalReceived(Exception):  # noqa: N818 - control flow within the agent
    """A signal arrived before the work was done."""


class Signals:
    """Listens to the signals that ask the agent to leave; a context manager. After its exit, these signals are ignored.

    Args:
        received: called for each signal.
        numbers: the signals; without any, only the signals that are passed to :meth:`handle` are handled.

    Attributes:
        number: the first signal; SIGTERM if there was none.
        first: set by the first signal.
        second: set by the second signal, which asks the agent to exit at once.
    """

    def __init__(
        self, received: Callable[[signal.Signals], None], numbers: AbstractSet[signal.Signals] = frozenset()
    ) -> None:
        self._received = received
        self._numbers = numbers - ignored_signals()
        self.number = signal.SIGTERM
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self.handle, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # a late signal must not prevent the termination message

    async def run_until_first_signal(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of the work, unless a signal arrives first.

        Raises:
            SignalReceived: a signal arrived, and the work was cancelled.
        """
        return await _run_until(self.first, work)

    async def run_until_second_signal(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, but cancel it on a second signal."""
        with suppress(SignalReceived):
            await _run_until(self.second, work)

    def handle(self, number: signal.Signals) -> None:
        """Handle a signal."""
        if self.first.is_set():
            if number is not signal.SIGHUP:  # a terminal that is closed sends it twice
                self.second.set()
        else:
            self.number = number
            self.first.set()
        self._received(number)


async def _run_until(signalled: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    if signalled.is_set():
        work.close()
        raise SignalReceived
    tasks = task, interrupt = asyncio.ensure_future(work), asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise SignalReceived
    finally:
        task.cancel()
        interrupt.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
