"""The events of an agent, and the signals among them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from torchelastic.protocol import ExitCode
from torchelastic.rendezvous.node import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from torchelastic.agent.failures import WorkerExit

Result = TypeVar("Result")

LEAVING_SIGNALS: Final = {signal.SIGTERM: ExitCode.LEFT, signal.SIGINT: ExitCode.INTERRUPTED}
"""The signals that ask an agent to leave, with the agent's exit codes."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal asks this agent to leave."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker of a round has ended."""

    round: int
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class CauseOverdue:
    """A failure of a round has waited long enough for another one that explains it."""

    round: int


@dataclass(frozen=True, slots=True)
class StoreServerEnded:
    """The process that serves a round's TCPStore has ended by itself."""

    round: int


@dataclass(frozen=True, slots=True)
class RequestsChanged:
    """The workers ask for other notices than before, or have answered one."""


@dataclass(frozen=True, slots=True)
class RendezvousFailed:
    """This node can no longer take part."""

    error: BaseException | None


AgentEvent = Event | Signalled | WorkerEnded | CauseOverdue | StoreServerEnded | RequestsChanged | RendezvousFailed


class SignalledFirst(Exception):  # noqa: N818 - control flow within the agent
    """A signal came before the work was done."""


class Signals:
    """Listens to the signals that ask the agent to leave; a context manager, after which they are ignored.

    Args:
        received: called for each signal.
        listen: False to handle only the signals that are passed to :meth:`take`.

    Attributes:
        number: the first signal; SIGTERM before it.
        first: set by the first signal.
        hurry: set by the second signal, which asks the agent to end at once.
    """

    def __init__(self, received: Callable[[signal.Signals], None], *, listen: bool = True) -> None:
        self._received = received
        self._numbers = LEAVING_SIGNALS if listen else ()
        self.number = signal.SIGTERM
        self.first = asyncio.Event()
        self.hurry = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self.take, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # a late one must not prevent the termination message

    async def unless_first(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work, unless a signal comes first.

        Raises:
            SignalledFirst: a signal came, and the work was cancelled.
        """
        return await _unless(self.first, work)

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, but cancel it on a second signal."""
        with suppress(SignalledFirst):
            await _unless(self.hurry, work)

    def take(self, number: signal.Signals) -> None:
        """Handle a signal."""
        if self.first.is_set():
            self.hurry.set()
        else:
            self.number = number
            self.first.set()
        self._received(number)


async def _unless(signalled: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    if signalled.is_set():
        work.close()
        raise SignalledFirst
    tasks = task, interrupt = asyncio.ensure_future(work), asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise SignalledFirst
    finally:
        task.cancel()
        interrupt.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
