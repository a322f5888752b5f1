"""The agent as part of somebody else's program: it listens to no signals, and leaves that program's children alone.

It is asked to go with :meth:`LibraryAgent.ask_to_go`, from any thread. Where it meets its peers is either our own
rendezvous, or a handler that is not ours.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self, cast

from torchelastic.agent.agent import Agent
from torchelastic.agent.happenings import Signalled
from torchelastic.agent.server.api import ProcessFailure
from torchelastic.agent.signals import Signals
from torchelastic.agent.workers import workers_of
from torchelastic.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack
    from pathlib import Path
    from types import TracebackType

    from torchelastic.agent.ending import Ending
    from torchelastic.agent.function_call import FunctionCall
    from torchelastic.agent.workers import WorkerExit, Workers
    from torchelastic.contract import FailureRecord
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.rendezvous.node import RendezvousNode
    from torchelastic.rendezvous.polled import PolledNode
    from torchelastic.settings import AgentSettings


class LibraryAgent(Agent):
    """Runs one node of a run to its end, in a program that does other things, too.

    Args:
        settings: what to do.
        metrics: what happens is told to this.
        node: this node on a handler that is not ours; None for our own rendezvous.
        node_id: this node's id.
        call: what the workers call; None where they run a command.

    Attributes:
        failures: of this node's workers in the last epoch, by global rank.
        results: what they returned, by global rank, where the run has succeeded; None for commands.
    """

    def __init__(
        self,
        settings: AgentSettings,
        metrics: AgentMetrics,
        *,
        node: PolledNode | None,
        node_id: str,
        call: FunctionCall | None,
    ) -> None:
        super().__init__(settings, metrics)
        self.failures: dict[int, ProcessFailure] = {}
        self.results: dict[int, Any] = {}
        self._failed_in = 0
        self._node_id = node_id
        self._foreign = node
        self._call = call
        self._requests = _Requests(lambda number: self._happenings.put(Signalled(number)))
        self._signals = self._requests

    def ask_to_go(self) -> None:
        """Have the agent leave the run, as on SIGTERM; asked twice, it does not wait for its workers."""
        self._requests.ask()

    async def run_beside(self) -> Ending:
        """Run beside what else the program does: see :meth:`Agent.run`.

        Raises:
            SettingsError: the workers' output cannot go where it is to go, or the machine does not allow workers.
        """
        async with workers_of(self._settings, alone=False) as workers:
            if self._call is not None:
                self._call.put(workers.scratch)
            return await self.run(workers)

    async def _make_node(self, stack: AsyncExitStack, metrics_port: int) -> RendezvousNode:
        if self._foreign is not None:
            return cast("RendezvousNode", self._foreign)  # it does what is asked of one here
        return await super()._make_node(stack, metrics_port)

    async def _live(self, workers: Workers, node: RendezvousNode) -> Ending:
        ending = await super()._live(workers, node)
        if ending.code is ExitCode.SUCCEEDED:
            self._take_results(workers.scratch)
        return ending

    def _take_results(self, scratch: Path) -> None:
        epoch = self._epoch
        if epoch is None or self._node_id not in epoch.nodes:
            return
        position = epoch.nodes.index(self._node_id)
        first = epoch.first_rank(self._node_id)
        ranks = range(first, first + epoch.members[position].workers)
        self.results = dict.fromkeys(ranks) if self._call is None else self._call.results(scratch, epoch.number, ranks)

    def _failure(self, worker: WorkerExit, epoch: int) -> FailureRecord:
        failure = super()._failure(worker, epoch)
        if self._failed_in != epoch:
            self._failed_in = epoch
            self.failures.clear()
        self.failures[failure.rank] = process_failure(failure)
        return failure


def process_failure(failure: FailureRecord) -> ProcessFailure:
    """A failure as launchers see it."""
    return ProcessFailure(
        local_rank=failure.local_rank,
        pid=failure.pid,
        exitcode=failure.exit_code,
        message=failure.message,
        host=failure.host,
        timestamp=int(time.time()),
    )


class _Requests(Signals):
    """Stands in the place of signals, which are the program's own: whoever wants the agent to go says so."""

    def __init__(self, came: Callable[[signal.Signals], None]) -> None:
        super().__init__(came)
        self._lock = threading.Lock()
        self._asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._first = self._loop.create_future()
            for _ in range(self._asked):
                self._take(signal.SIGTERM)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._loop = None

    def ask(self) -> None:
        """Say that the agent is to go; from any thread, before it runs or while it does."""
        with self._lock:
            self._asked += 1
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._take, signal.SIGTERM)
