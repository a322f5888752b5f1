"""A node in its own thread, for blocking callers: torch's agent, or a program without an event loop.

The thread follows the run continuously. Callers read the status that it has published last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torchelastic.errors import TorchElasticError
from torchelastic.protocol import NodeRecord, OutcomeRecord, RoundRecord
from torchelastic.rendezvous.node import Partitioned, RendezvousNode, RoundStarted
from torchelastic.rendezvous.run_state import cancel
from torchelastic.store import connect_within

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from torchelastic.config.settings import NodeSettings

logger = logging.getLogger(__name__)

_STOP_TIMEOUT: Final = 5.0
"""Seconds to wait for the thread to end."""


class Ended(TorchElasticError):  # noqa: N818 - a state
    """The status is final: the run has an outcome, or this node cannot continue.

    Attributes:
        outcome: the outcome of the run, if it has one.
    """

    def __init__(self, message: str, outcome: OutcomeRecord | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of a node.

    Attributes:
        serial: counts the rounds that the node received: a round number can be repeated with other members.
        record: the last round.
        server: the server of the round's store, if this node serves it.
        partitioned: whether the node reaches neither store nor peers, and must not train before the next round.
        outcome: the outcome of the run.
        error: why the node cannot continue.
    """

    serial: int = 0
    record: RoundRecord = field(default_factory=lambda: RoundRecord(number=0))
    server: Any = None
    partitioned: bool = False
    outcome: OutcomeRecord | None = None
    error: BaseException | None = None


class NodeThread:
    """One node of a run, from :meth:`start` to :meth:`stop`. Thread-safe.

    Args:
        settings: the settings of the node.
        serve: serves a store on a listening socket, and takes ownership of the socket; called in a thread.

    Attributes:
        node: the node's id.
        status: the last status.
    """

    def __init__(self, settings: NodeSettings, serve: Callable[[socket.socket], object]) -> None:
        self.node = f"{settings.node_name}.{secrets.token_hex(4)}"
        self.status = NodeStatus()
        self._settings = settings
        self._serve = serve
        self._changed = threading.Condition()
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._living: asyncio.Task[None]
        self._inner: RendezvousNode
        self._leaves = False
        self._thread = threading.Thread(target=self._run, name="torchelastic: rendezvous", daemon=True)

    def start(self) -> None:
        """Join the run."""
        self._thread.start()
        self._started.wait()

    def _wait_for(self, wanted: Callable[[NodeStatus], bool], *, timeout: float | None = None) -> NodeStatus:
        """Wait for a status that satisfies a condition, or for the timeout; return the last status."""

        def ready() -> bool:
            if self.status.outcome is not None:
                raise Ended(self.status.outcome.message or "the run has ended", self.status.outcome)
            if self.status.error is not None:
                raise Ended(f"{self.status.error}") from self.status.error
            return wanted(self.status)

        with self._changed:
            self._changed.wait_for(ready, timeout)
            return self.status

    def next(self, after: int) -> NodeStatus:
        """Wait for a round after this serial that has this node as a member.

        Raises:
            Ended: the status is final.
        """
        return self._wait_for(lambda status: status.serial > after and self.node in status.record.nodes)

    def is_over(self, serial: int, *, timeout: float = 0.0) -> bool:
        """Return whether a later round has started, or starts within the timeout.

        Raises:
            Ended: the status is final.
        """
        return self._wait_for(lambda status: status.serial > serial, timeout=timeout).serial > serial

    def report(self, round: int, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change this node's record for a round that it has received, as :meth:`RendezvousNode.report` does."""
        self._call(lambda: self._inner.report(round, **changes))

    def stop(self, *, leave: bool) -> None:
        """Stop the node; return when its key is updated, or after a timeout.

        Args:
            leave: announce the departure to the other nodes; False if the run is over.
        """
        self._leaves = leave
        self._call(lambda: self._living.cancel("the node is stopped"))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_TIMEOUT)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # the loop is closed, or could not be created
            self._loop.call_soon_threadsafe(function)

    # -- in the thread

    def _run(self) -> None:
        error: BaseException = TorchElasticError("this node has left the run")
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            pass
        except BaseException as raised:  # noqa: BLE001 - raised in the threads that wait
            error = raised
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
        self._update(error=error)
        self._started.set()

    def _update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of NodeStatus
        with self._changed:
            self.status = dataclasses.replace(self.status, **changes)
            self._changed.notify_all()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._living = asyncio.create_task(self._take_part())
        self._started.set()
        await self._living

    async def _take_part(self) -> None:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            store = await connect_within(settings.rendezvous.join_timeout, settings.store)
            stack.push_async_callback(store.close)
            node = RendezvousNode(
                store,
                settings.rendezvous,
                node=self.node,
                record=NodeRecord(
                    name=settings.node_name,
                    address=settings.address,
                    workers=1,  # torch's agent does not report how many workers it has
                    size=settings.rendezvous.size,
                    topology_key=settings.place,
                ),
            )
            self._inner = node
            await stack.enter_async_context(node)
            following = asyncio.create_task(self._follow(node))
            try:
                await asyncio.wait((following, node.failed), return_when=asyncio.FIRST_COMPLETED)
                await (following if following.done() else node.failed)
            finally:
                await cancel(following)
                if self._leaves:
                    await node.leave()

    async def _follow(self, node: RendezvousNode) -> None:
        while True:
            match await node.events.get():
                case RoundStarted(record, listener):
                    logger.info("round %d: %s", record.number, record.cause)
                    server = None
                    if listener is not None:
                        with listener:  # if this is cancelled before the thread has begun
                            server = await asyncio.to_thread(self._serve, listener)
                    self._update(serial=self.status.serial + 1, record=record, server=server, partitioned=False)
                    if record.members:
                        node.history.workers_started()  # approximately now
                case Partitioned():
                    self._update(partitioned=True)
                case OutcomeRecord() as outcome:
                    self._update(outcome=outcome)
