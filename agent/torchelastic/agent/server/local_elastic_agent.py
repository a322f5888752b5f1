"""The agent that runs a node's workers on this machine, for launchers in Python.

With torchelastic's rendezvous, this is the agent of ``torchelastic-run``, in a thread with its own event loop. With a
custom rendezvous handler, it is torch's agent: see :mod:`.torch_agent`.

The program keeps its signal handlers. If a handler raises an exception (Ctrl-C, for example),
:meth:`LocalElasticAgent.run` raises the exception after this node has left the run and its workers have exited. If a
handler calls :meth:`LocalElasticAgent.stop`, :meth:`LocalElasticAgent.run` returns. If a signal kills the program, for
example a SIGTERM without a handler, its workers are killed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError, wait
from typing import TYPE_CHECKING, Any, Final, cast

from torchelastic.agent.agent import Agent
from torchelastic.agent.function_call import read_results, serialize_call, write_call
from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState, common_fields
from torchelastic.agent.server.process_failures import process_failures
from torchelastic.agent.signals import Signals
from torchelastic.agent.workers.pool import Workers
from torchelastic.config import machine, parsers
from torchelastic.config.parse import program_of_command, read_streams
from torchelastic.config.parsers import RawValue
from torchelastic.config.settings import AgentSettings, LogSettings, NodeSettings, Program, ProgramKind
from torchelastic.errors import SettingsError
from torchelastic.lazy import lazy_attributes
from torchelastic.metrics.agent import AgentMetrics
from torchelastic.protocol.log_format import DEFAULT_ROLE
from torchelastic.protocol.pod import LEFT_CODES, ExitCode
from torchelastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from torchelastic.rendezvous.handler import ElasticRendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
    from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from torchelastic.agent.failures import ExitStatus
    from torchelastic.agent.server.torch_agent import TorchAgent

__all__ = ["LocalElasticAgent"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "torch.distributed.elastic.agent.server.local_elastic_agent": (
            "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_HEALTH_CHECK_PORT TORCHELASTIC_TIMER_FILE "
            "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
        )
    },
)

_JOIN_TIMEOUT: Final = 1.0
"""Seconds to wait for the end of the agent's thread after its result. Only a rendezvous handler can delay the end."""

_one_at_a_time: Final = threading.Lock()


