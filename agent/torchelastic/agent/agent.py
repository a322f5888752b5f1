"""The agent: join the rendezvous, run the workers of each round, and report how they exit.

All events (a new round, the exit of a worker, a signal, the end of the run) go through the queue of the rendezvous and
are handled in order, so that the state changes in one place only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent.etcd_host import EtcdHost
from torchelastic.agent.failures import OUT_OF_MEMORY, ExitStatus, describe_in_log, failure_of_worker
from torchelastic.agent.signals import SignalReceived, Signals
from torchelastic.agent.worker_socket import WorkerSocket
from torchelastic.errors import NoFreePort, SettingsError, StartError, StoreError
from torchelastic.protocol import log_format
from torchelastic.protocol.log_format import STARTED, ranks_in_words
from torchelastic.protocol.pod import LEAVING_SIGNALS, LEFT_CODES, ExitCode
from torchelastic.protocol.records import (
    FailureKind,
    FailureRecord,
    NodePhase,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RunState,
)
from torchelastic.protocol.worker import WORKER_SOCKET
from torchelastic.rendezvous.history import History, read_imports
from torchelastic.rendezvous.node import (
    Partitioned,
    RendezvousNode,
    RoundStarted,
    failure_of_node,
    spare_environments,
    worker_environments,
)
from torchelastic.rendezvous.policy.plan import CAUSE_WINDOW, REPORT_WINDOW, root_cause
from torchelastic.store.client import connect_within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from torchelastic.agent.failures import WorkerExit
    from torchelastic.agent.workers.pool import Worker, WorkerGroup, Workers
    from torchelastic.agent.workers.processes import Child
    from torchelastic.config.settings import AgentSettings
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.protocol.records import RoundReason, RoundRecord
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT: Final = 0.5
"""Seconds after which a leaving node assumes that no leader will form a round without it."""


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker of a round has exited."""

    round: RoundRecord
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class RoundCallback:
    """A callback for a round is due: no other failure explains the first one, or the TCPStore's process has exited."""

    round: RoundRecord
    callback: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class RequestsChanged:
    """The workers have changed their requests for notice, or have answered a notice."""


