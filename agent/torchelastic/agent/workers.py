"""Starting workers, watching them and ending them with all that they have started.

:class:`Workers` is what the agent works with. Below it: the fork server (:mod:`~torchelastic.agent.fork_server`), the
reaping of processes (:mod:`~torchelastic.agent.processes`), where output goes (:mod:`~torchelastic.agent.worker_logs`),
and saying why a worker ended (:mod:`~torchelastic.agent.failure`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.agent import hang, store_server
from torchelastic.agent.console import Console
from torchelastic.agent.guarding import Guard
from torchelastic.agent.heartbeats import Heartbeats
from torchelastic.agent.launcher import Launcher
from torchelastic.agent.processes import Reaper
from torchelastic.agent.store_server import StoreServer
from torchelastic.agent.worker_group import GroupEnded, WorkerExit, WorkerGroup, WorkerStart
from torchelastic.agent.worker_logs import make_folder, open_output
from torchelastic.errors import SettingsError, StartError
from torchelastic.machine import interface_variables
from torchelastic.output import DEFAULT_ROLE, worker_prefix
from torchelastic.worker import HEARTBEAT_FILE

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from torchelastic.agent.fork_server import ForkServer
    from torchelastic.metrics.of_workers import WorkerMemory, WorkerMetrics
    from torchelastic.settings import AgentSettings, LogSettings, Program

__all__ = [
    "GroupEnded",
    "StoreServer",
    "WorkerExit",
    "WorkerGroup",
    "WorkerStart",
    "Workers",
    "workers_of",
]

_CONSOLE_PATIENCE: Final = 5.0
"""Seconds for which output that nobody reads is held when all else has ended."""

_CONSOLE_LIMIT: Final = 20.0
"""Seconds for which it is where somebody reads it slowly; a pod's time to end has room for that beside all else."""


