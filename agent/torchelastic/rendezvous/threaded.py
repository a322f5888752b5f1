"""A node in a thread of its own, for callers that block: an agent that is not ours, or a program without a loop.

The thread follows the run whether or not anybody asks; what it has been told stands ready behind a condition. So a
question is answered at once, and a wait ends the moment there is something new.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from torchelastic.contract import NodeRecord
from torchelastic.errors import TorchElasticError
from torchelastic.rendezvous.node import EpochBegan, Isolated, RendezvousNode, RunEnded

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from torchelastic.contract import EpochRecord, OutcomeRecord
    from torchelastic.rendezvous.handler_settings import HandlerSettings
    from torchelastic.rendezvous.node import Event
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

Server = TypeVar("Server")

_FAREWELL: Final = 5.0
"""Seconds for which the thread's end is waited for."""


class Ended(TorchElasticError):  # noqa: N818 - a state
    """Nothing new will come: the run has an outcome, or this node cannot take part any more.

    Attributes:
        outcome: the run's, if it has one.
    """

    def __init__(self, message: str, outcome: OutcomeRecord | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Standing(Generic[Server]):
    """An epoch as this node was told of it.

    Attributes:
        serial: counts what the node was told, from 1: the same number can come again with other members.
        record: who trains together.
        server: what serves the epoch's store, where that is for this node to do.
    """

    serial: int
    record: EpochRecord
    server: Server | None


class ThreadedNode(Generic[Server]):
    """One node of a run, from :meth:`start` to :meth:`stop`. Its methods may be called from any thread.

    Args:
        settings: how and where it meets its peers.
        serve: serves a store on a listening socket, which it owns from then on; called in a thread.

    Attributes:
        node: its id.
    """

    def __init__(self, settings: HandlerSettings, serve: Callable[[socket.socket], Server]) -> None:
        self.node = f"{settings.node_name}.{secrets.token_hex(4)}"
        self._settings = settings
        self._serve = serve
        self._changed = threading.Condition()
        self._standing: Standing[Server] | None = None
        self._isolated = False
        self._outcome: OutcomeRecord | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inner: RendezvousNode | None = None
        self._leave = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="torchelastic: rendezvous", daemon=True)

    # -- what a caller does

    def start(self) -> None:
        """Be there, and ready for an epoch."""
        self._thread.start()

    @property
    def standing(self) -> Standing[Server] | None:
        """The last epoch that this node was told of."""
        with self._changed:
            return self._standing

    @property
    def isolated(self) -> bool:
        """Whether this node has reached neither store nor peers, and must not train before the next epoch."""
        with self._changed:
            return self._isolated

    @property
    def outcome(self) -> OutcomeRecord | None:
        """The run's outcome, once it has one."""
        with self._changed:
            return self._outcome

    def next(self, after: int) -> Standing[Server]:
        """Wait for an epoch that this node is in.

        Args:
            after: the serial of the last one that is over for the caller.

        Raises:
            Ended: none will come.
        """
        with self._changed:
            while True:
                self._check()
                standing = self._standing
                if standing is not None and standing.serial > after and self.node in standing.record.nodes:
                    return standing
                self._changed.wait()

    def news_since(self, serial: int, *, timeout: float) -> bool:
        """Whether there is a later epoch than the one of this serial, or comes within the time.

        Raises:
            Ended: none will come.
        """

        def later() -> bool:
            self._check()
            return self._standing is not None and self._standing.serial > serial

        with self._changed:
            return self._changed.wait_for(later, timeout)

    def until_over(self, serial: int, *, timeout: float) -> None:
        """Wait until the run has ended, or another epoch has come, or the time is over."""
        deadline = time.monotonic() + timeout
        try:
            self.news_since(serial, timeout=max(0.0, deadline - time.monotonic()))
        except Ended:
            return

    def report(self, epoch: int, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Say how this node fares in an epoch, as :meth:`RendezvousNode.report`."""
        self._call(lambda: None if self._inner is None else self._inner.report(epoch, **changes))

    def stop(self, *, leave: bool) -> None:
        """Go; returns when the others can know, or after some seconds.

        Args:
            leave: say first that this node goes, so that the others do not wait for it. Not where the run is over.
        """
        if leave:
            self._call(self._leave.set)
        self._call(self._stop.set)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_FAREWELL)

    def _call(self, doing: Callable[[], object]) -> None:
        with self._changed:
            if self._loop is None:  # not yet, or no more: nothing else touches what is changed
                doing()
                return
            with contextlib.suppress(RuntimeError):  # closed meanwhile: there is nobody left to be told
                self._loop.call_soon_threadsafe(doing)

    def _check(self) -> None:
        if self._outcome is not None:
            raise Ended(self._outcome.message or "the run has ended", self._outcome)
        if self._error is not None:
            raise Ended(f"{self._error}") from self._error

    # -- what the thread does

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # noqa: BLE001 - it is for those who wait
            self._end(_first_cause(error))
        else:
            self._end(TorchElasticError("this node has left the run"))

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._loop = None
            self._changed.notify_all()

    async def _live(self) -> None:
        with self._changed:
            self._loop = asyncio.get_running_loop()
        live = asyncio.create_task(self._take_part())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((live, stop), return_when=asyncio.FIRST_COMPLETED)
            if live.done():
                await live
        finally:
            for task in (live, stop):
                task.cancel()
            await asyncio.gather(live, stop, return_exceptions=True)

    async def _take_part(self) -> None:
        settings = self._settings
        store = await self._connect()
        try:
            node = RendezvousNode(
                store,
                settings.rendezvous,
                node=self.node,
                record=NodeRecord(
                    name=settings.node_name,
                    address=settings.address,
                    workers=1,  # how many there really are, an agent that is not ours does not tell
                    size=settings.rendezvous.size,
                    place=settings.place,
                ),
            )
            async with node:
                self._inner = node
                try:
                    await self._follow(node)
                finally:
                    self._inner = None
                    if self._leave.is_set():
                        await node.leave()
        finally:
            await store.close()

    async def _connect(self) -> Store:
        if self._settings.store is None:
            from torchelastic.store.memory import MemoryStore

            return MemoryStore()
        from torchelastic.store.connecting import connect_within

        return await connect_within(self._settings.store, self._settings.rendezvous.join_timeout)

    async def _follow(self, node: RendezvousNode) -> None:
        while True:
            getting = asyncio.ensure_future(node.events.get())
            try:
                await asyncio.wait((getting, node.failed), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if getting.done():
                    node.events.put_nowait(getting.result())  # it is closed with all else that nobody has received
                getting.cancel()
                raise
            if not getting.done():
                getting.cancel()
                await node.failed
                return
            await self._take(event := getting.result())
            if isinstance(event, EpochBegan) and event.record.members:
                node.chronicle.started()  # by whoever asks, about now

    async def _take(self, event: Event) -> None:
        match event:
            case EpochBegan(record, listener):
                logger.info("epoch %d: %s", record.number, record.cause)
                server = None if listener is None else await self._served(listener)
                with self._changed:
                    serial = 1 if self._standing is None else self._standing.serial + 1
                    self._standing = Standing(serial, record, server)
                    self._isolated = False
                    self._changed.notify_all()
            case Isolated():
                with self._changed:
                    self._isolated = True
                    self._changed.notify_all()
            case RunEnded(record):
                with self._changed:
                    self._outcome = record
                    self._changed.notify_all()

    async def _served(self, listener: socket.socket) -> Server:
        serving = asyncio.ensure_future(asyncio.to_thread(self._serve, listener))
        try:
            return await asyncio.shield(serving)
        except asyncio.CancelledError:
            await asyncio.wait([serving])  # the listener is the server's, once there is one
            raise


def _first_cause(error: BaseException) -> BaseException:
    """The error that a group of errors is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
