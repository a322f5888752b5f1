"""The worker pool: starts the workers and the TCPStore of each round.

Workers are forked from the fork server. A worker then executes a command or a new interpreter if the program is not
Python, if ``--start-method exec`` is set, or if the program needs a new interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import posix
import secrets
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.agent.failures import FailureCause, WorkerExit, explain
from torchelastic.agent.worker_output import Console, Logs, temporary_folder
from torchelastic.agent.workers import heartbeat_monitor, program_source
from torchelastic.agent.workers.fork_server import ForkServer, python_command
from torchelastic.agent.workers.process_tree import TREE_MARK, handles
from torchelastic.agent.workers.processes import Reaper, Watchdog, spawn
from torchelastic.config.machine import own_device
from torchelastic.config.settings import ProgramKind, StartMethod
from torchelastic.errors import StartError
from torchelastic.protocol.records import FailureKind
from torchelastic.protocol.worker import ERROR_FILE, HEARTBEAT_FILE, MEMORY, METRICS_FILE, WORKER_SOCKET

if TYPE_CHECKING:
    import ast
    import socket
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import ModuleType

    from torchelastic.agent.worker_output import OutputConsumer, WorkerOutput
    from torchelastic.agent.worker_socket import WorkerSocket
    from torchelastic.agent.workers.fork_server import ForkedProcess
    from torchelastic.agent.workers.processes import Child
    from torchelastic.config.settings import AgentSettings, Program
    from torchelastic.metrics.worker_collector import WorkerCollector, WorkerMetricMemory

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT: Final = 0.5
"""Seconds to wait for the rest of an exited worker's output."""

_LEAVE_TIMEOUT: Final = 0.5
"""Seconds for a worker whose world is broken to leave it, after another worker of the node has."""

_LEAVE_INTERVAL: Final = 0.01

_STORE_LINGER: Final = 1.0
"""Seconds for which a round's TCPStore outlives the workers of its node: workers of other nodes may still use it, and
the exit of its process takes CPU time that the next round's workers need to start."""

_STORE_LINGER_OF_STAYING: Final = 10.0
"""The same if workers stay: they agree in it on the step after which they leave their world."""

_DELAY: Final = 0.1
"""Seconds after which workers begin if others stay: those form their next world first, on the same CPUs."""

_CONSOLE_IDLE_TIMEOUT: Final = 5.0
"""Seconds after which an agent that exits drops the remaining output if nothing reads it."""

_CONSOLE_TIMEOUT: Final = 20.0
"""Seconds after which an agent that exits drops the remaining output if its reader is slow."""