class Agent:
    """Runs one node of a run until the run ends or the node leaves.

    Args:
        settings: the settings of this agent.
        metrics: records the measurements.
        connect: returns the store of the run; None for the store of the settings.

    Attributes:
        failures: the failures of this node's workers in the current round.
    """

    def __init__(
        self,
        settings: AgentSettings,
        metrics: AgentMetrics,
        connect: Callable[[], Coroutine[Any, Any, Store]] | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._connect = connect or partial(connect_within, settings.rendezvous.join_timeout, settings.store)
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._signals = Signals(self._events.put_nowait, settings.signals)
        self._node: RendezvousNode
        self._socket: WorkerSocket
        self._node_id = f"{settings.node_name}.{secrets.token_hex(4)}"
        self._round: RoundRecord | None = None
        self._group: WorkerGroup | None = None
        self._staying: WorkerGroup | None = None
        self._environments: list[dict[str, str]] = []
        self._unfinished: set[int] = set()
        self.failures: list[FailureRecord] = []
        self._broken_at: float | None = None
        self._recovery: tuple[float, RoundReason] | None = None
        self._ranks_without_step: set[int] = set()
        self._began_at = 0.0
        self._history = History(settings.job_created or None, settings.rendezvous.resume.time_breakdown)

    async def run(self, workers: Workers, metrics_port: int = 0) -> ExitStatus:
        """Take part in the run until it ends or a signal asks this agent to leave.

        Args:
            workers: starts the workers; the caller has entered this context. When the method returns, no worker runs.
            metrics_port: port on which /metrics is served, for the operator; 0 for none.
        """
        began = time.monotonic()
        status = await self._participate(workers, metrics_port)
        if status.code not in LEFT_CODES:  # an agent that leaves has neither succeeded nor failed
            succeeded = status.code is ExitCode.SUCCEEDED
            self._metrics.took("SimpleElasticAgent.run", time.monotonic() - began, succeeded=succeeded)
        return status

    async def _participate(self, workers: Workers, metrics_port: int) -> ExitStatus:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._signals)
            try:
                node = self._node = await self._make_node(stack, workers, metrics_port)
                workers.tcp_store_listener = lambda: node.tcp_store_listener
                self._socket = await stack.enter_async_context(
                    WorkerSocket(
                        workers.scratch,
                        node,
                        limit=self._settings.rendezvous.notice,
                        changed=lambda: self._events.put_nowait(RequestsChanged()),
                        stepped=lambda rank: self._stepped(rank, workers),
                        imported=workers.fork_server.learn,
                    )
                )
                # The others see this node before it can start workers, but form no round with it until then.
                await self._signals.run_until_first_signal(stack.enter_async_context(node))
                workers.fork_server.expect(await self._signals.run_until_first_signal(read_imports(node.run)))
                await self._signals.run_until_first_signal(workers.fork_server.ready())
                self._metrics.rendezvous_began()
                node.registration.update(starting=False)
            except (StoreError, NoFreePort, StartError, SettingsError) as error:
                self._metrics.rendezvous_ended(succeeded=False)
                return ExitStatus.of_error(error)
            except SignalReceived:
                return self._left(self._signals.number)
            stack.push_async_callback(self._stop_workers, 0.0)
            node.failed.add_done_callback(self._rendezvous_ended)
            try:
                return await self._handle_events(workers)
            except SettingsError as error:
                await node.leave()
                return ExitStatus.of_error(error)

    async def _make_node(self, stack: AsyncExitStack, workers: Workers, metrics_port: int) -> RendezvousNode:
        settings = self._settings
        if settings.store is not None and settings.etcd_addresses:  # of this machine
            host = EtcdHost(settings.store, settings.etcd_addresses, settings.rendezvous.run_id, workers.start_daemon)
            await self._signals.run_until_first_signal(stack.enter_async_context(host.serving()))
        store = await self._signals.run_until_first_signal(self._connect())
        stack.push_async_callback(store.close)
        node = RendezvousNode(
            store,
            settings.rendezvous,
            node=self._node_id,
            record=settings.node_record(metrics_port),
            history=self._history,
            answered=None if settings.store is None else self._metrics.store_answered,
        )
        node.events = self._events
        self._metrics.follow(node)
        return node

    @property
    def ranks(self) -> tuple[int, range] | None:
        """The number of the last round, and the ranks of this node's workers in it; None if it has none in it."""
        if (round := self._round) is None or self._node_id not in round.nodes:
            return None
        return round.number, self._ranks_in(round)

    def _ranks_in(self, round: RoundRecord) -> range:
        """Return the ranks of this node's workers in a round in which it takes part."""
        first = round.first_rank(self._node_id)
        return range(first, first + self._settings.workers)

    @property
    def world_size(self) -> int:
        """The number of workers in the last round; 0 before the first one."""
        return 0 if self._round is None else self._round.world_size

    def is_own(self, failure: FailureRecord) -> bool:
        """Return whether a worker of this node, and of the last round, has this failure."""
        return self._round is not None and (failure.node, failure.round) == (self._node_id, self._round.number)

    def leave(self) -> None:
        """Leave the run, as on SIGTERM; after a second call, the agent does not wait for its workers."""
        self._signals.handle(signal.SIGTERM)

    # -- events

    async def _handle_events(self, workers: Workers) -> ExitStatus:
        while True:
            match event := await self._events.get():
                case RoundStarted(tcp_store_listener=listener):
                    with listener or nullcontext():
                        beginning = self._begin_round(event, workers)
                        takes_part = self._node_id in event.record.nodes
                        await (self._unless_signalled(beginning) if takes_part else beginning)
                case WorkerEnded(round=round) | RoundCallback(round=round) if self._is_past(round):
                    pass
                case WorkerEnded():
                    await self._unless_signalled(self._worker_ended(event))
                case RoundCallback(callback=callback):
                    await self._unless_signalled(callback())
                case NoticeRecord() as notice:
                    self._socket.take_notice(notice)
                case RequestsChanged():
                    self._socket.report()
                    self._report_staying()
                case Partitioned():
                    self._metrics.rendezvous_began()
                    await self._stop_workers(0.0)
                    self._report_staying()
                case OutcomeRecord() as outcome:
                    # As under torchrun, only a clean end spares processes in sessions of their own.
                    clean = outcome.state is OutcomeState.SUCCEEDED
                    await self._unless_signalled(self._stop_workers(self._settings.stop_timeout, only_sessions=clean))
                    await self._stop_workers(self._settings.shutdown_timeout, self._signals.number)
                    self._metrics.run_ended(outcome, self._settings.rendezvous.max_restarts)
                    return ExitStatus.of_run(outcome)
                case signal.Signals() as number:
                    await self._leave(number)
                    return self._left(number)
                case ExitStatus() as failed:  # the rendezvous has ended
                    self._metrics.rendezvous_ended(succeeded=False)
                    await self._stop_workers(0.0)
                    return failed

    def _rendezvous_ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            return  # this agent closes the rendezvous
        error = running.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._events.put_nowait(ExitStatus.of_error(error))

    async def _unless_signalled(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, but cancel it when a signal asks this agent to leave; the signal is then the next event."""
        with suppress(SignalReceived):
            await self._signals.run_until_first_signal(work)

    async def _begin_round(self, began: RoundStarted, workers: Workers) -> None:
        round = began.record
        logger.info("round %d: %s", round.number, round.cause)
        if self._group is not None and self._broken_at is None:
            self._broken_at = time.monotonic()
        # The workers of a node that is removed from the round get the same grace period as on a signal.
        takes_part = self._node_id in round.nodes
        if takes_part:
            self._metrics.rendezvous_ended(succeeded=True)
            self._ranks_without_step = {*self._ranks_in(round)}
            if self._broken_at is not None and self._recovery is None:  # a failure before the first step prolongs it
                self._recovery = self._broken_at, round.reason
        else:
            self._metrics.rendezvous_began()
        warm_spare = self._settings.warm_spare and bool(round.members) and not takes_part
        with self._metrics.measured("SimpleElasticAgent._assign_worker_ranks"):
            environments = self._environments_in(round, warm_spare=warm_spare)
        if round.members and not takes_part and not warm_spare:
            await self._socket.leave_world(self._settings.rejoin_timeout)
            await self._stop_workers(self._settings.shutdown_timeout, signal.SIGTERM)
            staying = []
            self._socket.begin(round, {})
        else:
            staying = await self._keep_staying(began, environments)
        self._round = round
        self.failures = []
        self._began_at = time.monotonic()
        self._metrics.round_began(round, self._settings.rendezvous.max_restarts)
        if not takes_part:
            if round.members:
                logger.info("round %d: not needed now; waiting as a spare", round.number)
                self._history.workers_started()  # the other nodes start workers about now
            else:
                self._history.enter(RunState.WAITING)
            self._metrics.workers_changed("stopped")
            self._broken_at = self._recovery = None
            if warm_spare:
                with suppress(StartError):
                    self._group = await self._start(began, workers, environments, staying, warm_spare=True)
                    self._staying = None
            self._report_staying()
            return
        self._environments = environments
        self._history.enter(RunState.STARTING)
        try:
            with self._metrics.measured("LocalElasticAgent._start_workers"):
                self._group = await self._start(began, workers, environments, staying)
                self._staying = None
        except StartError as error:
            self._metrics.workers_started(self._broken_at, round.reason, succeeded=False)
            await self._round_failed(f"{error}", FailureKind.PROGRAM)
            return
        self._report_staying()
        self._history.workers_started()
        self._unfinished = {int(env["LOCAL_RANK"]) for env in environments}
        self._metrics.workers_started(self._broken_at, round.reason)
        self._broken_at = None
        stay = [worker.rank for worker in staying]
        started = [int(env["RANK"]) for env in environments if int(env["RANK"]) not in stay]
        logger.info(STARTED, round.number, ranks_in_words(started), round.world_size, log_format.staying(stay))

    async def _keep_staying(self, began: RoundStarted, environments: Sequence[dict[str, str]]) -> list[Worker]:
        """Send the workers that stay to the round, and stop the others; return those that stay."""
        group, local_ranks = self._group or self._staying, self._staying_local_ranks()
        staying = [] if group is None else [each for each in group.staying if each.local_rank in local_ranks]
        if not (staying and environments):
            await self._stop_workers(self._settings.stop_timeout, staying=local_ranks)
            staying = []
        of_staying = {worker.rank: environments[worker.local_rank] for worker in staying}
        if self._settings.virtual_local_rank:
            of_staying = {rank: {**environment, "LOCAL_RANK": "0"} for rank, environment in of_staying.items()}
        if began.tcp_store_listener is not None:
            with suppress(OSError):  # raised again when the TCPStore is started
                began.tcp_store_listener.listen()
        self._socket.begin(began.record, of_staying)
        if staying:  # they do not wait for the others to be stopped
            await self._stop_workers(self._settings.stop_timeout, staying=local_ranks)
            staying = [] if self._staying is None else [*self._staying.staying]
        for worker in staying:
            worker.rank = int(environments[worker.local_rank]["RANK"])
        return staying

    def _environments_in(self, round: RoundRecord, *, warm_spare: bool) -> list[dict[str, str]]:
        """Return the variables of each worker of this node in a round; none if it has no workers then."""
        settings, rendezvous = self._settings, self._settings.rendezvous
        about: dict[str, Any] = {
            "role": settings.role,
            "run_id": rendezvous.run_id,
            "max_restarts": rendezvous.max_restarts,
        }
        if warm_spare:
            return spare_environments(round, settings.workers, **about)
        return worker_environments(round, self._node_id, **about) if self._node_id in round.nodes else []

    async def _start(
        self,
        began: RoundStarted,
        workers: Workers,
        environments: Sequence[Mapping[str, str]],
        staying: Sequence[Worker],
        *,
        warm_spare: bool = False,
    ) -> WorkerGroup:
        """Start the round's workers, except those that stay, and its TCPStore if this node serves it."""
        round = began.record
        group = await workers.start(
            round.number,
            [{**environment, WORKER_SOCKET: self._socket.path} for environment in environments],
            lambda exit_: self._events.put_nowait(WorkerEnded(round, exit_)),
            began.tcp_store_listener,
            staying,
            worker_socket=self._socket,
            none_hangs=partial(self._none_hangs, round),
            warm_spare=warm_spare,
        )
        for worker in staying:  # a worker that has not left an earlier world has less time
            absent = RoundCallback(round, partial(self._kill_absent, worker.rank))
            loop = asyncio.get_running_loop()
            asked_at = self._socket.asked_at(worker.rank) or loop.time()  # it has left, but not yet said for which one
            loop.call_at(asked_at + self._settings.rejoin_timeout, self._put_if_absent, worker.rank, absent)
        if group.tcp_store_process is not None:
            ended = RoundCallback(round, partial(self._tcp_store_ended, group.tcp_store_process))
            group.tcp_store_process.ended.add_done_callback(lambda _: self._events.put_nowait(ended))
        return group

    def _none_hangs(self, round: RoundRecord, timeout: float) -> None:
        """Begin another round if no other node reports a worker that hangs."""
        message = f"no worker has sent a heartbeat for {timeout:g} s, but none of this node hangs"
        failed = RoundCallback(round, partial(self._round_failed, message, FailureKind.COMMUNICATION))
        asyncio.get_running_loop().call_later(REPORT_WINDOW, self._events.put_nowait, failed)

    def _put_if_absent(self, rank: int, absent: RoundCallback) -> None:
        if rank in self._socket.expected:  # an event could end the time in which this node leaves
            self._events.put_nowait(absent)

    async def _kill_absent(self, rank: int) -> None:
        """Kill a worker if it has not left the world of an earlier round."""
        for worker in self._group.running if self._group is not None else ():
            if worker.rank == rank and rank in self._socket.expected:
                logger.warning(
                    "rank %d, process %d, is killed: it did not leave its world within %g s.",
                    *(worker.rank, worker.child.pid, self._settings.rejoin_timeout),
                )
                worker.child.signal(signal.SIGKILL)

    def _stepped(self, rank: int, workers: Workers) -> None:
        """Record the recovery, and what workers import, when all workers of this node have begun their first step."""
        self._ranks_without_step.discard(rank)
        if not self._ranks_without_step:
            self._history.imports = workers.fork_server.learned
        if self._recovery is not None and not self._ranks_without_step:
            (broken_at, reason), self._recovery = self._recovery, None
            self._metrics.recovered(broken_at, reason)

    async def _worker_ended(self, ended: WorkerEnded) -> None:
        if self._node_id not in ended.round.nodes:
            self._socket.forget(ended.exit.rank)
            logger.warning(
                "a worker of this spare node has exited with code %d before it had a place in a round: "
                "--warm-spare is for programs with @torchelastic.elastic.",
                ended.exit.exit_code,
            )
            return
        delay = asyncio.get_running_loop().time() - ended.exit.ended
        self._metrics.took("LocalElasticAgent._monitor_workers", delay, succeeded=True)
        if ended.exit.exit_code == 0:
            if ended.exit.rank in self._socket.expected:
                message = f"rank {ended.exit.rank} ended its training while the round changed"
                await self._round_failed(message, FailureKind.COMMUNICATION)
            else:
                self._worker_succeeded(ended)
            return
        self._socket.forget(ended.exit.rank)
        failure = failure_of_worker(ended.exit, ended.round.number, self._node_id, self._settings)
        logger.warning("%s", describe_in_log(failure))
        self._metrics.workers_changed("unhealthy")
        self.failures.append(failure)
        if len(self.failures) == 1:
            self._broken_at = ended.exit.ended
            self._history.enter(RunState.STOPPING)
            spent = self._round is not None and self._round.restarts >= self._settings.rendezvous.max_restarts
            window = REPORT_WINDOW if spent else CAUSE_WINDOW  # another failure may explain this one
            report_cause = RoundCallback(ended.round, self._report_root_cause)
            asyncio.get_running_loop().call_later(window, self._events.put_nowait, report_cause)
        if failure.kind is FailureKind.PROGRAM or len(self.failures) == len(self._unfinished):
            await self._report_root_cause()

    async def _report_root_cause(self) -> None:
        """Report the failure that is the most likely root cause, and stop the other workers."""
        if self.failures:
            await self._report_failure(root_cause(enumerate(self.failures)))

    async def _report_failure(self, failure: FailureRecord) -> None:
        staying = self._staying_local_ranks()
        self._node.report(failure.round, failure=failure, staying=staying, has_state=self._socket.has_state)
        self._metrics.rendezvous_began()
        self._socket.break_world()
        await self._stop_workers(self._settings.stop_timeout, staying=staying)

    def _staying_local_ranks(self) -> tuple[int, ...]:
        group, ranks = self._group or self._staying, self._socket.staying
        return () if group is None else tuple(each.local_rank for each in group.running if each.rank in ranks)

    def _report_staying(self) -> None:
        """Tell the leader which workers continue in the next round."""
        if self._round is None:
            return
        staying, before = self._staying_local_ranks(), self._node.registration.record.staying
        self._node.report(self._round.number, staying=staying, has_state=self._socket.has_state)
        is_spare = bool(self._round.members) and self._node_id not in self._round.nodes
        if is_spare and len(staying) == self._settings.workers > len(before):
            logger.info("round %d: standing by: the workers of this spare node are ready", self._round.number)

    def _is_past(self, round: RoundRecord) -> bool:
        """Return whether the workers of a round were stopped; a later round may have the same number."""
        return self._group is None or round is not self._round

    def _worker_succeeded(self, ended: WorkerEnded) -> None:
        self._socket.forget(ended.exit.rank)
        self._unfinished.discard(ended.exit.local_rank)
        done = not self._unfinished
        self._node.report(ended.round.number, phase=NodePhase.DONE if done else NodePhase.FINISHING)
        if done:
            self._metrics.workers_changed("succeeded")

    async def _tcp_store_ended(self, process: Child) -> None:
        end, kind = "died", FailureKind.COMMUNICATION
        if process.out_of_memory:
            end, kind = f"was {OUT_OF_MEMORY}", FailureKind.PROGRAM
        await self._round_failed(f"the process that serves the round's TCPStore {end}", kind)

    async def _round_failed(self, message: str, kind: FailureKind) -> None:
        """Report a failure of this node that is not the exit of a worker."""
        round = self._round
        if round is None or self._node_id not in round.nodes:
            return
        failure = failure_of_node(round, self._node_id, message=message, kind=kind, began=self._began_at)
        logger.warning("%s", describe_in_log(failure))
        await self._report_failure(failure)

    async def _leave(self, number: signal.Signals) -> None:
        """Leave the run, and stop the workers when no round needs them.

        The workers continue until a round without this node begins. If a worker of the round has asked for notices,
        the leader forms that round after all workers have answered. If no leader forms it, the agent waits only for the
        answers of its own workers.
        """
        logger.info("%s: leaving the run", number.name)
        clock = asyncio.get_running_loop().time
        until = clock() + self._settings.rendezvous.notice
        self._socket.leave(f"{self._settings.node_name} leaves ({number.name})")
        await self._signals.run_until_second_signal(self._node.leave())
        alone = self._round is None or len(self._round.members) == 1
        no_leader = clock() + (0 if alone else LEAVE_TIMEOUT)
        while self._group is not None and not self._signals.second.is_set():
            left = (until if self._socket.pending else min(no_leader, until)) - clock()
            if left <= 0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    event = await self._events.get()
                if self._ends_leaving(event):
                    if isinstance(event, RoundStarted):
                        leaving = self._socket.leave_world(self._settings.rejoin_timeout)
                        await self._signals.run_until_second_signal(leaving)
                    break
        await self._stop_workers(self._settings.shutdown_timeout, number)
        self._metrics.workers_changed("stopped")

    def _ends_leaving(self, event: object) -> bool:
        """Handle an event while this node leaves; return whether to stop its workers now."""
        match event:
            case NoticeRecord() as notice:
                self._socket.take_notice(notice)
            case RequestsChanged():
                self._socket.report()
            case WorkerEnded(round=round) | RoundCallback(round=round) if self._is_past(round):
                pass
            case WorkerEnded() as ended if ended.exit.exit_code == 0:
                self._worker_succeeded(ended)
                return not self._unfinished
            case RoundStarted(tcp_store_listener=listener):
                if listener is not None:
                    listener.close()
                return True
            case _:
                return True
        return False

    async def _stop_workers(
        self,
        grace: float,
        number: signal.Signals | None = None,
        *,
        only_sessions: bool = False,
        staying: Collection[int] = (),
    ) -> None:
        """Stop the workers of this node as :meth:`WorkerGroup.stop` does; a second signal ends the grace period."""
        group = self._group or self._staying
        if group is not None:
            self._history.enter(RunState.STOPPING)
            with self._metrics.measured("LocalElasticAgent._stop_workers"):
                stopping = group.stop(grace, number, only_sessions=only_sessions, staying=staying)
                await self._signals.run_until_second_signal(stopping)
                if not group.stopped:
                    await group.stop(0.0)
            self._group, self._staying = None, group if group.staying else None
            self._history.enter(RunState.RENDEZVOUS)

    def _left(self, number: signal.Signals) -> ExitStatus:
        round = self._round.number if self._round else 0
        return ExitStatus.because(LEAVING_SIGNALS[number], "Left", f"left on {number.name}", round=round)