class LocalElasticAgent:
    """Runs the workers of one node until they have succeeded or the run has failed.

    Args:
        spec: the program and number of the workers, and the rendezvous.
        logs_specs: torch's ``LogsSpecs``, which chooses the files and streams instead of ``log_dir`` and the spec; the
            spec's filters apply in both cases.
        start_method: "fork-server" (also "forkserver", "fork"): workers are forked from a process that has
            imported torch; "exec" (also "spawn"): each worker is a new interpreter. A custom handler implies "exec".
        exit_barrier_timeout: with a custom handler, seconds to wait for the other nodes after the workers of this
            node have succeeded. Without a custom handler, there is no limit.
        log_line_prefix_template: see :class:`~torchelastic.launcher.LaunchConfig`.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when this node leaves the run.
        health_check_server: a server of the caller, which the agent stops when the run ends.
        uninterruptible_state_timeout: None; the agent does not measure how long a worker waits in the kernel.
        log_dir: the folder for the files of ``WorkerSpec.redirects`` and ``tee``; None for a temporary folder.

    Raises:
        SettingsError: a setting is invalid or unsupported; the message states what to change.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | None = None,
        start_method: str = "fork-server",
        exit_barrier_timeout: float = 300.0,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30.0,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if logs_specs is not None and (log_dir or spec.redirects or spec.tee):
            raise SettingsError("logs_specs chooses the folder and the streams: remove log_dir, redirects and tee.")
        if uninterruptible_state_timeout:
            raise SettingsError("uninterruptible_state_timeout is not supported: use WorkerSpec.heartbeat_timeout.")
        output = {"log-dir": log_dir, "redirects": _as_text(spec.redirects), "tee": _as_text(spec.tee)}
        raw = {name: RawValue(name.replace("-", "_"), f"{each}") for name, each in output.items() if each is not None}
        self._spec = spec
        self._start_method = parsers.start_method(RawValue("start_method", f"{start_method}"))
        self._exit_barrier_timeout = parsers.seconds(zero=True)(
            RawValue("exit_barrier_timeout", f"{exit_barrier_timeout}")
        )
        self._shutdown_timeout = parsers.seconds(zero=True)(RawValue("shutdown_timeout", f"{shutdown_timeout}"))
        self._logs = LogSettings(
            **read_streams(raw, spec.local_world_size),
            log_line_prefix_template=log_line_prefix_template or "",
            duplicate_stdout_filters=tuple(spec.duplicate_stdout_filters or ()),
            duplicate_stderr_filters=tuple(spec.duplicate_stderr_filters or ()),
            specs=logs_specs,
        )
        self._health_check_server = health_check_server
        self._agent: _EmbeddedAgent | TorchAgent | None = None
        self._state = WorkerState.INIT
        self._stopped = False

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - torch's signature; a spec has one role
        """Run the workers until they have succeeded or the run has failed.

        Raises:
            RendezvousError: this node cannot join the run.
            SettingsError: a setting is invalid or unsupported; the message states what to change.
            RuntimeError: another agent runs in this process, or this is a multiprocessing child that is starting.
            Exception: a custom rendezvous handler or a signal handler of the program raised it.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "A process that multiprocessing has started imports this program. Put the code that launches workers "
                'below `if __name__ == "__main__":`, or each such process would launch workers, too.'
            )
        if not _one_at_a_time.acquire(blocking=False):
            raise RuntimeError("Another agent runs in this process; a process can have one at a time.")
        try:
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the kernel drops exit statuses
            self._state = WorkerState.HEALTHY
            result = self._run()
            self._state = result.state
            return result
        except BaseException:
            self._state = WorkerState.FAILED
            raise
        finally:
            if self._health_check_server is not None:
                self._health_check_server.stop()
            _one_at_a_time.release()

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 - as in run()
        """Return torch's description of this node's workers, as they are now."""
        from torch.distributed.elastic.agent.server.api import WorkerGroup

        group = WorkerGroup(cast("Any", self._spec))
        group.state = cast("Any", self._state)
        if self._agent is not None:
            self._agent.describe(group)
        return group

    def stop(self) -> None:
        """Leave the run, as on SIGTERM: :meth:`run` returns soon, with the state STOPPED.

        May be called from any thread and from signal handlers. After a second call, the agent does not wait for its
        workers.
        """
        self._stopped = True
        if (agent := self._agent) is not None:
            agent.stop()

    def _run(self) -> RunResult:
        """Run the agent in a thread, so that the program's signal handlers can run while this thread waits."""
        result: Future[RunResult] = Future()

        def settle(how: Callable[[Any], None], value: object) -> None:
            with contextlib.suppress(InvalidStateError):
                how(value)

        def launch() -> None:
            try:
                settle(result.set_result, agent.launch())
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                settle(result.set_exception, error)

        agent = self._agent = self._new_agent(lambda: settle(result.set_result, RunResult(WorkerState.STOPPED)))
        thread = threading.Thread(target=launch, name="torchelastic: agent", daemon=True)
        thread.start()
        if self._stopped:
            agent.stop()
        try:
            return result.result()
        except BaseException:
            agent.stop()  # has no effect if the agent has exited
            raise
        finally:
            while not result.done():
                try:
                    wait([result])
                except BaseException:  # noqa: BLE001 - a second signal; the exception of the first one is raised
                    agent.stop()
            thread.join(_JOIN_TIMEOUT)

    def _new_agent(self, stopped: Callable[[], None]) -> _EmbeddedAgent | TorchAgent:
        spec = self._spec
        handler = spec.rdzv_handler or ElasticRendezvousHandler(RendezvousParameters("torchelastic", "", "", 1, 1))
        if not isinstance(handler, ElasticRendezvousHandler):
            from torchelastic.agent.server.torch_agent import TorchAgent

            return TorchAgent(spec, self._logs, self._exit_barrier_timeout, stopped)
        program = Program(ProgramKind.MODULE, ("torchelastic.agent.function_call",), self._start_method)
        if isinstance(spec.entrypoint, str):
            program = program_of_command((spec.entrypoint, *map(str, spec.args)), self._start_method)
        parsers.one_of("null")(RawValue("event_log_handler", spec.event_log_handler))
        if (numa := spec.numa_options) is not None and numa.should_fall_back_if_binding_fails:
            raise SettingsError("numa_options.should_fall_back_if_binding_fails is not supported: set it to False.")
        if spec.virtual_local_rank:
            machine.own_device(os.environ, spec.local_world_size - 1)  # each worker needs one
        settings = AgentSettings(
            **common_fields(NodeSettings, handler.settings) | ({"address": spec.local_addr} if spec.local_addr else {}),
            program=program,
            workers=spec.local_world_size,
            role=parsers.name()(RawValue("WorkerSpec.role", spec.role)),
            logs=self._logs,
            shutdown_timeout=self._shutdown_timeout,
            virtual_local_rank=spec.virtual_local_rank,
            numa_binding="" if numa is None else numa.affinity_mode.value,
            heartbeat_timeout=spec.heartbeat_timeout,
            non_retryable_exit_codes=frozenset(spec.non_retryable_exit_codes),
        )
        rules = dataclasses.replace(settings.rendezvous, max_restarts=spec.max_restarts)
        call = None if isinstance(spec.entrypoint, str) else serialize_call(spec.entrypoint, spec.args)
        return _EmbeddedAgent(dataclasses.replace(settings, rendezvous=rules), call)