_STARTED_WITH_INTERPRETER: Final = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Variables of coverage, which starts only in a new interpreter."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker of a round.

    Attributes:
        heartbeat_file: the file of its heartbeats; None if no heartbeats are expected.
        hang_symptom: why the worker counts as hung; empty if the worker does not hang.
    """

    local_rank: int
    rank: int
    child: Child
    output: WorkerOutput
    heartbeat_file: Path | None = None
    hang_symptom: str = ""

    async def exit(self) -> WorkerExit:
        """Return how the worker exited."""
        exit_code = self.child.ended.result()
        if exit_code not in {0, -signal.SIGKILL}:
            await self.output.drain(_DRAIN_TIMEOUT)
        return WorkerExit(
            local_rank=self.local_rank,
            rank=self.rank,
            pid=self.child.pid,
            exit_code=exit_code,
            uptime=self.child.end_time - self.child.began,
            ended=self.child.end_time,
            cause=self._cause(exit_code),
        )

    def _cause(self, exit_code: int) -> FailureCause:
        if exit_code == 0:
            return FailureCause(FailureKind.PROGRAM, "")
        if self.hang_symptom and exit_code in heartbeat_monitor.HANG_EXIT_CODES:
            return heartbeat_monitor.explain(self.hang_symptom, self.output.tail())
        output, out_of_memory = self.output, self.child.out_of_memory
        return explain(exit_code, error_file=output.error_file, tail=output.tail(), out_of_memory=out_of_memory)


@dataclass(eq=False)
class WorkerGroup:
    """The workers of one round on this node, and the process of the round's TCPStore if this node serves it.

    Attributes:
        workers: the workers by local rank.
        tcp_store_process: the process that serves the TCPStore; None if another node serves it.
        report: called with the exit of each worker that exited by itself or hung, in the order of the exits.
        reaper: kills the workers' processes.
        mark: the tree mark of all workers of this agent.
        heartbeats: the heartbeats of the workers; None if no heartbeats are expected.
        worker_socket: the connections of the workers that stay when the round changes.
        none_hangs: called with the time-out if workers had no heartbeat for that time, but have left their world.
        stopped: whether the workers and all processes that they started have exited, except those that stay.
        staying: the workers that have not been stopped.
    """

    workers: Sequence[Worker]
    tcp_store_process: Child | None
    report: Callable[[WorkerExit], object]
    reaper: Reaper
    mark: str
    heartbeats: heartbeat_monitor.HeartbeatMonitor | None
    worker_socket: WorkerSocket | None = None
    none_hangs: Callable[[float], object] = lambda _: None
    stopped: bool = False

    def __post_init__(self) -> None:
        self._reporting: list[asyncio.Task[None]] = []
        self._stopping = False
        self.staying: list[Worker] = [*self.workers]
        for worker in self.workers:
            worker.child.ended.add_done_callback(lambda _, worker=worker: self._ended(worker))  # type: ignore[misc]
        heartbeats = self.heartbeats
        self._monitor = None if heartbeats is None else asyncio.create_task(self._kill_hung_workers(heartbeats))

    @property
    def running(self) -> list[Worker]:
        """The workers that have not exited."""
        return [worker for worker in self.workers if worker.child.running]

    async def stop(
        self,
        grace: float,
        number: signal.Signals | None = None,
        *,
        only_sessions: bool = False,
        staying: Collection[int] = (),
    ) -> None:
        """Stop the workers and all processes that they started, and wait for their exit; the TCPStore exits later.

        Args:
            grace: seconds between the signal and SIGKILL; 0 for SIGKILL at once. A second call may shorten it.
            number: the signal; None for SIGTERM and SIGKILL at once to workers that do not handle SIGTERM.
            only_sessions: whether processes that have started sessions of their own continue.
            staying: the local ranks of workers that are not stopped if they run. A later call may stop them.
        """
        self._stopping = True
        self.stopped = False
        workers = [each for each in self.staying if each.local_rank not in staying or not each.child.running]
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait([self._monitor])
        children = [worker.child for worker in workers if worker.child.running]
        if number is None:
            number = signal.SIGTERM
            children = [child for child in children if handles(child.pid, number)]
        if grace > 0 and children:
            for child in children:
                child.signal(number)
            await asyncio.wait([child.ended for child in children], timeout=grace)
            for worker in workers:
                if worker.child in children and worker.child.running:
                    logger.warning(
                        "rank %d, process %d, is killed: it runs %g s after %s.",
                        *(worker.rank, worker.child.pid, grace, number.name),
                    )
        children = [worker.child for worker in workers]
        await self.reaper.kill_trees(children, self.mark, only_sessions=only_sessions)
        await asyncio.gather(*self._reporting, return_exceptions=True)
        for worker in workers:
            await worker.output.drain(_DRAIN_TIMEOUT)
            worker.output.close()
        self.staying = [each for each in self.staying if each not in workers]
        if self.tcp_store_process is not None:
            linger = _STORE_LINGER_OF_STAYING if self.staying else _STORE_LINGER
            asyncio.get_running_loop().call_later(linger, self.tcp_store_process.signal, signal.SIGKILL)
        self.stopped = True

    def _ended(self, worker: Worker) -> None:
        if not self._stopping and not worker.hang_symptom:
            self._report_exit(worker)

    def _report_exit(self, worker: Worker) -> None:
        before = self._reporting[-1:]

        async def report() -> None:
            exit_ = await worker.exit()
            await asyncio.gather(*before, return_exceptions=True)
            self.report(exit_)

        self._reporting.append(asyncio.create_task(report()))

    async def _kill_hung_workers(self, heartbeats: heartbeat_monitor.HeartbeatMonitor) -> None:
        """Kill workers that hang, until all workers have exited.

        Workers that wait for a hung worker send no heartbeats either. Those that stay are told to leave their world.
        All others without heartbeats are killed, and the most likely root causes are reported first.
        """
        running, waiting = lambda: {each.local_rank for each in self.running}, self._waiting
        while ranks := await heartbeats.wait_for_hang(running, waiting):
            hung = [self.workers[local_rank] for local_rank in ranks]
            if self.worker_socket is not None and self.worker_socket.break_world():
                hung = await self._not_leaving(hung)
                if not hung:
                    self.none_hangs(heartbeats.timeout)
            for worker in hung:
                worker.hang_symptom = heartbeat_monitor.describe_missing_heartbeat(worker.child, heartbeats.timeout)
            await asyncio.gather(*(heartbeat_monitor.dump_stacks_and_kill(worker.child) for worker in hung))
            exits = await asyncio.gather(*(worker.exit() for worker in hung))
            for exit_ in sorted(exits, key=lambda exit_: exit_.cause.kind is not FailureKind.PROGRAM):
                self._report_exit(self.workers[exit_.local_rank])

    def _waiting(self) -> set[int]:
        """Return the local ranks of the workers that have left their world, and wait for the next one."""
        ranks = set() if self.worker_socket is None else self.worker_socket.waiting
        return {each.local_rank for each in self.workers if each.rank in ranks}

    async def _not_leaving(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers of these that do not leave their world, which is broken."""
        clock = asyncio.get_running_loop().time
        left, until = [*workers], clock() + _LEAVE_TIMEOUT
        while clock() < until and not all(heartbeat_monitor.is_stopped(worker.child) for worker in left):
            await asyncio.sleep(_LEAVE_INTERVAL)
            waiting, before = self._waiting(), len(left)
            left = [worker for worker in left if worker.local_rank not in waiting]
            if len(left) < before:
                until = clock() + _LEAVE_TIMEOUT
        return left


