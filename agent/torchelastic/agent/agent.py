"""The agent's own story: meet the peers, run the workers of each epoch, and say what happened.

Everything that can happen (a new epoch, the end of a worker, a signal, the end of the run) goes through one queue and
is dealt with in order, so that the state is changed in one place only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import AsyncExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent import failure_record
from torchelastic.agent.ending import Ending
from torchelastic.agent.epoch_times import EpochTimes
from torchelastic.agent.failure import in_full
from torchelastic.agent.happenings import (
    CauseOverdue,
    Happenings,
    RendezvousFailed,
    Signalled,
    StoreServerEnded,
    WorkerEnded,
    WorkersSpoke,
)
from torchelastic.agent.introduction import connected, introduction
from torchelastic.agent.memory_kills import OUT_OF_MEMORY
from torchelastic.agent.notices import Notices
from torchelastic.agent.progress import Progress
from torchelastic.agent.signals import LEAVING_SIGNALS, SignalledFirst, Signals
from torchelastic.agent.worker_channel import WorkerChannel
from torchelastic.agent.workers import WorkerStart
from torchelastic.contract import ExitCode, FailureKind, FailureRecord, NodePhase, OutcomeState, RunState
from torchelastic.errors import NoPortFree, SettingsError, StartError, StoreError
from torchelastic.output import started
from torchelastic.rendezvous.chronicle import Chronicle
from torchelastic.rendezvous.decide import CAUSE_WINDOW, LAST_WORD_WINDOW, root_cause
from torchelastic.rendezvous.node import EpochBegan, Isolated, Noticed, RendezvousNode, RunEnded
from torchelastic.rendezvous.ranks import worker_environments

if TYPE_CHECKING:
    import signal
    from collections.abc import Coroutine, Mapping, Sequence

    from torchelastic.agent.workers import StoreServer, WorkerExit, WorkerGroup, Workers
    from torchelastic.contract import EpochRecord, OutcomeRecord
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.settings import AgentSettings

logger = logging.getLogger(__name__)

UNHEARD: Final = 0.5
"""Seconds after which a node that leaves takes it that nobody will form the epoch without it, unless one does or gives
notice of it: where all leave at once, or the store is away."""


class Agent:
    """Runs one node of a run to its end.

    Args:
        settings: what to do.
        metrics: what happens is told to this.
    """

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._times = EpochTimes(metrics)
        self._happenings = Happenings()
        self._signals = Signals(lambda number: self._happenings.put(Signalled(number)))
        self._channel: WorkerChannel
        self._notices: Notices
        self._progress: Progress
        self._node_id = f"{settings.node_name}.{secrets.token_hex(4)}"
        self._epoch: EpochRecord | None = None
        self._group: WorkerGroup | None = None
        self._unfinished: set[int] = set()
        self._failures: list[FailureRecord] = []
        self._store_server: StoreServer | None = None
        self._broken_at: float | None = None
        self._began_at = 0.0
        self._chronicle = Chronicle(settings.job_created, settings.rendezvous.resume.split)

    async def run(self, workers: Workers, metrics_port: int = 0) -> Ending:
        """Take part until the run has ended, or this agent is asked to go.

        Args:
            workers: what starts its workers, open; none is left when this ends.
            metrics_port: port on which /metrics is served, to be told to the operator; 0 for none.
        """
        began = time.monotonic()
        ending = await self._take_part(workers, metrics_port)
        if ending.code not in LEAVING_SIGNALS.values():  # who was asked to go has neither succeeded nor failed
            succeeded = ending.code is ExitCode.SUCCEEDED
            self._metrics.took("SimpleElasticAgent.run", time.monotonic() - began, succeeded=succeeded)
        return ending

    async def _take_part(self, workers: Workers, metrics_port: int) -> Ending:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._signals)
            try:
                node = await self._make_node(stack, metrics_port)
                self._progress = Progress(node)
                self._channel = await stack.enter_async_context(
                    WorkerChannel(
                        workers.scratch,
                        stands=lambda epoch, timeout: node.stands(epoch, timeout=timeout),
                        changed=lambda: self._happenings.put(WorkersSpoke()),
                        progress=self._progress,
                    )
                )
                self._notices = Notices(self._channel, node, limit=self._settings.rendezvous.notice)
                # Whoever joins before it can start its workers makes the others wait for it.
                await self._signals.unless_first(workers.ready())
                self._times.waits()
                await self._signals.unless_first(stack.enter_async_context(node))
            except (StoreError, NoPortFree) as error:
                self._times.failed()
                return Ending.by_error(error)
            except (StartError, SettingsError) as error:
                return Ending.because(ExitCode.BAD_INPUT, "BadInput", f"{error}")
            except SignalledFirst as signalled:
                return self._left(signalled.number)
            stack.push_async_callback(self._stop_workers, 0.0)
            await stack.enter_async_context(self._happenings)
            self._happenings.follow_rendezvous(node)
            try:
                return await self._live(workers, node)
            except SettingsError as error:
                await node.leave()
                return Ending.because(ExitCode.BAD_INPUT, "BadInput", f"{error}")

    async def _make_node(self, stack: AsyncExitStack, metrics_port: int) -> RendezvousNode:
        store = await self._signals.unless_first(connected(self._settings, self._metrics))
        stack.push_async_callback(store.close)
        node = RendezvousNode(
            store,
            self._settings.rendezvous,
            node=self._node_id,
            record=introduction(self._settings, metrics_port),
            chronicle=self._chronicle,
        )
        self._metrics.follow(node)
        return node

    # -- what happens

    async def _live(self, workers: Workers, node: RendezvousNode) -> Ending:
        while True:
            match happening := await self._happenings.next():
                case EpochBegan(store=listener):
                    with listener or nullcontext():
                        beginning = self._begin_epoch(happening, workers, node)
                        takes_part = node.node in happening.record.nodes
                        await (self._unless_signalled(beginning) if takes_part else beginning)
                case WorkerEnded():
                    await self._unless_signalled(self._worker_ended(happening, node))
                case CauseOverdue(epoch):
                    await self._unless_signalled(self._blame(epoch, node))
                case Noticed(record):
                    self._notices.told(record)
                case WorkersSpoke():
                    self._workers_spoke()
                case StoreServerEnded(epoch):
                    await self._unless_signalled(self._store_server_ended(epoch, node))
                case Isolated():
                    self._times.waits()
                    await self._stop_workers(0.0)
                case RunEnded(outcome):
                    await self._unless_signalled(self._stop_workers(self._settings.stop_timeout))
                    await self._stop_workers(self._settings.stop_grace)
                    self._told_of_the_end(outcome)
                    return Ending.with_the_run(outcome)
                case Signalled(number):
                    await self._leave(number, node)
                    return self._left(number)
                case RendezvousFailed(error):
                    self._times.failed()
                    await self._stop_workers(0.0)
                    return _cannot_go_on(error)

    async def _unless_signalled(self, doing: Coroutine[Any, Any, None]) -> None:
        """Do something, but no longer than until this agent is asked to go, which is what it deals with next then."""
        with suppress(SignalledFirst):
            await self._signals.unless_first(doing)

    async def _begin_epoch(self, began: EpochBegan, workers: Workers, node: RendezvousNode) -> None:
        epoch = began.record
        logger.info("epoch %d: %s", epoch.number, epoch.cause)
        if self._group is not None and self._broken_at is None:
            self._broken_at = time.monotonic()
        # Where this node is taken away, its workers may save as if it had been told to go by a signal, which comes too,
        # perhaps later: nobody waits for them.
        takes_part = node.node in epoch.nodes
        if takes_part:
            self._times.begun()
        else:
            self._times.waits()
        taken_away = epoch.members and not takes_part
        await self._stop_workers(self._settings.stop_grace if taken_away else self._settings.stop_timeout)
        self._notices.begin(epoch.number)
        self._progress.begin(epoch)
        self._epoch = epoch
        self._failures = []
        self._began_at = time.monotonic()
        self._metrics.epoch(epoch.number, epoch.world_size)
        self._metrics.remaining_restarts(
            self._settings.role, max(self._settings.rendezvous.max_restarts - epoch.restarts, 0)
        )
        if not takes_part:
            if epoch.members:
                logger.info("epoch %d: not needed now; waiting as a spare", epoch.number)
                self._chronicle.started()  # elsewhere, about now
            else:
                self._chronicle.enter(RunState.WAITING)
            self._metrics.worker_state(self._settings.role, "stopped")
            self._broken_at = None
            return
        with self._metrics.measured("SimpleElasticAgent._assign_worker_ranks"):
            environments = worker_environments(
                epoch,
                node.node,
                role=self._settings.role,
                run_id=self._settings.rendezvous.run_id,
                max_restarts=self._settings.rendezvous.max_restarts,
            )
        self._chronicle.enter(RunState.STARTING)
        try:
            with self._metrics.measured("LocalElasticAgent._start_workers"):
                self._group = await self._start(began, workers, environments)
        except StartError as error:
            self._times.started(self._broken_at, succeeded=False)
            await self._epoch_failed(node, f"{error}", FailureKind.PROGRAM)
            return
        self._chronicle.started()
        self._unfinished = {int(env["LOCAL_RANK"]) for env in environments}
        self._metrics.worker_state(self._settings.role, "healthy")
        self._times.started(self._broken_at, succeeded=True)
        if self._broken_at is not None:
            self._metrics.recovered(time.monotonic() - self._broken_at, epoch.reason)
            self._broken_at = None
        logger.info("%s", started(epoch.number, [int(env["RANK"]) for env in environments], epoch.world_size))
        self._happenings.follow_workers(self._group, epoch.number)

    async def _start(
        self, began: EpochBegan, workers: Workers, environments: Sequence[Mapping[str, str]]
    ) -> WorkerGroup:
        """Start the epoch's workers, and its store where this node serves it.

        Side by side: the store's socket is bound already, so workers that are faster than the store wait there.
        """
        epoch = began.record.number
        starts = [
            WorkerStart(int(env["LOCAL_RANK"]), int(env["RANK"]), {**env, **self._channel.variables})
            for env in environments
        ]
        serving = None if began.store is None else asyncio.ensure_future(workers.serve_store(began.store))
        try:
            self._group = await workers.start(epoch, starts)
            self._channel.began(self._group.pids)
        finally:
            if serving is not None:
                self._store_server = await serving
                self._happenings.follow_store_server(self._store_server, epoch)
        return self._group

    async def _worker_ended(self, ended: WorkerEnded, node: RendezvousNode) -> None:
        if self._is_of_the_past(ended.epoch):
            return
        taken_in = asyncio.get_running_loop().time() - ended.exit.ended
        self._metrics.took("LocalElasticAgent._monitor_workers", taken_in, succeeded=True)
        if ended.exit.exit_code == 0:
            self._worker_succeeded(ended, node)
            return
        failure = self._failure(ended.exit, ended.epoch)
        logger.warning("%s", in_full(failure))
        self._metrics.worker_state(self._settings.role, "unhealthy")
        self._failures.append(failure)
        if len(self._failures) == 1:
            self._broken_at = time.monotonic()
            self._chronicle.enter(RunState.STOPPING)
            self._happenings.put_later(self._patience(), CauseOverdue(ended.epoch))
        if failure.kind is FailureKind.PROGRAM or len(self._failures) == len(self._unfinished):
            await self._blame(ended.epoch, node)

    def _patience(self) -> float:
        """Seconds for which a worker that others have broken waits for the word of one that has broken it.

        A program that ends its process group before it ends itself is outrun by those that it leaves behind.
        """
        spent = self._epoch is not None and self._epoch.restarts >= self._settings.rendezvous.max_restarts
        return LAST_WORD_WINDOW if spent else CAUSE_WINDOW

    async def _blame(self, epoch: int, node: RendezvousNode) -> None:
        """Tell what explains most of the failures of this node's workers, and end the others."""
        if self._failures and not self._is_of_the_past(epoch):
            self._progress.report()
            node.report(epoch, failure=root_cause(enumerate(self._failures)))
            self._times.waits()
            await self._stop_workers(self._settings.stop_timeout)

    def _workers_spoke(self) -> None:
        """Say what the workers ask for and have answered; and first what is kept, which the next epoch builds upon."""
        self._progress.report()
        self._notices.report()

    def _is_of_the_past(self, epoch: int) -> bool:
        return self._group is None or self._epoch is None or epoch != self._epoch.number

    def _worker_succeeded(self, ended: WorkerEnded, node: RendezvousNode) -> None:
        self._channel.forget(ended.exit.local_rank)
        self._unfinished.discard(ended.exit.local_rank)
        done = not self._unfinished
        node.report(ended.epoch, phase=NodePhase.DONE if done else NodePhase.FINISHING)
        if done:
            self._metrics.worker_state(self._settings.role, "succeeded")

    async def _store_server_ended(self, epoch: int, node: RendezvousNode) -> None:
        server = self._store_server
        if server is None or self._is_of_the_past(epoch):
            return
        # Why it was killed explains more than what its end has done to the workers.
        memory = server.out_of_memory
        end, kind = (f"was {OUT_OF_MEMORY}", FailureKind.PROGRAM) if memory else ("died", FailureKind.COMMUNICATION)
        await self._epoch_failed(node, f"the process that serves the epoch's TCPStore {end}", kind)

    async def _epoch_failed(self, node: RendezvousNode, message: str, kind: FailureKind) -> None:
        """Report a failure that is this node's own, and no worker's; it stands for the node's first rank."""
        epoch = self._epoch
        if epoch is None or node.node not in epoch.nodes:
            return
        failure = failure_record.of_node(
            epoch, node.node, self._settings, message=message, kind=kind, began=self._began_at
        )
        self._progress.report()
        node.report(epoch.number, failure=failure)
        logger.warning("%s", in_full(failure))
        self._times.waits()
        await self._stop_workers(self._settings.stop_timeout)

    def _failure(self, worker: WorkerExit, epoch: int) -> FailureRecord:
        return failure_record.of_worker(worker, epoch, self._node_id, self._settings)

    async def _leave(self, number: signal.Signals, node: RendezvousNode) -> None:
        """Leave the run, and end the workers when nobody needs them any more.

        They run on until the epoch without this node stands: where any worker of the epoch has asked for a notice, all
        of them run on until they have saved. Where nobody will form that epoch, this node's own workers are waited for.
        """
        logger.info("%s: leaving the run", number.name)
        clock = asyncio.get_running_loop().time
        until = clock() + self._settings.rendezvous.notice
        self._notices.leave(f"{self._settings.node_name} leaves ({number.name})")
        await self._signals.unless_hurried(node.leave())
        alone = self._epoch is None or len(self._epoch.members) == 1
        unheard = clock() + (0 if alone else UNHEARD)
        while self._group is not None and not self._signals.hurry.is_set():
            waits_for_others = self._notices.stands or not self._notices.answered
            left = (until if waits_for_others else min(unheard, until)) - clock()
            if left <= 0 or await self._ends_leaving(left, node):
                break
        await self._stop_workers(self._settings.stop_grace)
        self._progress.report()  # what they have saved on the way out
        self._metrics.worker_state(self._settings.role, "stopped")

    async def _ends_leaving(self, seconds: float, node: RendezvousNode) -> bool:
        """Take in what happens next to a node that leaves; whether its workers are to end now."""
        match await self._happenings.next(seconds):
            case None:
                pass
            case Noticed(record):
                self._notices.told(record)
            case WorkersSpoke():
                self._workers_spoke()
            case WorkerEnded() as ended if self._is_of_the_past(ended.epoch):
                pass
            case WorkerEnded() as ended if ended.exit.exit_code == 0:
                self._worker_succeeded(ended, node)
                return not self._unfinished
            case EpochBegan(store=listener):
                if listener is not None:
                    listener.close()
                return True
            case _:
                return True
        return False

    async def _stop_workers(self, grace: float) -> None:
        """End the workers of this node and their store; a second signal cuts the grace short."""
        if self._group is not None:
            self._chronicle.enter(RunState.STOPPING)
            with self._metrics.measured("LocalElasticAgent._stop_workers"):
                await self._signals.unless_hurried(self._group.stop(grace))
                if not self._group.stopped:
                    await self._group.stop(0.0)
            self._group = None
            self._chronicle.enter(RunState.RENDEZVOUS)
        server, self._store_server = self._store_server, None
        if server is not None:
            server.kill()

    def _told_of_the_end(self, outcome: OutcomeRecord) -> None:
        succeeded = outcome.state is OutcomeState.SUCCEEDED
        if not succeeded and outcome.failure is None:
            self._times.failed()
        self._metrics.run_ended(
            self._settings.role,
            succeeded=succeeded,
            restarts=outcome.restarts,
            max_restarts=self._settings.rendezvous.max_restarts,
        )
        if succeeded:
            logger.info("the run has succeeded")

    def _left(self, number: signal.Signals) -> Ending:
        code = LEAVING_SIGNALS[number]
        return Ending.because(code, "Left", f"left on {number.name}", epoch=self._epoch.number if self._epoch else 0)


def _cannot_go_on(error: BaseException | None) -> Ending:
    if not isinstance(error, SettingsError | NoPortFree | StoreError):
        logger.error("the rendezvous broke", exc_info=error)
    return Ending.by_error(error)
