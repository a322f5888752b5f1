"""The workers of one round on this node: their exits, in order, and how they are stopped together."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.agent import failures
from torchelastic.agent.failures import WorkerExit
from torchelastic.agent.workers import hang
from torchelastic.errors import TorchElasticError
from torchelastic.protocol import FailureKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.agent.failures import MemoryKills
    from torchelastic.agent.logs import WorkerOutput
    from torchelastic.agent.workers.processes import Child, Reaper

_DRAIN_TIMEOUT: Final = 0.5
"""Seconds to wait for the rest of an ended worker's output."""


class GroupEnded(TorchElasticError):  # noqa: N818 - a state
    """There are no more exits."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker to start; `env` is added to the agent's own environment."""

    local_rank: int
    rank: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that was started, with the start time by the loop's clock and the memory kills before it."""

    start: WorkerStart
    child: Child
    output: WorkerOutput
    started: float
    memory_kills: int


class WorkerGroup:
    """The workers of one round on this node; only one task may wait for the next exit.

    `mark` is the tree mark of all workers of this agent. If heartbeats are expected, a worker without any is ended.
    When the group is `stopped`, none of its processes is left.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        reaper: Reaper,
        memory_kills: MemoryKills,
        mark: str,
        heartbeats: hang.Heartbeats | None = None,
    ) -> None:
        self._workers = tuple(workers)
        self._reaper = reaper
        self._memory_kills = memory_kills
        self._mark = mark
        self._exits: deque[asyncio.Future[WorkerExit]] = deque()
        self._changed = asyncio.Event()
        self._unreported = {worker.child.pid for worker in self._workers}
        self._stopping = False
        self.stopped = False
        for worker in self._workers:
            worker.child.ended.add_done_callback(lambda _, worker=worker: self._ended(worker))  # type: ignore[misc]
        self._hangs: dict[int, hang.Hang] = {}
        self._monitor = None if heartbeats is None else asyncio.create_task(self._end_hanging(heartbeats))

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids by local rank, of ended workers too."""
        return {worker.start.local_rank: worker.child.pid for worker in self._workers}

    @property
    def running_pids(self) -> Mapping[int, int]:
        """Process ids of running workers by global rank."""
        return {worker.start.rank: worker.child.pid for worker in self._workers if worker.child.running}

    @property
    def running(self) -> frozenset[int]:
        """Local ranks of running workers."""
        return frozenset(worker.start.local_rank for worker in self._workers if worker.child.running)

    async def next_exit(self) -> WorkerExit:
        """Return the next exit, in the order of the ends; cancelling this loses none.

        Raises:
            GroupEnded: there are no more, or the group is being stopped.
        """
        while not self._exits:
            if self._stopping or not self._unreported:
                raise GroupEnded("every exit has been reported")
            self._changed.clear()
            await self._changed.wait()
        exit_ = await asyncio.shield(self._exits[0])
        self._exits.popleft()
        return exit_

    async def stop(self, grace: float) -> None:
        """End all workers and all processes that they have started, and wait for that.

        Args:
            grace: seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once. A second call may shorten it.
        """
        self._stopping = True
        self._changed.set()
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait([self._monitor])
        children = [worker.child for worker in self._workers if worker.child.running]
        if grace > 0 and children:
            for child in children:
                child.signal(signal.SIGTERM)
            await asyncio.wait([child.ended for child in children], timeout=grace)
        await self._reaper.kill_trees([worker.child for worker in self._workers], self._mark)
        await asyncio.gather(*self._exits, return_exceptions=True)
        for worker in self._workers:
            await worker.output.drained(_DRAIN_TIMEOUT)
            worker.output.close()
        self.stopped = True

    def _ended(self, worker: Worker) -> None:
        if not self._stopping and worker.start.local_rank not in self._hangs:
            self._report(asyncio.create_task(self._exit_of(worker)), worker)

    def _report(self, exit_: asyncio.Future[WorkerExit], worker: Worker) -> None:
        self._exits.append(exit_)
        self._unreported.discard(worker.child.pid)
        self._changed.set()

    async def _exit_of(self, worker: Worker) -> WorkerExit:
        exit_code = worker.child.ended.result()
        if exit_code not in {0, -signal.SIGKILL}:
            await worker.output.drained(_DRAIN_TIMEOUT)
        tail = worker.output.tail()
        hung = self._hangs.get(worker.start.local_rank)
        if exit_code == 0:
            explanation = failures.Explanation(FailureKind.PROGRAM, "")
        elif hung is not None and exit_code in hang.HANG_EXIT_CODES:
            explanation = hang.explain(hung, tail)
        else:
            memory = self._memory_kills.explains(exit_code, since=worker.memory_kills)
            explanation = failures.explain(exit_code, error_file=worker.output.error_file, tail=tail, memory=memory)
        return WorkerExit(
            local_rank=worker.start.local_rank,
            rank=worker.start.rank,
            pid=worker.child.pid,
            exit_code=exit_code,
            uptime=worker.child.end_time - worker.started,
            ended=worker.child.end_time,
            kind=explanation.kind,
            message=explanation.message,
            final=explanation.final,
        )

    async def _end_hanging(self, heartbeats: hang.Heartbeats) -> None:
        """End workers that hang, until none runs.

        All workers that wait for one that hangs are silent too. So all silent ones are ended, and those that explain
        most are reported first.
        """
        workers = {worker.start.local_rank: worker for worker in self._workers}
        while silent := await heartbeats.silent(lambda: self.running):
            hung = [workers[local_rank] for local_rank in silent]
            for worker in hung:
                self._hangs[worker.start.local_rank] = hang.hang_of(worker.child, heartbeats.timeout)
            await asyncio.gather(*(hang.end(each.child, self._hangs[each.start.local_rank]) for each in hung))
            exits = await asyncio.gather(*(self._exit_of(worker) for worker in hung))
            for exit_ in sorted(exits, key=lambda exit_: exit_.kind is not FailureKind.PROGRAM):
                self._report(asyncio.create_task(self._exit_of(workers[exit_.local_rank])), workers[exit_.local_rank])
