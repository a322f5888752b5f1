"""What can happen to an agent, and the one queue that it all goes through."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torchelastic.agent.workers import GroupEnded
from torchelastic.rendezvous.events import Event, close_unclaimed

if TYPE_CHECKING:
    import signal
    from collections.abc import Coroutine
    from types import TracebackType

    from torchelastic.agent.workers import StoreServer, WorkerExit, WorkerGroup
    from torchelastic.rendezvous.node import RendezvousNode


@dataclass(frozen=True, slots=True)
class Signalled:
    """Somebody asked this agent to go."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker of an epoch came to its end."""

    epoch: int
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class CauseOverdue:
    """A failure of an epoch that another one may explain has waited long enough for that one."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StoreServerEnded:
    """The process that served an epoch's TCPStore ended by itself."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WorkersSpoke:
    """The workers ask for other notices than before, or have answered one."""


@dataclass(frozen=True, slots=True)
class RendezvousFailed:
    """This node cannot take part any more."""

    error: BaseException | None


Happening = Event | Signalled | WorkerEnded | CauseOverdue | StoreServerEnded | WorkersSpoke | RendezvousFailed


class Happenings:
    """The queue, and the tasks that feed it; a context manager, with which they end."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Happening] = asyncio.Queue()
        self._feeding: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._feeding:
            task.cancel()
        await asyncio.gather(*self._feeding, return_exceptions=True)
        close_unclaimed(self._queue)

    def put(self, happening: Happening) -> None:
        """Something happened."""
        self._queue.put_nowait(happening)

    def put_later(self, seconds: float, happening: Happening) -> None:
        """It is to happen in so many seconds."""
        self._feed(self._after(seconds, happening))

    async def next(self, seconds: float | None = None) -> Happening | None:
        """What happened next; None where it is nothing for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        return None

    def follow_rendezvous(self, node: RendezvousNode) -> None:
        """Take in what the node is told."""
        self._feed(self._events(node))
        self._feed(self._failure_of(node))

    def follow_workers(self, group: WorkerGroup, epoch: int) -> None:
        """Take in the ends of an epoch's workers."""
        self._feed(self._exits(group, epoch))

    def follow_store_server(self, server: StoreServer, epoch: int) -> None:
        """Take in the end of the process that serves an epoch's TCPStore."""
        self._feed(self._end_of(server, epoch))

    def _feed(self, feeding: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(feeding)
        self._feeding.add(task)
        task.add_done_callback(self._feeding.discard)

    async def _after(self, seconds: float, happening: Happening) -> None:
        await asyncio.sleep(seconds)
        self.put(happening)

    async def _events(self, node: RendezvousNode) -> None:
        while True:
            self.put(await node.events.get())

    async def _failure_of(self, node: RendezvousNode) -> None:
        await asyncio.wait((node.failed,))
        self.put(RendezvousFailed(_first_cause(node.failed.exception())))

    async def _exits(self, group: WorkerGroup, epoch: int) -> None:
        with suppress(GroupEnded):
            while True:
                self.put(WorkerEnded(epoch, await group.next_exit()))

    async def _end_of(self, server: StoreServer, epoch: int) -> None:
        await asyncio.wait((server.ended,))
        self.put(StoreServerEnded(epoch))


def _first_cause(error: BaseException | None) -> BaseException | None:
    """The error that a group of errors is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
