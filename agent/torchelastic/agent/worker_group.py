"""The workers of one epoch on this node: their ends, in order, and their common end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.agent import failure, hang
from torchelastic.agent.process_table import Table, carries, read_mark, with_descendants
from torchelastic.contract import FailureKind
from torchelastic.errors import TorchElasticError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchelastic.agent.guarding import Guard
    from torchelastic.agent.heartbeats import Heartbeats
    from torchelastic.agent.memory_kills import MemoryKills
    from torchelastic.agent.processes import Child, Reaper
    from torchelastic.agent.worker_logs import WorkerOutput

_DRAIN: Final = 0.5
"""Seconds for which the rest of an ended worker's output is waited for."""


class GroupEnded(TorchElasticError):  # noqa: N818 - a state
    """No exit is left to be told, and none will come."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One worker to start.

    Attributes:
        local_rank: its rank on this node.
        rank: its global rank.
        env: what the epoch and the agent give it, laid over the agent's own environment.
    """

    local_rank: int
    rank: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of one worker, by itself or by somebody else than the agent.

    Attributes:
        local_rank: its rank on this node.
        rank: its global rank.
        pid: its process id.
        exit_code: what it returned, or the negative number of the signal that ended it.
        uptime: seconds from its start to its end.
        ended: when that was, by the loop's clock.
        kind: how much of an explanation it is; without a meaning where the exit code is 0.
        message: in words; empty where the exit code is 0.
        final: whether the program said that trying again is no use.
    """

    local_rank: int
    rank: int
    pid: int
    exit_code: int
    uptime: float
    ended: float
    kind: FailureKind
    message: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker that was started.

    Attributes:
        start: what it was started with.
        child: its process.
        mark: the mark in its environment.
        output: where its output goes.
        started: when it began, by the loop's clock.
        memory_kills: how many processes had been killed for memory before.
    """

    start: WorkerStart
    child: Child
    mark: str
    output: WorkerOutput
    started: float
    memory_kills: int


