"""The worker pool: starts the workers and the TCPStore of each round.

Workers are forked from the fork server. A worker then executes a command or a new interpreter if the program is not
Python, if ``--start-method exec`` is given, or if a new interpreter would see another environment than the fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.agent.failures import ERROR_FILE, OUT_OF_MEMORY, Explanation, MemoryKills, WorkerExit, end_of, explain
from torchelastic.agent.logs import Console, make_folder, open_output
from torchelastic.agent.workers import hang
from torchelastic.agent.workers.fork_server import READY, ForkServer
from torchelastic.agent.workers.linux import TREE_MARK
from torchelastic.agent.workers.processes import Reaper
from torchelastic.agent.workers.watchdog import Watchdog
from torchelastic.agent_socket import CHANNEL, HEARTBEAT_FILE, METRICS_FILE
from torchelastic.config.program import changed_imports, python_command, reason_to_execute
from torchelastic.config.settings import ProgramKind, StartMethod
from torchelastic.errors import SettingsError, StartError
from torchelastic.machine import interface_variables
from torchelastic.output import DEFAULT_ROLE, worker_prefix
from torchelastic.protocol import FailureKind

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from torchelastic.agent.logs import WorkerOutput
    from torchelastic.agent.workers.processes import Child
    from torchelastic.config.settings import AgentSettings, LogSettings, Program
    from torchelastic.metrics.worker_collector import WorkerMemory, WorkerMetrics

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT: Final = 0.5
"""Seconds to wait for the rest of an ended worker's output."""

_CONSOLE_PATIENCE: Final = 5.0
"""Seconds after which output is dropped at the end if its reader takes nothing."""

_CONSOLE_LIMIT: Final = 20.0
"""Seconds after which it is dropped if its reader is slow."""

_STORE_ATTEMPTS: Final = 2
"""A spare process may have been killed long before it is used for the store."""


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
        self._reports: list[asyncio.Task[WorkerExit]] = []
        self._exits: asyncio.Queue[asyncio.Task[WorkerExit] | None] = asyncio.Queue()
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

    async def next_exit(self) -> WorkerExit | None:
        """Return the next exit, in the order of the ends; None once, if there are no more or the group is stopped."""
        exit_ = await self._exits.get()
        return None if exit_ is None else await asyncio.shield(exit_)

    async def stop(self, grace: float) -> None:
        """End all workers and all processes that they have started, and wait for that.

        Args:
            grace: seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once. A second call may shorten it.
        """
        self._stopping = True
        self._exits.put_nowait(None)
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait([self._monitor])
        children = [worker.child for worker in self._workers if worker.child.running]
        if grace > 0 and children:
            for child in children:
                child.signal(signal.SIGTERM)
            await asyncio.wait([child.ended for child in children], timeout=grace)
        await self._reaper.kill_trees([worker.child for worker in self._workers], self._mark)
        await asyncio.gather(*self._reports, return_exceptions=True)
        for worker in self._workers:
            await worker.output.drained(_DRAIN_TIMEOUT)
            worker.output.close()
        self.stopped = True

    def _ended(self, worker: Worker) -> None:
        if not self._stopping and worker.start.local_rank not in self._hangs:
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        self._reports.append(asyncio.create_task(self._exit_of(worker)))
        self._exits.put_nowait(self._reports[-1])
        if len(self._reports) == len(self._workers):
            self._exits.put_nowait(None)

    async def _exit_of(self, worker: Worker) -> WorkerExit:
        exit_code = worker.child.ended.result()
        if exit_code not in {0, -signal.SIGKILL}:
            await worker.output.drained(_DRAIN_TIMEOUT)
        tail = worker.output.tail()
        hung = self._hangs.get(worker.start.local_rank)
        if exit_code == 0:
            explanation = Explanation(FailureKind.PROGRAM, "")
        elif hung is not None and exit_code in hang.HANG_EXIT_CODES:
            explanation = hang.explain(hung, tail)
        else:
            memory = self._memory_kills.explains(exit_code, since=worker.memory_kills)
            explanation = explain(exit_code, error_file=worker.output.error_file, tail=tail, memory=memory)
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
                self._report(workers[exit_.local_rank])