class _EmbeddedAgent(Agent):
    """An agent within another program, whose signals it does not handle.

    Args:
        settings: the settings of the agent.
        call: the result of :func:`~torchelastic.agent.function_call.serialize_call`; None if the workers run a command.
    """

    def __init__(self, settings: AgentSettings, call: bytes | None) -> None:
        super().__init__(settings, AgentMetrics(settings.role))
        self._call = call
        self._pids: Callable[[], Mapping[int, int]] = dict
        self._signals = Signals(self._events.put_nowait)
        self._loop = asyncio.new_event_loop()

    def launch(self) -> RunResult:
        """Run the workers until they exit, in a new event loop; raise as :meth:`LocalElasticAgent.run` does."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            return runner.run(self._result())

    def stop(self) -> None:
        """Leave the run, as on SIGTERM; a second call does not wait for the workers. May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.leave)

    def describe(self, group: WorkerGroup) -> None:
        """Add the ranks and process ids of the last started workers. May be called from any thread."""
        pids = self._pids()
        for worker, environment in zip(group.workers, self._environments, strict=False):  # none before the first round
            _read_variables(group, environment)
            _read_variables(worker, environment | {"GLOBAL_RANK": environment["RANK"]})
            worker.id = pids.get(worker.global_rank)

    async def _result(self) -> RunResult:
        async with Workers(self._settings, owns_process=False) as workers:
            self._pids = lambda: workers.running_pids
            if self._call is not None:
                write_call(workers.scratch, self._call)
            return self._result_of(await self.run(workers), workers)

    def _result_of(self, ending: ExitStatus, workers: Workers) -> RunResult:
        failure = ending.message.failure
        match ending.code:
            case ExitCode.SUCCEEDED:
                results = {} if self.ranks is None else read_results(workers.scratch, *self.ranks)
                return RunResult(WorkerState.SUCCEEDED, return_values=results)
            case ExitCode.FAILED if failure is not None:
                return RunResult(WorkerState.FAILED, failures=process_failures(failure, self, workers))
            case code if code in LEFT_CODES:
                return RunResult(WorkerState.STOPPED)
            case ExitCode.BAD_INPUT:
                raise SettingsError(ending.message.message)
            case _:
                raise RendezvousConnectionError(ending.message.message)


def _as_text(streams: int | Mapping[int, int]) -> str:
    """Return streams in the format of ``--redirects``."""
    if not isinstance(streams, Mapping):
        return f"{int(streams)}"
    return ",".join(f"{rank}:{int(each)}" for rank, each in streams.items()) or "0"


def _read_variables(described: WorkerGroup | Worker, environment: Mapping[str, str]) -> None:
    """Set the attributes that have the lower-case names of variables; all but the address are numbers."""
    for name in {each.lower() for each in environment} & {*described.__slots__}:
        text = environment[name.upper()]
        setattr(described, name, text if name == "master_addr" else int(text))