class WorkerGroup:
    """The workers of one epoch on this node. One task at a time may wait for the next exit.

    Args:
        workers: the workers, started.
        reaper: knows their processes.
        guard: is told when they are gone.
        memory_kills: counts processes that were killed for memory.
        mark: the mark in the environment of all that belongs to this agent's workers.
        heartbeats: of the workers; one that is silent for too long is ended. None where none are expected.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        reaper: Reaper,
        guard: Guard,
        memory_kills: MemoryKills,
        mark: str,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self._workers = tuple(workers)
        self._reaper = reaper
        self._guard = guard
        self._memory_kills = memory_kills
        self._mark = mark
        self._exits: deque[asyncio.Future[WorkerExit]] = deque()
        self._clearing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._unseen = {worker.child.pid for worker in self._workers}
        self._stopping = False
        self._stopped = False
        for worker in self._workers:
            guard.add(worker.child.pid)
            worker.child.ended.add_done_callback(lambda _, worker=worker: self._ended(worker))  # type: ignore[misc]
        self._hangs: dict[int, hang.Hang] = {}
        self._watching = None if heartbeats is None else asyncio.create_task(self._watch(heartbeats))

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids by local rank, of those that have ended too."""
        return {worker.start.local_rank: worker.child.pid for worker in self._workers}

    @property
    def running_pids(self) -> Mapping[int, int]:
        """Process ids by global rank, of those that run."""
        return {worker.start.rank: worker.child.pid for worker in self._workers if worker.child.running}

    @property
    def running(self) -> frozenset[int]:
        """Local ranks of the workers that run."""
        return frozenset(worker.start.local_rank for worker in self._workers if worker.child.running)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` has ended: nothing of the group is left."""
        return self._stopped

    async def next_exit(self) -> WorkerExit:
        """The next worker that ended by itself, in the order of their ends; it may be cancelled without losing one.

        Raises:
            GroupEnded: all that ended by themselves have been told, and none is left or the group is being stopped.
        """
        while not self._exits:
            if self._stopping or not self._unseen:
                raise GroupEnded("every worker's end has been told")
            self._changed.clear()
            await self._changed.wait()
        ended = await asyncio.shield(self._exits[0])
        self._exits.popleft()
        return ended

    async def stop(self, grace: float) -> None:
        """End all workers with all that they have started; returns when nothing of it is left.

        Args:
            grace: seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once. A later call may cut an earlier one's
                short.
        """
        self._stopping = True
        self._changed.set()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        children = [worker.child for worker in self._workers if worker.child.running]
        if grace > 0 and children:
            for child in children:
                child.signal(signal.SIGTERM)
            await asyncio.wait([child.ended for child in children], timeout=grace)
        for task in self._clearing:  # all is cleared away here
            task.cancel()
        if self._reaper.alone:  # elsewhere, what has left session and mark behind is found by its parent alone
            for child in children:
                child.signal(signal.SIGKILL)
        await asyncio.gather(self._reaper.kill_all(self._group), *(asyncio.shield(child.ended) for child in children))
        if self._exits:
            await asyncio.wait(self._exits)
        if self._clearing:
            await asyncio.wait(self._clearing)
        await asyncio.gather(*(self._close(worker) for worker in self._workers))
        self._stopped = True

    def _ended(self, worker: Worker) -> None:
        if not self._stopping:
            if worker.start.local_rank not in self._hangs:
                self._tell(asyncio.create_task(self._conclude(worker)), worker.child.pid)
            clearing = asyncio.create_task(self._clear(worker))
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)
        self._changed.set()

    def _tell(self, told: asyncio.Future[WorkerExit], pid: int) -> None:
        self._exits.append(told)
        self._unseen.discard(pid)
        self._changed.set()

    async def _conclude(self, worker: Worker) -> WorkerExit:
        """Say why a worker ended."""
        exit_code = worker.child.ended.result()
        explanation = failure.Explanation(FailureKind.PROGRAM, "")
        hung = self._hangs.get(worker.start.local_rank)
        if exit_code != 0:
            if exit_code != -signal.SIGKILL:
                await worker.output.drained(_DRAIN)
            explanation = (
                hang.explain(hung, worker.output.tail())
                if hung is not None and exit_code in hang.ENDS
                else failure.explain(
                    exit_code,
                    error_file=worker.output.error_file,
                    tail=worker.output.tail(),
                    memory=self._memory_kills.explains(exit_code, since=worker.memory_kills),
                )
            )
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

    async def _watch(self, heartbeats: Heartbeats) -> None:
        """End workers that hang, until none runs.

        What one waits for, all may be silent of: so those who fell silent with it are ended, too, and whoever says most
        is told first.
        """
        workers = {worker.start.local_rank: worker for worker in self._workers}
        while silent := await heartbeats.silent(lambda: self.running):
            hung = [workers[local_rank] for local_rank in silent]
            for worker in hung:
                self._hangs[worker.start.local_rank] = hang.hang_of(worker.child, heartbeats.timeout)
            await asyncio.gather(*(hang.end(each.child, self._hangs[each.start.local_rank]) for each in hung))
            exits = await asyncio.gather(*(self._conclude(worker) for worker in hung))
            for exit_ in sorted(exits, key=lambda exit_: exit_.kind is not FailureKind.PROGRAM):
                told: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
                told.set_result(exit_)
                self._tell(told, exit_.pid)

    async def _clear(self, worker: Worker) -> None:
        """End what a worker has left behind while the others go on."""
        await self._reaper.kill_all(lambda table: self._tree(table, worker))
        await self._close(worker)

    async def _close(self, worker: Worker) -> None:
        await worker.output.drained(_DRAIN)
        worker.output.close()
        self._guard.remove(worker.child.pid)

    def _tree(self, table: Table, worker: Worker) -> Iterable[int]:
        """What is left of one worker: not what has left its session and was not executed with its environment."""
        roots = [entry.pid for entry in table.values() if entry.session == worker.child.pid]
        roots += [pid for pid in self._orphans(table) if carries(read_mark(pid), worker.mark)]
        return with_descendants(table, roots)

    def _group(self, table: Table) -> Iterable[int]:
        """All that the group's workers have started."""
        pids = set(self.pids.values())
        roots = [entry.pid for entry in table.values() if entry.session in pids]
        roots += [worker.child.pid for worker in self._workers if worker.child.running]
        roots += [pid for pid in self._orphans(table) if self._reaper.alone or carries(read_mark(pid), self._mark)]
        return with_descendants(table, roots)

    def _orphans(self, table: Table) -> Iterable[int]:
        us = os.getpid()
        return [entry.pid for entry in table.values() if entry.parent == us and not self._reaper.knows(entry.pid)]
