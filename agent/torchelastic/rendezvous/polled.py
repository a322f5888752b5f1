"""A handler that is not ours, behind the interface of our node: a user's, or torch's.

Such a handler can only be called and asked: ``next_rendezvous`` blocks, and ``num_nodes_waiting`` is asked again and
again. Its calls are made in a thread of their own. The budget of restarts is the run's here, too: the nodes tell each
other how many failures there were when they meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from torchelastic import machine
from torchelastic.contract import EpochRecord, NodePhase, OutcomeRecord, OutcomeState
from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.decide import describe
from torchelastic.rendezvous.events import EpochBegan, RunEnded, close_unclaimed
from torchelastic.rendezvous.gathering import Gathering, Line, store_address
from torchelastic.rendezvous.link import listen

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torchelastic.contract import FailureRecord
    from torchelastic.rendezvous.api import RendezvousHandler
    from torchelastic.rendezvous.node import Event

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FAREWELL: Final = 2.0
"""Seconds for which the first node, which may serve the handler's store, waits until the others have seen the end."""


@dataclass(frozen=True, slots=True)
class PolledSettings:
    """How a run on such a handler goes.

    Attributes:
        workers: how many this node runs.
        max_restarts: how many failures of workers the run may have.
        interval: seconds between two questions.
        patience: seconds for which a node whose workers have succeeded waits for the others'.
        address: where the others reach this node; empty to have it found out.
        store_host: where workers reach the epoch's store if this node serves it; empty for its address.
        store_port: the store's port then; 0 for any free one.
    """

    workers: int
    max_restarts: int
    interval: float
    patience: float
    address: str = ""
    store_host: str = ""
    store_port: int = 0


class PolledNode:
    """One node of a run on a handler that is not ours; an async context manager.

    It does what :class:`~torchelastic.rendezvous.node.RendezvousNode` does, as far as it can be done.

    Args:
        handler: the handler.
        settings: how the run goes.
        node: this node's id.

    Attributes:
        node: that.
        events: what happened, in order.
        led: whether the next epoch is formed by somebody when this node goes; nobody does so unasked.
    """

    led: Final = False

    def __init__(self, handler: RendezvousHandler, settings: PolledSettings, *, node: str) -> None:
        self.node = node
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._handler = handler
        self._settings = settings
        self._calls = _CallingThread()
        self._gathering: Gathering | None = None
        self._epoch = EpochRecord(number=0)
        self._restarts = 0
        self._failure: FailureRecord | None = None
        self._done_at: float | None = None
        self._said_done = False
        self._ended = False
        self._news = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # torch shares its c10d store with the workers, unless this says otherwise. Where that is, it tells the nodes
        # of the first meeting, and those that come later wait for the word for ever.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        self._calls.start()
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._calls.stop()
        close_unclaimed(self.events)

    @property
    def failed(self) -> asyncio.Task[None]:
        """Ends, with the error, when the handler raises one."""
        if self._running is None:
            raise RuntimeError("the node is not open")
        return self._running

    @property
    def error(self) -> BaseException | None:
        """What the handler has raised, if it did."""
        task = self._running
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    def report(self, epoch: int, **changes: Any) -> None:  # noqa: ANN401 - any field of a node's record
        """Say how this node fares in an epoch. Of notices nobody is told here: no change is known before it happens."""
        if epoch != self._epoch.number or not self._epoch.members:
            return
        self._failure = self._failure or changes.get("failure")
        if changes.get("phase") is NodePhase.DONE and self._done_at is None:
            self._done_at = asyncio.get_running_loop().time()
        self._news.set()

    async def leave(self, *, timeout: float = 1.0) -> None:  # noqa: ASYNC109 - as our own node has it
        """Go. Nobody is told: the others see it as they see a death."""

    async def stands(self, epoch: int, *, timeout: float = 5.0) -> bool:  # noqa: ARG002, ASYNC109 - as our node
        """Whether an epoch is still this node's, as far as that is known here: nobody is asked."""
        return epoch == self._epoch.number and bool(self._epoch.members) and not self._ended

    async def _run(self) -> None:
        while not self._ended:
            await self._meet()
            await self._watch()
        await asyncio.get_running_loop().create_future()  # nothing more happens until this is closed

    async def _meet(self) -> None:
        line = Line(
            node=self.node,
            address="",
            workers=self._settings.workers,
            epoch=self._epoch.number,
            restarts=self._restarts,
            cause="" if self._failure is None else describe(self._failure),
        )
        met = await self._calls.do(lambda: _met(self._handler, self._settings, line), _forget)
        self._gathering, record, listener = met
        self._epoch, self._restarts = record, record.restarts
        self._failure, self._done_at, self._said_done = None, None, False
        self.events.put_nowait(EpochBegan(record, listener))

    async def _watch(self) -> None:
        """Return when the nodes have to meet again, or the run has ended."""
        while True:
            self._news.clear()
            if self._failure is not None:
                self._restart_or_end(self._failure)
                return
            if self._done_at is not None and await self._all_done(self._done_at):
                self._end(OutcomeState.SUCCEEDED)
                return
            if await self._calls.do(lambda: _nodes_waiting(self._handler)):
                cause = "somebody waits for the next rendezvous"
                self._epoch = EpochRecord(number=self._epoch.number, restarts=self._restarts, cause=cause)
                self.events.put_nowait(EpochBegan(self._epoch))
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.interval):
                    await self._news.wait()

    def _restart_or_end(self, failure: FailureRecord) -> None:
        most = self._settings.max_restarts
        if self._restarts < most and not failure.final:
            self._restarts += 1
            return
        why = (
            "the program says that trying again is no use"
            if failure.final
            else f"no restart is left of the {most} that it may have"
            if most
            else "it may not restart"
        )
        self._end(OutcomeState.FAILED, message=f"{describe(failure)}; {why}", failure=failure)

    def _end(self, state: OutcomeState, *, message: str = "", failure: FailureRecord | None = None) -> None:
        self._ended = True
        outcome = OutcomeRecord(
            state=state, epoch=self._epoch.number, restarts=self._restarts, message=message, failure=failure
        )
        self.events.put_nowait(RunEnded(outcome))

    async def _all_done(self, since: float) -> bool:
        """Whether the workers of all nodes have succeeded, or there is nothing more to be waited for."""
        gathering = self._gathering
        if gathering is None or gathering.size == 1:
            return True
        try:
            more, self._said_done = int(not self._said_done), True
            if await self._calls.do(lambda: gathering.count("done", more)) < gathering.size:
                late = asyncio.get_running_loop().time() - since >= self._settings.patience
                if late:
                    logger.warning("not all nodes' workers have ended after %g s; going", self._settings.patience)
                return late
            await self._say_farewell(gathering)
        except (RuntimeError, OSError) as error:  # what torch's stores raise is a RuntimeError
            logger.warning("the other nodes are not waited for: %s", f"{error}".partition("\n")[0])
        return True

    async def _say_farewell(self, gathering: Gathering) -> None:
        if gathering.rank > 0:
            await self._calls.do(lambda: gathering.count("gone", 1))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                while await self._calls.do(lambda: gathering.count("gone")) < gathering.size - 1:  # noqa: ASYNC110
                    await asyncio.sleep(min(self._settings.interval, _FAREWELL / 10))