class Workers:
    """Starts the workers of all rounds; an async context manager, which kills their process trees at its exit.

    Entering the context starts the fork server and the watchdog; SettingsError means that a file cannot be created.

    Args:
        settings: the settings of the agent.
        owns_process: see :class:`~torchelastic.agent.workers.processes.Reaper`.
        output: takes the output that would go to the console; None for the console.

    Attributes:
        fork_server: the process from which workers are forked.
        tcp_store_listener: returns the bound socket of the TCPStore that the next round may use. A process serves it
            already before the round, so that the workers that stay do not wait for it. None for no such process.
        scratch: a private folder, which is removed at the exit.
        metrics: the workers' metrics; None without ``--metrics-port``.
    """

    def __init__(
        self, settings: AgentSettings, *, owns_process: bool = True, output: OutputConsumer | None = None
    ) -> None:
        self._settings = settings
        self._output = output
        self._mark = secrets.token_hex(8)
        self._reaper = Reaper(owns_process=owns_process)
        self._stack = contextlib.AsyncExitStack()
        self._group: WorkerGroup | None = None
        self.tcp_store_listener: Callable[[], socket.socket | None] = lambda: None
        self._ahead: tuple[socket.socket, Child] | None = None  # the last listener that was served before its round
        self.scratch: Path
        self.metrics: WorkerCollector | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self.scratch = self._shared = temporary_folder()
            with contextlib.suppress(OSError):  # a folder in memory, where no write waits for a disk
                self._shared = Path(tempfile.mkdtemp(prefix="torchelastic-", dir="/dev/shm"))
                (self.scratch / MEMORY).symlink_to(self._shared)
            folders = [self.scratch, self._shared]
            for folder in folders:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._console = self._output or Console(carries_log=self._reaper.owns_process)
            stack.push_async_callback(self._console.close, idle_timeout=_CONSOLE_IDLE_TIMEOUT, timeout=_CONSOLE_TIMEOUT)
            self._logs = Logs(
                self._settings.logs,
                self._console,
                self.scratch,
                self._settings.role,
                reads_stderr=self._settings.heartbeat_timeout is not None,  # for the stacks of hung workers
            )
            await stack.enter_async_context(self._reaper)
            self._watchdog = Watchdog(self._reaper, self._mark, folders)
            self._watchdog.start()
            self._base = self._base_environment()
            self.fork_server = self._make_fork_server()
            stack.push_async_callback(self.fork_server.close)
            self.fork_server.start()
            stack.push_async_callback(self._end_workers)
            if self._settings.metrics_port is not None:  # the fork server imports torch meanwhile
                from torchelastic.metrics.worker_collector import WorkerCollector

                self.metrics = WorkerCollector()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _base_environment(self) -> dict[str, str]:
        """Return the environment that all workers have."""
        base = {**os.environ}
        if interface := self._settings.interface:
            base.setdefault("GLOO_SOCKET_IFNAME", interface)
            base.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=", eth1 would match eth10
        for name in (WORKER_SOCKET, METRICS_FILE):  # set if this agent runs in a worker of another agent
            base.pop(name, None)
        if self._settings.heartbeat_timeout is not None:
            base.update(heartbeat_monitor.FAULTHANDLER_ENV)
        # These are torchrun's defaults.
        base.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if self._settings.workers > 1:
            base.setdefault("OMP_NUM_THREADS", "1")
        return {**base, TREE_MARK: self._mark}

    def _make_fork_server(self) -> ForkServer:
        program = self._settings.program
        self._executed = program.kind is ProgramKind.COMMAND or program.start_method is StartMethod.EXEC
        tree = program_source.parse(program)
        if not self._executed and (reason := _reason_to_execute(program, tree, self._base)):
            self._executed = True
            logger.warning("%s: each worker starts a new interpreter, which takes longer than a fork.", reason)
        if self._executed and program.preload:
            logger.warning("--preload has no effect: each worker starts a new interpreter, which imports everything.")
            program = dataclasses.replace(program, preload=())
        spares = 1 + self._settings.workers  # one for the TCPStore
        server = ForkServer(self._reaper, self._base, program, spares=spares, filled=self._serve_ahead)
        if not self._executed:
            server.expect(program_source.first_imports(program, tree))
        return server

    async def _end_workers(self) -> None:
        if self._group is not None and (self._group.staying or not self._group.stopped):
            await self._group.stop(0)

    @property
    def running_pids(self) -> Mapping[int, int]:
        """Process ids of running workers by global rank; any thread may read them."""
        group = self._group
        return {} if group is None else {worker.rank: worker.child.pid for worker in group.running}

    @property
    def error_files(self) -> Mapping[int, Path]:
        """The error files of the last started workers by global rank; a worker creates its file when it fails."""
        return {} if self._group is None else {each.rank: each.output.error_file for each in self._group.workers}

    def start_daemon(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> None:
        """Start a process that outlives the workers and this agent; the arguments are those of :func:`spawn`."""
        self._reaper.spare(spawn(command, environment, descriptors))

    async def start(
        self,
        round: int,
        environments: Sequence[Mapping[str, str]],
        report: Callable[[WorkerExit], object],
        listener: socket.socket | None = None,
        staying: Sequence[Worker] = (),
        *,
        worker_socket: WorkerSocket | None = None,
        none_hangs: Callable[[float], object] = lambda _: None,
        warm_spare: bool = False,
    ) -> WorkerGroup:
        """Start a round's workers, and its TCPStore; the group of the previous round must have been stopped.

        If the program does not exist or cannot be executed, the workers exit at once.

        Args:
            round: its number.
            environments: the variables of each worker, by local rank, in addition to this process's own environment.
            report: called with the exit of each worker that exited by itself or hung, in the order of the exits.
            listener: the bound socket of the TCPStore, which the caller closes; None if another node serves it.
            staying: workers of the previous round that continue in this one, with the same local ranks.
            worker_socket: as in :class:`WorkerGroup`.
            none_hangs: likewise.
            warm_spare: whether the workers wait for another round, so that they send no heartbeats.

        Raises:
            StartError: a process cannot be started.
            SettingsError: the workers' output or files cannot be written.
        """
        ranks = [int(environment["RANK"]) for environment in environments]
        stay = {worker.local_rank: worker for worker in staying}
        new = [local_rank for local_rank in range(len(ranks)) if local_rank not in stay]
        heartbeats = None
        if (timeout := self._settings.heartbeat_timeout) is not None:
            heartbeats = heartbeat_monitor.HeartbeatMonitor(self._shared / "heartbeats" / str(round), timeout)
        memories: Mapping[int, WorkerMetricMemory] = {}
        if self.metrics is not None:
            memories = self.metrics.begin(dict(enumerate(ranks)), staying=stay)
        with contextlib.ExitStack() as stack:
            store = None
            if listener is not None:  # the TCPStore begins first, because workers that stay wait for it already
                store = self._take_ahead(listener) or await self._start_tcp_store(listener)
                stack.callback(store.signal, signal.SIGKILL)
            outputs: list[WorkerOutput] = []
            variables: dict[int, dict[str, str]] = {}
            files: dict[int, Path] = {}
            try:
                own = [{**environment} for environment in environments]
                for local_rank, output in zip(new, self._logs.open(round, own, new), strict=True):
                    stack.callback(output.close)
                    outputs.append(output)
                    if heartbeats is not None:
                        files[local_rank] = heartbeats.create_file(local_rank)
                    variables[local_rank] = self._environment(
                        local_rank, own[local_rank], output, memories.get(local_rank), files.get(local_rank)
                    )
                children = await self._fork(variables, outputs, _DELAY if staying else 0.0)
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                raise StartError(f"no worker can be started: {where}{error.strerror}") from None
            finally:
                for output in outputs:
                    output.close_descriptors()
            stack.pop_all()
        for local_rank, child, output in zip(new, children, outputs, strict=True):
            if local_rank in memories:
                memory = memories[local_rank]
                child.ended.add_done_callback(lambda _, memory=memory: memory.set_exited())  # type: ignore[misc]
            stay[local_rank] = Worker(local_rank, ranks[local_rank], child, output, files.get(local_rank))
        running = [dataclasses.replace(stay[local_rank], rank=rank) for local_rank, rank in enumerate(ranks)]
        for worker in staying:
            if heartbeats is not None and worker.heartbeat_file is not None:
                heartbeats.watch_file(worker.local_rank, worker.heartbeat_file)
        self._watchdog.watch([worker.child for worker in running])
        monitored = None if warm_spare else heartbeats
        self._group = WorkerGroup(
            running, store, report, self._reaper, self._mark, monitored, worker_socket, none_hangs
        )
        return self._group

    def _environment(
        self,
        local_rank: int,
        own: Mapping[str, str],
        output: WorkerOutput,
        memory: WorkerMetricMemory | None,
        heartbeat_file: Path | None,
    ) -> dict[str, str]:
        """Return the environment of a new worker; `own` has the variables of its round."""
        environment = {**self._base, **own, ERROR_FILE: str(output.error_file)}
        if self._settings.virtual_local_rank:
            environment.update(own_device(self._base, local_rank), LOCAL_RANK="0")
        if memory is not None:
            environment[METRICS_FILE] = memory.path
        if heartbeat_file is not None:
            environment[HEARTBEAT_FILE] = str(heartbeat_file)
        return environment

    async def _fork(
        self,
        environments: Mapping[int, dict[str, str]],
        outputs: Sequence[WorkerOutput],
        delay: float,
    ) -> list[Child]:
        """Start a process for each local rank's environment and output, which begins after some seconds."""
        processes = await self.fork_server.fork(len(environments)) if environments else []
        try:
            for process, (local_rank, environment), output in zip(
                processes, environments.items(), outputs, strict=True
            ):
                task, content = self._task_of(environment)
                if mode := self._settings.numa_binding:
                    content["numa_binding"] = {"mode": mode, "device": local_rank}
                process.begin(task, {**content, "delay": delay}, output.streams)
        except OSError:
            for process in processes:
                process.child.signal(signal.SIGKILL)
            raise
        finally:
            for process in processes:
                process.connection.close()
        return [process.child for process in processes]

    async def _start_tcp_store(self, listener: socket.socket) -> Child:
        (process,) = await self.fork_server.fork(1, complete=False)
        return self._serve_tcp_store(process, listener)

    def _serve_ahead(self) -> None:
        """Let a spare process serve the TCPStore that the next round may use."""
        listener, ahead = self.tcp_store_listener(), self._ahead
        if listener is None or (ahead is not None and ahead[0] is listener and ahead[1].running):
            return
        if (process := self.fork_server.take_spare()) is not None:
            with contextlib.suppress(StartError):  # the round starts its own process
                self._ahead = listener, self._serve_tcp_store(process, listener)
                if ahead is not None:
                    ahead[1].signal(signal.SIGKILL)

    def _take_ahead(self, listener: socket.socket) -> Child | None:
        """Return the process that serves a listener already."""
        if self._ahead is None or self._ahead[0] is not listener:
            return None
        (_, process), self._ahead = self._ahead, None
        self.fork_server.refill()
        process.begin()
        return process if process.running else None

    def _serve_tcp_store(self, process: ForkedProcess, listener: socket.socket) -> Child:
        try:
            listener.listen()
            host, port = listener.getsockname()[:2]
            local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
            process.begin("tcp_store", {"host": local, "port": port}, {1: 2, 2: 2}, [listener.fileno()])
        except OSError as error:
            process.child.signal(signal.SIGKILL)
            raise StartError(f"the round's TCPStore cannot be started: {error.strerror}") from None
        finally:
            process.connection.close()
        return process.child

    def _task_of(self, environment: Mapping[str, str]) -> tuple[str, dict[str, object]]:
        """Return the task of a worker with this environment, and the arguments of the task."""
        kind = self._settings.program.kind
        argv: Sequence[str] = self._settings.program.argv
        if not self._executed:
            learns = self._settings.program.learns
            return "worker", {"kind": kind.value, "argv": argv, "environment": environment, "learns": learns}
        if kind is not ProgramKind.COMMAND:
            argv, environment = python_command(kind.value, argv, environment)
        if (debugger := _debugger()) is not None:
            argv = debugger.patch_args([*argv])
        return "command", {"argv": argv, "environment": environment}


def _debugger() -> ModuleType | None:
    """Return the module of debugpy that adds the debugger to a command, if debugpy debugs new processes; else None."""
    return None if os.posix_spawn is posix.posix_spawn else sys.modules.get("_pydev_bundle.pydev_monkey")


def _reason_to_execute(program: Program, tree: ast.Module, environment: Mapping[str, str]) -> str:
    """Return why the workers of a Python program need a new interpreter; empty if they can be forked."""
    if started := [name for name in _STARTED_WITH_INTERPRETER if name in environment]:
        return f"{started[0]} is set"
    if _debugger() is not None:
        return "debugpy debugs the workers"
    name = program.argv[0]
    if program.kind is ProgramKind.SCRIPT and name.endswith(".pyc"):
        return f"{name} is compiled"
    if names := program_source.variables_read_by_torch(tree):
        read = "which torch reads when it is imported (set it for the agent instead)"
        return f"{program_source.path_of(program).name} sets {', '.join(names)}, {read}"
    return ""
