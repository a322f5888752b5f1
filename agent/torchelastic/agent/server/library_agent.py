"""The agent as part of a user's program: it handles no signals, and does not touch that program's children."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from torchelastic.agent.agent import Agent
from torchelastic.agent.events import Signalled, Signals
from torchelastic.agent.function_call import read_results, write_call
from torchelastic.agent.server.api import ProcessFailure, RunResult, WorkerState
from torchelastic.agent.workers.pool import workers_of
from torchelastic.errors import SettingsError
from torchelastic.metrics.agent import AgentMetrics
from torchelastic.protocol import ExitCode
from torchelastic.rendezvous.api import RendezvousConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torchelastic.agent.exit_status import ExitStatus
    from torchelastic.agent.failures import WorkerExit
    from torchelastic.agent.workers.pool import Workers
    from torchelastic.config.settings import AgentSettings
    from torchelastic.protocol import FailureRecord


class LibraryAgent(Agent):
    """Runs one node of a run in a program that does other things, too.

    Args:
        settings: what to do.
        call: what the workers call, see :func:`~torchelastic.agent.function_call.call_of`; None if they run a command.
    """

    def __init__(self, settings: AgentSettings, call: bytes | None) -> None:
        super().__init__(settings, AgentMetrics())
        self._call = call
        self._failures_here: dict[int, ProcessFailure] = {}
        self._failed_in = 0
        self._results: dict[int, Any] = {}
        self._requests = _Requests(lambda number: self._events.put_nowait(Signalled(number)))
        self._signals = self._requests

    def launch(self) -> RunResult:
        """Run the workers to their end, with an event loop of its own.

        Raises:
            RendezvousConnectionError: this node cannot meet the others.
            SettingsError: what is asked for cannot be done; the message says what to change.
        """
        return self._result(asyncio.run(self._run()))

    def stop(self) -> None:
        """Leave the run, as on SIGTERM; from any thread. The second time, without waiting for the workers."""
        self._requests.ask()

    async def _run(self) -> ExitStatus:
        async with workers_of(self._settings, owns_process=False) as workers:
            if self._call is not None:
                write_call(workers.scratch, self._call)
            return await self.run(workers)

    async def _live(self, workers: Workers) -> ExitStatus:
        ending = await super()._live(workers)
        round = self._round
        if ending.code is ExitCode.SUCCEEDED and round is not None and self._node_id in round.nodes:
            first = round.first_rank(self._node_id)
            ranks = range(first, first + self._settings.workers)
            # Of a command there are none.
            self._results = read_results(workers.scratch, round.number, ranks)
        return ending

    def _failure(self, worker: WorkerExit, round: int) -> FailureRecord:
        failure = super()._failure(worker, round)
        if self._failed_in != round:
            self._failed_in = round
            self._failures_here.clear()
        self._failures_here[failure.rank] = _process_failure(failure)
        return failure

    def _result(self, ending: ExitStatus) -> RunResult:
        message = ending.message
        match ending.code:
            case ExitCode.SUCCEEDED:
                return RunResult(WorkerState.SUCCEEDED, return_values=self._results)
            case ExitCode.FAILED if message.failure is not None:
                return RunResult(WorkerState.FAILED, failures=self._failures_after(message.failure))
            case ExitCode.LEFT | ExitCode.INTERRUPTED:
                return RunResult(WorkerState.STOPPED)
            case ExitCode.BAD_INPUT:
                raise SettingsError(message.message)
            case _:
                raise RendezvousConnectionError(message.message)

    def _failures_after(self, cause: FailureRecord) -> dict[int, ProcessFailure]:
        """Return this node's failures after the one that ended the run, to which torch gives the earliest time."""
        others = {rank: failure for rank, failure in self._failures_here.items() if rank != cause.rank}
        first = _process_failure(cause)
        earliest = min([first.timestamp, *(failure.timestamp for failure in others.values())])
        return {cause.rank: dataclasses.replace(first, timestamp=earliest), **others}


def _process_failure(failure: FailureRecord) -> ProcessFailure:
    return ProcessFailure(
        local_rank=failure.local_rank,
        pid=failure.pid,
        exitcode=failure.exit_code,
        message=failure.message,
        host=failure.host,
        timestamp=int(time.time()),
    )


class _Requests(Signals):
    """Requests to leave, in place of signals, which are handled by the program."""

    def __init__(self, came: Callable[[signal.Signals], None]) -> None:
        super().__init__(came)
        self._lock = threading.Lock()
        self._asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            for _ in range(self._asked):
                self._take(signal.SIGTERM)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._loop = None

    def ask(self) -> None:
        """Ask the agent to leave; from any thread, before it runs or while it does."""
        with self._lock:
            self._asked += 1
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._take, signal.SIGTERM)
