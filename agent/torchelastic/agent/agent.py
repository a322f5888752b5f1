"""The agent's own story: meet the peers, run the workers of each epoch, and say what happened.

Everything that can happen (a new epoch, the end of a worker, a signal, the end of the run) goes through one queue and
is dealt with in order, so that the state is changed in one place only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from torchelastic.agent.workers import GroupEnded, StartError, Workers, WorkerStart
from torchelastic.contract import (
    ExitCode,
    FailureKind,
    FailureRecord,
    NodePhase,
    NodeRecord,
    OutcomeRecord,
    OutcomeState,
    TerminationMessage,
)
from torchelastic.errors import SettingsError, StoreError, StoreUnavailable
from torchelastic.output import started
from torchelastic.rendezvous.decide import describe
from torchelastic.rendezvous.node import EpochBegan, Event, Isolated, RendezvousNode, RunEnded
from torchelastic.rendezvous.ranks import worker_environments
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from types import TracebackType

    from torchelastic.agent.workers import StoreServer, WorkerExit, WorkerGroup
    from torchelastic.contract import EpochRecord
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.settings import AgentSettings
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LEAVING_SIGNALS: Final = {signal.SIGTERM: ExitCode.LEFT, signal.SIGINT: ExitCode.INTERRUPTED}


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
class StoreServerEnded:
    """The process that served an epoch's TCPStore ended by itself."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RendezvousFailed:
    """This node cannot take part any more."""

    error: BaseException | None


Happening = Event | Signalled | WorkerEnded | StoreServerEnded | RendezvousFailed


@dataclass(frozen=True, slots=True)
class Ending:
    """How an agent ended.

    Attributes:
        code: its exit code.
        message: its last words.
    """

    code: ExitCode
    message: TerminationMessage