class Workers:
    """What starts the workers of all epochs; an async context manager, which ends all of them with their trees.

    The processes that it needs are started when it is entered, and torch is imported in one of them meanwhile. Entering
    it raises SettingsError where there is no place for what has to be written.

    Args:
        program: what each worker runs.
        logs: where their output goes.
        role: their role, named in the lines of their output that the agent passes on unless it is the default one.
        local_world_size: how many workers there will be on this node: with several, each computes on one thread unless
            OMP_NUM_THREADS says otherwise, as under torchrun.
        environment: what all workers have in theirs beside this process's own.
        heartbeat_timeout: seconds without a heartbeat after which a worker counts as hung, and is ended; None where no
            heartbeats are expected.
        measured: whether somebody is shown what workers measure.
        alone: this process is the agent and nothing else, so whatever becomes its child and is not known is an orphan.
            False in a program of somebody else's, whose own children are left alone.

    Attributes:
        scratch: a folder for what nobody wants to keep; removed in the end.
        metrics: what workers measure; None where nobody is shown that.
    """

    def __init__(
        self,
        program: Program,
        logs: LogSettings,
        *,
        role: str = DEFAULT_ROLE,
        local_world_size: int = 1,
        environment: Mapping[str, str] = types.MappingProxyType({}),
        heartbeat_timeout: float | None = None,
        measured: bool = False,
        alone: bool = False,
    ) -> None:
        self._program = program
        self._logs = logs
        self._role = role
        self._local_world_size = local_world_size
        self._environment = environment if heartbeat_timeout is None else {**environment, **hang.VARIABLES}
        self._heartbeat_timeout = heartbeat_timeout
        self._measured = measured
        self._mark = secrets.token_hex(8)
        self._reaper = Reaper(alone=alone)
        self._stack = contextlib.AsyncExitStack()
        self._stores: list[StoreServer] = []
        self._group: WorkerGroup | None = None
        self.scratch: Path
        self.metrics: WorkerMetrics | None = None
        self._heartbeats: Path
        self._memory: Path
        self._console: Console
        self._guard: Guard
        self._launcher: Launcher
        self._fork_server: ForkServer

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            make_folder(self._logs)
            self.scratch = _scratch()
            stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            folders = [self.scratch]
            if self._heartbeat_timeout is not None or self._measured:
                shared = _in_memory() or self.scratch / "shared"
                stack.callback(shutil.rmtree, shared, ignore_errors=True)
                folders.append(shared)
                self._heartbeats = shared / "heartbeats"
                self._memory = shared / "metrics"
            stack.enter_context(self._reaper)
            self._console = Console(carries_log=self._reaper.alone)
            stack.push_async_callback(self._console.close, patience=_CONSOLE_PATIENCE, limit=_CONSOLE_LIMIT)
            self._guard = Guard(self._reaper, self._mark, folders)
            self._guard.start()
            stack.push_async_callback(self._guard.close)
            self._launcher = Launcher(
                self._program,
                self._reaper,
                mark=self._mark,
                local_world_size=self._local_world_size,
                environment=self._environment,
            )
            self._fork_server = self._launcher.fork_server
            self._fork_server.start()
            stack.push_async_callback(self._end_all)
            if self._measured:
                # Now, while the fork server imports torch.
                from torchelastic.metrics.of_workers import WorkerMetrics

                self.metrics = WorkerMetrics(self._memory, self.scratch / "metrics")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _end_all(self) -> None:
        await asyncio.gather(
            self._fork_server.close(),
            *(store.close() for store in self._stores),
            *([self._group.stop(0)] if self._group is not None else []),
        )

    @property
    def fork_server_pid(self) -> int | None:
        """The fork server's process id; None while none runs, which is so from its death to the next need."""
        return self._fork_server.pid

    @property
    def running_pids(self) -> Mapping[int, int]:
        """Process ids of the workers that run, by global rank."""
        group = self._group  # a scrape asks from another thread
        return {} if group is None else group.running_pids

    async def ready(self) -> None:
        """Wait until workers can be started without delay.

        Raises:
            StartError: torch cannot be imported.
        """
        await self._fork_server.ready()

    async def serve_store(self, listener: socket.socket) -> StoreServer:
        """Serve a TCPStore, once torch is imported.

        Args:
            listener: the socket on which it is served, bound and listening; closed here, so that connections are
                refused when the server is gone.

        Raises:
            StartError: it cannot be served.
        """
        with listener:
            listener.listen()
            return await store_server.serve(
                listener, self._fork_server, self._launcher.memory_kills, self._keep_until_its_end
            )

    def _keep_until_its_end(self, store: StoreServer) -> None:
        self._stores.append(store)
        store.ended.add_done_callback(lambda _: self._stores.remove(store))

    async def start(self, epoch: int, workers: Sequence[WorkerStart]) -> WorkerGroup:
        """Start an epoch's workers. The group of the epoch before must have been stopped.

        A program that cannot be run is no error here, but a worker that ends at once.

        Args:
            epoch: its number.
            workers: the workers.

        Raises:
            StartError: the machine does not allow it.
            SettingsError: the workers' output cannot be written where it should be.
        """
        if self._group is not None and not self._group.stopped:
            raise RuntimeError("the workers of the epoch before have not been stopped")
        heartbeats, workers = self._with_heartbeats(epoch, workers)
        memories, workers = self._with_memory(epoch, workers)
        with contextlib.ExitStack() as stack:
            outputs = []
            for start in workers:
                output = open_output(
                    self._logs,
                    self._console,
                    self.scratch,
                    epoch=epoch,
                    rank=start.rank,
                    local_rank=start.local_rank,
                    prefix=worker_prefix(start.rank, self._role),
                )
                stack.callback(output.close)
                outputs.append(output)
            try:
                started = await self._launcher.start(epoch, workers, outputs)
            except OSError as error:
                raise StartError(f"no worker can be started: {error.strerror}") from None
            finally:
                for output in outputs:
                    output.handed_over()
            stack.pop_all()
        self._group = WorkerGroup(
            started,
            reaper=self._reaper,
            guard=self._guard,
            memory_kills=self._launcher.memory_kills,
            mark=self._mark,
            heartbeats=heartbeats,
        )
        for worker, of_worker in zip(started, memories, strict=False):
            worker.child.ended.add_done_callback(lambda _, memory=of_worker: memory.ended())  # type: ignore[misc]
        return self._group

    def _with_heartbeats(
        self, epoch: int, workers: Sequence[WorkerStart]
    ) -> tuple[Heartbeats | None, Sequence[WorkerStart]]:
        """Give each worker a file for its heartbeats, where any are expected."""
        if self._heartbeat_timeout is None:
            return None, workers
        heartbeats = Heartbeats(self._heartbeats / str(epoch), self._heartbeat_timeout)
        try:
            return heartbeats, [
                dataclasses.replace(start, env={**start.env, HEARTBEAT_FILE: str(heartbeats.file(start.local_rank))})
                for start in workers
            ]
        except OSError as error:
            raise SettingsError(
                f"no file for heartbeats can be made below {self._heartbeats}: {error.strerror}. Make room there."
            ) from None

    def _with_memory(
        self, epoch: int, workers: Sequence[WorkerStart]
    ) -> tuple[Sequence[WorkerMemory], Sequence[WorkerStart]]:
        """Give each worker memory for what it measures, where somebody is shown that."""
        if self.metrics is None:
            return (), workers
        variables, memories = self.metrics.begin(epoch, {start.local_rank: start.rank for start in workers})
        return memories, [
            dataclasses.replace(start, env={**start.env, **variables[start.local_rank]}) for start in workers
        ]


def workers_of(settings: AgentSettings, *, alone: bool = True) -> Workers:
    """What starts an agent's workers, not entered yet.

    Args:
        settings: what the agent is asked to do.
        alone: see :class:`Workers`.
    """
    return Workers(
        settings.program,
        settings.logs,
        role=settings.role,
        local_world_size=settings.workers,
        environment=interface_variables(settings.interface, os.environ),
        heartbeat_timeout=settings.heartbeat_timeout,
        measured=settings.metrics_port is not None,
        alone=alone,
    )


def _scratch() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="torchelastic-"))
    except OSError as error:
        raise SettingsError(
            f"there is no folder for temporary files: {error.strerror}. Mount one that can be written at /tmp, or name "
            "one in TMPDIR."
        ) from None


def _in_memory() -> Path | None:
    """A folder where a write waits for no disk, however busy that is; None where there is none."""
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="torchelastic-", dir="/dev/shm"))
    return None