def _met(
    handler: RendezvousHandler, settings: PolledSettings, line: Line
) -> tuple[Gathering, EpochRecord, socket.socket | None]:
    """Meet the others and agree on an epoch; with the socket of its store, where this node serves it."""
    gathering = Gathering(handler.next_rendezvous())
    address = settings.address or ("127.0.0.1" if gathering.size == 1 else machine.own_address(()))
    line = msgspec.structs.replace(line, address=address)
    if gathering.rank > 0:
        return gathering, gathering.agree(line, ""), None
    port = settings.store_port
    listener = socket.create_server(("", port), reuse_port=False) if port else listen(address)
    try:
        where = store_address(settings.store_host or address, listener.getsockname()[1])
        return gathering, gathering.agree(line, where), listener
    except BaseException:
        listener.close()
        raise


def _forget(met: tuple[Gathering, EpochRecord, socket.socket | None]) -> None:
    """Nobody will serve the epoch's store."""
    if met[2] is not None:
        met[2].close()


def _nodes_waiting(handler: object) -> bool:
    """Whether somebody waits; a handler that cannot tell has nobody waiting."""
    asked = getattr(handler, "num_nodes_waiting", None)
    return asked is not None and asked() > 0


class _CallingThread:
    """A thread for calls that block. One that never returns holds up nobody, nor the end of the process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Be ready for calls."""
        threading.Thread(target=self._work, name="torchelastic: rendezvous", daemon=True).start()

    def stop(self) -> None:
        """Take no more calls."""
        self._queue.put(None)

    async def do(self, call: Callable[[], Result], unwanted: Callable[[Result], None] | None = None) -> Result:
        """Make a call when those before it have returned; what it returns or raises is returned or raised here.

        Args:
            call: the call.
            unwanted: gets what it returns when nobody waits for it any more.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def give(result: Result) -> None:
            if not answer.done():
                answer.set_result(result)
            elif unwanted is not None:
                unwanted(result)

        def tell(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        def make() -> None:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                _call_soon(loop, tell, error)
            except BaseException as error:  # noqa: BLE001 - which would end the loop of whoever waits
                _call_soon(loop, tell, RendezvousError(f"the handler raised {error!r}"))
            else:
                if not _call_soon(loop, give, result) and unwanted is not None:
                    unwanted(result)

        self._queue.put(make)
        return await _wanted(answer, unwanted)

    def _work(self) -> None:
        while (make := self._queue.get()) is not None:
            make()


async def _wanted(answer: asyncio.Future[Result], unwanted: Callable[[Result], None] | None) -> Result:
    """Wait for an answer; one that comes in the moment in which it is given up, nobody else would get."""
    try:
        return await answer
    except asyncio.CancelledError:
        if unwanted is not None and not answer.cancelled() and answer.exception() is None:
            unwanted(answer.result())
        raise


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[Result], None], value: Result) -> bool:
    """Have the loop call something; False where it is closed."""
    try:
        loop.call_soon_threadsafe(function, value)
    except RuntimeError:
        return False
    return True