class StoreServer:
    """A process that serves a round's TCPStore; `ended` gets its exit code."""

    def __init__(self, child: Child, memory_kills: MemoryKills) -> None:
        self.pid = child.pid
        self.ended: asyncio.Future[int] = child.ended
        self._child = child
        self._memory_kills = memory_kills
        self._killed_before = memory_kills.count()

    @property
    def out_of_memory(self) -> bool:
        """Whether it was killed for memory."""
        return self.ended.done() and self._memory_kills.explains(self.ended.result(), since=self._killed_before)

    def kill(self) -> None:
        """End it without waiting: the next round's store has its own socket."""
        self._child.signal(signal.SIGKILL)

    async def close(self) -> None:
        """End it and wait for its end."""
        self.kill()
        await asyncio.shield(self.ended)


class Workers:
    """Starts the workers of all rounds; an async context manager that ends all of them with their process trees.

    The fork server and the watchdog start when it is entered. Entering raises SettingsError if files cannot be made.

    Args:
        program: what each worker runs.
        logs: where their output goes.
        role: their role, named in the prefix of their output.
        local_world_size: how many workers this node has; several compute on one thread each, as under torchrun.
        environment: variables in addition to this process's own environment.
        heartbeat_timeout: seconds without a heartbeat after which a worker is ended; None to expect no heartbeats.
        measured: whether the workers' metrics are shown, as `metrics`.
        owns_process: see :class:`~torchelastic.agent.workers.processes.Reaper`.
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
        owns_process: bool = False,
    ) -> None:
        self._program = program
        self._logs = logs
        self._role = role
        self._local_world_size = local_world_size
        self._environment = environment if heartbeat_timeout is None else {**environment, **hang.VARIABLES}
        self._heartbeat_timeout = heartbeat_timeout
        self._measured = measured
        self._mark = secrets.token_hex(8)
        self._memory_kills = MemoryKills()
        self._reaper = Reaper(owns_process=owns_process)
        self._stack = contextlib.AsyncExitStack()
        self._stores: list[StoreServer] = []
        self._group: WorkerGroup | None = None
        self._reported_changes: set[str] = set()
        self.scratch: Path
        self.metrics: WorkerMetrics | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            make_folder(self._logs)
            self.scratch = self._shared = _temporary_folder()
            if self._heartbeat_timeout is not None:
                with contextlib.suppress(OSError):  # a folder in memory, where no write waits for a disk
                    self._shared = Path(tempfile.mkdtemp(prefix="torchelastic-", dir="/dev/shm"))
            folders = [self.scratch, self._shared]
            for folder in folders:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(self._reaper)
            self._console = Console(carries_log=self._reaper.owns_process)
            stack.push_async_callback(self._console.close, patience=_CONSOLE_PATIENCE, limit=_CONSOLE_LIMIT)
            self._watchdog = Watchdog(self._reaper, self._mark, folders)
            self._watchdog.start()
            stack.push_async_callback(self._watchdog.close)
            self._fork_server = self._make_fork_server()
            self._fork_server.start()
            stack.push_async_callback(self._end_all)
            if self._measured:  # imported while the fork server imports torch
                from torchelastic.metrics.worker_collector import WorkerMetrics

                self.metrics = WorkerMetrics()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _make_fork_server(self) -> ForkServer:
        program = self._program
        self._executed = program.kind is ProgramKind.COMMAND or program.start_method is StartMethod.EXEC
        if not self._executed and (reason := reason_to_execute(program)):
            self._executed = True
            logger.warning("%s: each worker starts a new interpreter, which takes longer than a fork.", reason)
        if self._executed and program.preload:
            logger.warning("--preload has no effect: each worker starts a new interpreter, which imports everything.")
            program = dataclasses.replace(program, preload=())
        self._imported_with = self._base_environment()
        return ForkServer(
            self._reaper,
            {**self._imported_with, TREE_MARK: self._mark},
            program,
            memory_kills=self._memory_kills,
            spares=1 + self._local_world_size,  # one for the store
        )

    async def _end_all(self) -> None:
        await asyncio.gather(
            self._fork_server.close(),
            *(store.close() for store in self._stores),
            *([self._group.stop(0)] if self._group is not None else []),
        )

    @property
    def fork_server_pid(self) -> int | None:
        """The fork server's process id while it runs."""
        return self._fork_server.pid

    @property
    def running_pids(self) -> Mapping[int, int]:
        """Process ids of running workers by global rank; may be read in any thread."""
        group = self._group
        return {} if group is None else group.running_pids

    async def ready(self) -> None:
        """Wait until workers can be started without delay.

        Raises:
            StartError: torch cannot be imported.
        """
        await self._fork_server.ready()

    # -- the store

    async def serve_store(self, listener: socket.socket) -> StoreServer:
        """Serve a TCPStore on a bound socket, which is closed here: connections are refused when the server is gone.

        Raises:
            StartError: it cannot be served.
        """
        end = ""
        with listener:
            listener.listen()
            for _ in range(_STORE_ATTEMPTS):
                try:
                    server, serves = await self._try_to_serve(listener)
                except OSError as error:
                    raise StartError(f"the round's TCPStore cannot be served: {error.strerror}") from None
                if serves:
                    return server
                exit_code = await asyncio.shield(server.ended)
                if exit_code >= 0:
                    port = listener.getsockname()[1]
                    raise StartError(f"the store on port {port} cannot be served; its output says why")
                end = OUT_OF_MEMORY if server.out_of_memory else end_of(exit_code)
                logger.warning("The process that was to serve the round's TCPStore was %s.", end)
        raise StartError(f"the process that was to serve the round's TCPStore was {end}")

    async def _try_to_serve(self, listener: socket.socket) -> tuple[StoreServer, bool]:
        """A process with that role, and whether it serves; if not, it is about to end."""
        host, port = listener.getsockname()[:2]
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        [process] = await self._fork_server.fork(1)
        with process.link:
            server = StoreServer(process.child, self._memory_kills)
            self._stores.append(server)
            server.ended.add_done_callback(lambda _: self._stores.remove(server))
            try:
                process.begin("store", {"host": local, "port": port}, (2, 2), [listener.fileno()])
                process.link.setblocking(False)
                answer = await asyncio.get_running_loop().sock_recv(process.link, len(READY))
            except ConnectionError:
                return server, False
            except BaseException:
                server.kill()
                raise
        return server, answer == READY

    # -- the workers

    async def start(self, round: int, workers: Sequence[WorkerStart]) -> WorkerGroup:
        """Start a round's workers; the group of the round before must be stopped.

        A program that cannot be run is a worker that ends at once.

        Raises:
            StartError: the machine does not allow it.
            SettingsError: the workers' output or files cannot be written.
        """
        heartbeats = None
        if self._heartbeat_timeout is not None:
            heartbeats = hang.Heartbeats(self._shared / "heartbeats" / str(round), self._heartbeat_timeout)
        memories: Mapping[int, WorkerMemory] = {}
        if self.metrics is not None:
            memories = self.metrics.begin({start.local_rank: start.rank for start in workers})
        killed_before = self._memory_kills.count()
        base = self._base_environment()
        outputs, environments = [], []
        with contextlib.ExitStack() as stack:
            for start in workers:
                output = stack.enter_context(contextlib.closing(self._open_output(round, start)))
                environment = {**base, **start.env}
                if start.local_rank in memories:
                    environment[METRICS_FILE] = memories[start.local_rank].path
                if heartbeats is not None:
                    environment[HEARTBEAT_FILE] = str(heartbeats.file(start.local_rank))
                environment[ERROR_FILE] = str(output.error_file)
                environment[TREE_MARK] = self._mark
                outputs.append(output)
                environments.append(environment)
            try:
                children = await self._fork(environments, outputs)
            except OSError as error:
                raise StartError(f"no worker can be started: {error.strerror}") from None
            finally:
                for output in outputs:
                    output.handed_over()
            stack.pop_all()
        now = asyncio.get_running_loop().time()
        self._watchdog.watch(children)
        self._group = WorkerGroup(
            [
                Worker(start, child, output, now, killed_before)
                for start, child, output in zip(workers, children, outputs, strict=True)
            ],
            reaper=self._reaper,
            memory_kills=self._memory_kills,
            mark=self._mark,
            heartbeats=heartbeats,
        )
        for start, child in zip(workers, children, strict=True):
            if start.local_rank in memories:
                child.ended.add_done_callback(lambda _, memory=memories[start.local_rank]: memory.ended())  # type: ignore[misc]
        return self._group

    def _open_output(self, round: int, start: WorkerStart) -> WorkerOutput:
        return open_output(
            self._logs,
            self._console,
            self.scratch,
            round=round,
            rank=start.rank,
            local_rank=start.local_rank,
            prefix=worker_prefix(start.rank, self._role),
        )

    def _base_environment(self) -> dict[str, str]:
        """Return the environment that all workers have."""
        base = {**os.environ, **self._environment}
        for name in (CHANNEL, METRICS_FILE):  # of a worker that this agent runs in
            base.pop(name, None)
        if self._local_world_size > 1:
            base.setdefault("OMP_NUM_THREADS", "1")
        return base

    async def _fork(self, environments: Sequence[Mapping[str, str]], outputs: Sequence[WorkerOutput]) -> list[Child]:
        """Start a process for each environment and output."""
        processes = await self._fork_server.fork(len(environments))
        try:
            for process, environment, output in zip(processes, environments, outputs, strict=True):
                process.begin(*self._role_of(environment), output.descriptors)
        except OSError:
            for process in processes:
                process.child.signal(signal.SIGKILL)
            raise
        finally:
            for process in processes:
                process.link.close()
        return [process.child for process in processes]

    def _role_of(self, environment: Mapping[str, str]) -> tuple[str, dict[str, object]]:
        """Return the role of a worker with this environment, and its content."""
        kind, argv = self._program.kind, self._program.argv
        if kind is ProgramKind.COMMAND:
            return "command", {"argv": argv, "environment": environment}
        if self._executed or self._differs(environment):
            command, environment = python_command(kind.value, argv, environment)
            return "command", {"argv": command, "environment": environment}
        report = self._fork_server.report_address
        return "worker", {"kind": kind.value, "argv": argv, "environment": environment, "report": report}

    def _differs(self, environment: Mapping[str, str]) -> bool:
        """Return whether a new interpreter with this environment differs from a fork."""
        changed = changed_imports(self._imported_with, environment)
        if new := [name for name in changed if name not in self._reported_changes]:
            self._reported_changes.update(new)
            logger.warning("Workers start a new interpreter: it reads %s when it starts.", ", ".join(new))
        return bool(changed)


def workers_of(settings: AgentSettings, *, owns_process: bool = True) -> Workers:
    """Return the workers of an agent, not entered yet."""
    return Workers(
        settings.program,
        settings.logs,
        role=settings.role,
        local_world_size=settings.workers,
        environment=interface_variables(settings.interface, os.environ),
        heartbeat_timeout=settings.heartbeat_timeout,
        measured=settings.metrics_port is not None,
        owns_process=owns_process,
    )


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="torchelastic-"))
    except OSError as error:
        raise SettingsError(
            f"there is no folder for temporary files: {error.strerror}. Mount a writable one at /tmp, or name one in "
            "TMPDIR."
        ) from None
