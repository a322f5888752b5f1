"""The events of an agent, the one queue that they all go through, and the signals among them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from torchelastic.agent.workers.group import GroupEnded
from torchelastic.protocol import ExitCode
from torchelastic.rendezvous.node import Event, RendezvousNode, close_unclaimed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from torchelastic.agent.failures import WorkerExit
    from torchelastic.agent.workers.group import WorkerGroup
    from torchelastic.agent.workers.pool import StoreServer

Result = TypeVar("Result")

LEAVING_SIGNALS: Final = {signal.SIGTERM: ExitCode.LEFT, signal.SIGINT: ExitCode.INTERRUPTED}
"""The signals that ask an agent to leave, with its exit code."""


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
    """This node cannot take part any more."""

    error: BaseException | None


AgentEvent = Event | Signalled | WorkerEnded | CauseOverdue | StoreServerEnded | RequestsChanged | RendezvousFailed


class EventQueue:
    """The queue, and the tasks that feed it; an async context manager that ends them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AgentEvent] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        close_unclaimed(self._queue)

    def put(self, event: AgentEvent) -> None:
        """Add an event."""
        self._queue.put_nowait(event)

    def put_later(self, seconds: float, event: AgentEvent) -> None:
        """Add an event after a number of seconds."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            self.put(event)

        self._run(wait())

    async def next(self, seconds: float | None = None) -> AgentEvent | None:
        """Return the next event; None if there is none for a number of seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        return None

    def follow_rendezvous(self, node: RendezvousNode) -> None:
        """Add the node's events, and its failure."""

        async def events() -> None:
            while True:
                self.put(await node.events.get())

        async def failure() -> None:
            await asyncio.wait((node.failed,))
            error = node.failed.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.put(RendezvousFailed(error))

        self._run(events())
        self._run(failure())

    def follow_workers(self, group: WorkerGroup, round: int) -> None:
        """Add the exits of a round's workers."""

        async def exits() -> None:
            with suppress(GroupEnded):
                while True:
                    self.put(WorkerEnded(round, await group.next_exit()))

        self._run(exits())

    def follow_store_server(self, server: StoreServer, round: int) -> None:
        """Add the end of the process that serves a round's TCPStore."""

        async def end() -> None:
            await asyncio.wait((server.ended,))
            self.put(StoreServerEnded(round))

        self._run(end())

    def _run(self, feed: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(feed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SignalledFirst(Exception):  # noqa: N818 - control flow within the agent
    """A signal came before something was done."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Listens to the signals that ask the agent to leave; a context manager, after which they are ignored.

    Args:
        received: called for each of them.

    Attributes:
        hurry: set by the second one: end at once.
    """

    def __init__(self, received: Callable[[signal.Signals], None]) -> None:
        self.hurry = asyncio.Event()
        self._received = received
        self._first: asyncio.Future[signal.Signals]

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
            signal.signal(number, signal.SIG_IGN)  # a late one must not prevent the termination message

    async def unless_first(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something, unless a signal comes first.

        Raises:
            SignalledFirst: a signal came, and the work is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._first), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise SignalledFirst(self._first.result())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something, but not after a second signal."""
        if self.hurry.is_set():
            work.close()
            return
        task = asyncio.ensure_future(work)
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
        if not self._first.done():
            self._first.set_result(number)
        else:
            self.hurry.set()
        self._received(number)