class Agent:
    """Runs one node of a run to its end.

    Args:
        settings: what to do.
        metrics: what happens is told to this.
    """

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._queue: asyncio.Queue[Happening] = asyncio.Queue()
        self._signals = _Signals(self._queue)
        self._node_id = f"{settings.node_name}.{secrets.token_hex(4)}"
        self._epoch: EpochRecord | None = None
        self._group: WorkerGroup | None = None
        self._unfinished: set[int] = set()
        self._store_server: StoreServer | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._broken_at: float | None = None
        self._began_at = 0.0

    async def run(self, metrics_port: int = 0) -> Ending:
        """Take part until the run has ended, or this agent is asked to go.

        Args:
            metrics_port: port on which /metrics is served, to be told to the operator; 0 for none.
        """
        settings = self._settings
        async with AsyncExitStack() as stack:
            stack.enter_context(self._signals)
            try:
                # First of all: the fork server imports torch while the rest goes on.
                workers = await stack.enter_async_context(
                    Workers(
                        settings.program,
                        settings.logs,
                        role=settings.role,
                        local_world_size=settings.workers,
                        alone=True,
                    )
                )
                store = await self._signals.unless_first(self._connect())
                stack.push_async_callback(store.close)
                node = RendezvousNode(
                    store, settings.rendezvous, node=self._node_id, record=self._introduction(metrics_port)
                )
                # Whoever joins before it can start its workers makes the others wait for it.
                await self._signals.unless_first(workers.ready())
                await self._signals.unless_first(stack.enter_async_context(node))
            except StoreError as error:
                return _ending(ExitCode.STORE, "StoreUnavailable", f"{error}")
            except (StartError, SettingsError) as error:
                return _ending(ExitCode.BAD_INPUT, "BadInput", f"{error}")
            except _SignalledFirst as signalled:
                return self._left(signalled.number)
            stack.push_async_callback(self._stop_workers, 0.0)
            self._pump(self._pump_events(node))
            try:
                return await self._live(workers, node)
            except SettingsError as error:
                await node.leave()
                return _ending(ExitCode.BAD_INPUT, "BadInput", f"{error}")
            finally:
                for pump in self._pumps:
                    pump.cancel()
                await asyncio.gather(*self._pumps, return_exceptions=True)

    def _introduction(self, metrics_port: int) -> NodeRecord:
        return NodeRecord(
            name=self._settings.node_name,
            address=self._settings.address,
            workers=self._settings.workers,
            size=self._settings.rendezvous.size,
            metrics=metrics_port,
        )

    async def _connect(self) -> Store:
        """The store, waiting for it as long as for peers: where both start at once, etcd may be the later one."""
        from torchelastic import store  # with its HTTP client: the fork server was to be started first

        if self._settings.store is None:
            return store.MemoryStore()
        deadline = time.monotonic() + self._settings.rendezvous.join_timeout
        tries = 0
        while True:
            try:
                return await store.connect(self._settings.store)
            except StoreUnavailable as error:
                if tries == 0:
                    logger.warning("%s; trying again for %g s", error, self._settings.rendezvous.join_timeout)
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(retry_delay(tries))
            tries += 1

    # -- what happens

    async def _live(self, workers: Workers, node: RendezvousNode) -> Ending:
        while True:
            happening = await self._queue.get()
            match happening:
                case EpochBegan():
                    with suppress(_SignalledFirst):  # the signal itself stands in the queue
                        await self._signals.unless_first(self._begin_epoch(happening, workers, node))
                case WorkerEnded():
                    await self._worker_ended(happening, node)
                case StoreServerEnded(epoch):
                    await self._store_server_ended(epoch, node)
                case Isolated():
                    await self._stop_workers(0.0)
                case RunEnded(outcome):
                    await self._stop_workers(0.0)
                    return self._run_ended(outcome)
                case Signalled(number):
                    logger.info("%s: leaving the run", number.name)
                    await node.leave()
                    await self._stop_workers(self._settings.stop_grace)
                    return self._left(number)
                case RendezvousFailed(error):
                    if not isinstance(error, StoreError):
                        logger.error("the rendezvous broke", exc_info=error)
                    await self._stop_workers(0.0)
                    return _ending(ExitCode.STORE, "StoreUnavailable", f"{error or 'the rendezvous ended by itself'}")

    async def _begin_epoch(self, began: EpochBegan, workers: Workers, node: RendezvousNode) -> None:
        epoch = began.record
        logger.info("epoch %d: %s", epoch.number, epoch.cause)
        if self._group is not None and self._broken_at is None:
            self._broken_at = time.monotonic()
        await self._stop_workers(0.0)
        self._epoch = epoch
        self._began_at = time.monotonic()
        self._metrics.epoch(epoch.number, epoch.world_size)
        self._metrics.remaining_restarts(
            self._settings.role, max(self._settings.rendezvous.max_restarts - epoch.restarts, 0)
        )
        if node.node not in epoch.nodes:
            if epoch.members:
                logger.info("epoch %d: not needed now; waiting as a spare", epoch.number)
            self._metrics.worker_state(self._settings.role, "stopped")
            self._broken_at = None
            return
        environments = worker_environments(
            epoch,
            node.node,
            role=self._settings.role,
            run_id=self._settings.rendezvous.run_id,
            max_restarts=self._settings.rendezvous.max_restarts,
        )
        try:
            self._group = await self._start(began, workers, environments)
        except StartError as error:
            await self._epoch_failed(node, f"{error}", FailureKind.PROGRAM)
            return
        self._unfinished = {int(env["LOCAL_RANK"]) for env in environments}
        self._metrics.worker_state(self._settings.role, "healthy")
        if self._broken_at is not None:
            self._metrics.recovered(time.monotonic() - self._broken_at, epoch.reason)
            self._broken_at = None
        logger.info("%s", started(epoch.number, [int(env["RANK"]) for env in environments], epoch.world_size))
        self._pump(self._pump_exits(self._group, epoch.number))

    async def _start(
        self, began: EpochBegan, workers: Workers, environments: Sequence[Mapping[str, str]]
    ) -> WorkerGroup:
        """Start the epoch's workers, and its store where this node serves it.

        Side by side: the store's socket is bound already, so workers that are faster than the store wait there.
        """
        epoch = began.record.number
        starts = [WorkerStart(int(env["LOCAL_RANK"]), int(env["RANK"]), env) for env in environments]
        serving = None if began.store is None else asyncio.ensure_future(workers.serve_store(began.store))
        try:
            self._group = await workers.start(epoch, starts)
        finally:
            if serving is not None:
                self._store_server = await serving
                self._pump(self._pump_store_server(self._store_server, epoch))
        return self._group

    async def _worker_ended(self, ended: WorkerEnded, node: RendezvousNode) -> None:
        if self._group is None or self._epoch is None or ended.epoch != self._epoch.number:
            return
        if ended.exit.exit_code == 0:
            self._unfinished.discard(ended.exit.local_rank)
            done = not self._unfinished
            node.report(ended.epoch, phase=NodePhase.DONE if done else NodePhase.FINISHING)
            if done:
                self._metrics.worker_state(self._settings.role, "succeeded")
            return
        failure = self._failure(ended.exit, ended.epoch)
        node.report(ended.epoch, failure=failure)
        logger.warning("%s", describe(failure))
        self._broken_at = time.monotonic()
        self._metrics.worker_state(self._settings.role, "unhealthy")
        await self._stop_workers(0.0)

    async def _store_server_ended(self, epoch: int, node: RendezvousNode) -> None:
        if self._epoch is None or epoch != self._epoch.number or self._group is None:
            return
        await self._epoch_failed(node, "the process that serves the epoch's TCPStore died", FailureKind.COMMUNICATION)

    async def _epoch_failed(self, node: RendezvousNode, message: str, kind: FailureKind) -> None:
        """Report a failure that is this node's own, and no worker's; it stands for the node's first rank."""
        epoch = self._epoch
        if epoch is None or node.node not in epoch.nodes:
            return
        failure = FailureRecord(
            epoch=epoch.number,
            rank=sum(member.workers for member in epoch.members[: epoch.nodes.index(node.node)]),
            local_rank=0,
            node=node.node,
            exit_code=1,
            kind=kind,
            host=self._settings.address,
            message=message,
            uptime=round(time.monotonic() - self._began_at, 3),
        )
        node.report(epoch.number, failure=failure)
        logger.warning("%s", describe(failure))
        await self._stop_workers(0.0)

    def _failure(self, worker: WorkerExit, epoch: int) -> FailureRecord:
        return FailureRecord(
            epoch=epoch,
            rank=worker.rank,
            local_rank=worker.local_rank,
            node=self._node_id,
            exit_code=max(min(worker.exit_code, 255), -255),
            kind=worker.kind,
            host=self._settings.address,
            pid=worker.pid,
            message=worker.message,
            uptime=round(worker.uptime, 3),
        )

    async def _stop_workers(self, grace: float) -> None:
        """End the workers of this node and their store; a second signal cuts the grace short."""
        group, self._group = self._group, None
        if group is not None:
            stopping = asyncio.ensure_future(group.stop(grace))
            hurry = asyncio.ensure_future(self._signals.hurry.wait())
            try:
                await asyncio.wait((stopping, hurry), return_when=asyncio.FIRST_COMPLETED)
                if not stopping.done():
                    await group.stop(0.0)
                await stopping
            finally:
                hurry.cancel()
        server, self._store_server = self._store_server, None
        if server is not None:
            await server.close()

    # -- endings

    def _run_ended(self, outcome: OutcomeRecord) -> Ending:
        succeeded = outcome.state is OutcomeState.SUCCEEDED
        self._metrics.run_ended(
            self._settings.role,
            succeeded=succeeded,
            restarts=outcome.restarts,
            max_restarts=self._settings.rendezvous.max_restarts,
        )
        if succeeded:
            logger.info("the run has succeeded")
            return _ending(ExitCode.SUCCEEDED, "Succeeded", "", epoch=outcome.epoch)
        reason = "WorkerFailed" if outcome.failure is not None else "TooFewNodes"
        return Ending(
            ExitCode.FAILED,
            TerminationMessage(reason=reason, message=outcome.message, epoch=outcome.epoch, failure=outcome.failure),
        )

    def _left(self, number: signal.Signals) -> Ending:
        code = LEAVING_SIGNALS[number]
        return _ending(code, "Left", f"left on {number.name}", epoch=self._epoch.number if self._epoch else 0)

    # -- what feeds the queue

    def _pump(self, feeding: Coroutine[Any, Any, None]) -> None:
        self._pumps.append(asyncio.get_running_loop().create_task(feeding))
        self._pumps = [pump for pump in self._pumps if not pump.done()]

    async def _pump_events(self, node: RendezvousNode) -> None:
        while True:
            getting = asyncio.ensure_future(node.events.get())
            await asyncio.wait((getting, node.failed), return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                self._queue.put_nowait(RendezvousFailed(_first_cause(node.failed.exception())))
                return
            self._queue.put_nowait(getting.result())

    async def _pump_exits(self, group: WorkerGroup, epoch: int) -> None:
        with suppress(GroupEnded):
            while True:
                self._queue.put_nowait(WorkerEnded(epoch, await group.next_exit()))

    async def _pump_store_server(self, server: StoreServer, epoch: int) -> None:
        await asyncio.wait((server.ended,))
        self._queue.put_nowait(StoreServerEnded(epoch))


class _SignalledFirst(Exception):  # noqa: N818 - control flow within this module
    """A signal came before the agent took part."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class _Signals:
    """Puts the signals that ask the agent to go into its queue; a context manager.

    Attributes:
        hurry: set by the second signal.
    """

    def __init__(self, queue: asyncio.Queue[Happening]) -> None:
        self.hurry = asyncio.Event()
        self._queue = queue
        self._first: asyncio.Future[signal.Signals] | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        for number in LEAVING_SIGNALS:
            loop.add_signal_handler(number, self._came, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVING_SIGNALS:
            loop.remove_signal_handler(number)

    async def unless_first(self, doing: Coroutine[Any, Any, Result]) -> Result:
        """Do something, unless a signal comes first.

        Raises:
            _SignalledFirst: one did; what was being done is cancelled.
        """
        if self._first is None:
            raise RuntimeError("signals are not watched yet")
        task = asyncio.ensure_future(doing)
        try:
            await asyncio.wait((task, self._first), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _SignalledFirst(self._first.result())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _came(self, number: signal.Signals) -> None:
        if self._first is None or self._first.done():
            self.hurry.set()
            return
        self._first.set_result(number)
        self._queue.put_nowait(Signalled(number))


def _ending(code: ExitCode, reason: str, message: str, *, epoch: int = 0) -> Ending:
    return Ending(code, TerminationMessage(reason=reason, message=message, epoch=epoch))


def _first_cause(error: BaseException | None) -> BaseException | None:
    """The error that a group of errors is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
