"""The agent that runs a node's workers on this machine, for launchers in Python.

With our rendezvous it is the same agent as ``torchelastic-run``'s, in a thread with its own event loop. With another
handler it is torch's agent, see :mod:`.torch_agent`.

The program keeps its signal handlers. One that raises (as Ctrl-C's does) ends :meth:`LocalElasticAgent.run` with that
exception, once the other nodes know and the workers are gone; one that calls :meth:`LocalElasticAgent.stop` ends it in
order. If the program is killed, or ended by a SIGTERM without a handler, its workers die with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torchelastic.config.settings import AgentSettings, LogSettings, Program, ProgramKind, StartMethod, Streams
from torchelastic.errors import SettingsError
from torchelastic.output import DEFAULT_ROLE
from torchelastic.rendezvous.api import RendezvousParameters
from torchelastic.rendezvous.handler import NO_LIMIT, ElasticRendezvousHandler

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torchelastic.agent.server.library_agent import LibraryAgent
    from torchelastic.agent.server.torch_agent import TorchAgent

__all__ = ["LocalElasticAgent"]

_JOIN_TIMEOUT: Final = 1.0
"""Seconds to wait for a thread with its result; it can only be in a handler that does not return."""

_one_at_a_time: Final = threading.Lock()


class LocalElasticAgent:
    """Runs the workers of one node until they have succeeded or the run has failed.

    Args:
        spec: what they run, how many there are, and how the nodes meet.
        start_method: "fork-server" (also "forkserver", "fork"): workers are forked from a process that has torch
            imported; "exec" (also "spawn"): each is a new interpreter, as always with a handler that is not ours.
        exit_barrier_timeout: with a handler that is not ours, seconds for which this node waits for the other nodes
            after its workers have succeeded. With ours it waits as long as any of them runs.
        log_dir: a folder for the workers' output; None for no files.
        logs_specs: torch's way to name that folder, used if ``log_dir`` is not given.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when workers are ended because this node leaves.

    Raises:
        SettingsError: what is asked for cannot be done; the message says what to change.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        start_method: str = "fork-server",
        exit_barrier_timeout: float = 300.0,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        logs_specs: Any = None,  # noqa: ANN401 - of torch's type, which is not imported here
        shutdown_timeout: float = 5.0,
    ) -> None:
        method = StartMethod.named(f"{start_method}")
        if method is None:
            raise SettingsError(
                f"start_method={start_method}: this is fork-server or exec (or torch's forkserver, fork or spawn)."
            )
        folder = log_dir or getattr(logs_specs, "root_log_dir", None)
        self._spec = spec
        self._start_method = method
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._logs = LogSettings(
            directory=None if folder is None else Path(folder).absolute(),
            redirects=_streams("redirects", spec.redirects, spec.local_world_size),
            tee=_streams("tee", spec.tee, spec.local_world_size),
        )
        if self._logs.redirects and folder is None:
            raise SettingsError("WorkerSpec.redirects: there is no folder for the files; name one as log_dir.")
        self._agent: LibraryAgent | TorchAgent | None = None
        self._stopped = False

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - torch's signature; a spec has one role
        """Run the workers, in as many rounds as it takes.

        Raises:
            RendezvousError: this node cannot meet the others.
            SettingsError: what is asked for cannot be done; the message says what to change.
            RuntimeError: another agent runs in this process, or this is a process of multiprocessing that still starts.
            Exception: what a handler that is not ours raises, or a signal handler of the program.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "A process that multiprocessing has started imports this program: what launches workers has to stand "
                'below `if __name__ == "__main__":`, or each such process would launch workers, too.'
            )
        if not _one_at_a_time.acquire(blocking=False):
            raise RuntimeError("Another agent runs in this process; a process can have one at a time.")
        try:
            _keep_exit_statuses()
            return self._run()
        finally:
            self._agent = None
            _one_at_a_time.release()

    def stop(self) -> None:
        """Have the agent leave the run, as on SIGTERM: :meth:`run` returns soon, with the state STOPPED.

        From any thread, or a signal handler; called twice, the agent does not wait for its workers.
        """
        self._stopped = True
        if (agent := self._agent) is not None:
            agent.stop()

    def _run(self) -> RunResult:
        """Run the agent in a thread, and wait for it in a way that lets signal handlers run."""
        result: Future[RunResult] = Future()

        def stopped() -> None:
            with contextlib.suppress(InvalidStateError):
                result.set_result(RunResult(WorkerState.STOPPED))

        def launch() -> None:
            try:
                found = agent.launch()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                with contextlib.suppress(InvalidStateError):
                    result.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    result.set_result(found)

        agent = self._agent = self._made(stopped)
        thread = threading.Thread(target=launch, name="torchelastic: agent", daemon=True)
        thread.start()
        if self._stopped:
            agent.stop()
        try:
            return result.result()
        except BaseException:
            agent.stop()  # no effect if it has ended
            raise
        finally:
            while not result.done():
                try:
                    wait([result])
                except BaseException:  # noqa: BLE001 - a second signal; what the first one raised is on its way
                    agent.stop()
            thread.join(_JOIN_TIMEOUT)

    def _made(self, stopped: Callable[[], None]) -> LibraryAgent | TorchAgent:
        handler = self._spec.rdzv_handler or ElasticRendezvousHandler(
            RendezvousParameters("torchelastic", "", "", 1, 1)
        )
        if not isinstance(handler, ElasticRendezvousHandler):
            from torchelastic.agent.server.torch_agent import TorchAgent

            return TorchAgent(self._spec, self._logs, self._exit_barrier_timeout, stopped)
        from torchelastic.agent.function_call import call_of
        from torchelastic.agent.server.library_agent import LibraryAgent
        from torchelastic.config.program import program_of_command

        entrypoint, arguments = self._spec.program, self._spec.args
        if isinstance(entrypoint, str):
            command = program_of_command((entrypoint, *map(str, arguments)), self._start_method)
            return LibraryAgent(self._settings(handler, command), None)
        worker = Program(ProgramKind.MODULE, ("torchelastic.agent.function_worker",), self._start_method)
        return LibraryAgent(self._settings(handler, worker), call_of(entrypoint, arguments))

    def _settings(self, handler: ElasticRendezvousHandler, program: Program) -> AgentSettings:
        spec, settings = self._spec, handler.settings
        rules = dataclasses.replace(settings.rendezvous, max_restarts=spec.max_restarts)
        if not handler.bounds_crash_loops:  # the budget is small here, and all of it was asked for
            rules = dataclasses.replace(rules, crash_loop_limit=NO_LIMIT)
        return AgentSettings(
            rendezvous=rules,
            store=settings.store,
            node_name=settings.node_name,
            address=spec.local_addr or settings.address,
            interface=settings.interface,
            place=settings.place,
            program=program,
            workers=spec.local_world_size,
            role=spec.role,
            logs=self._logs,
            stop_grace=self._shutdown_timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
            final_exit_codes=frozenset(spec.final_exit_codes),
        )


def _streams(name: str, given: int | Mapping[int, int], workers: int) -> Mapping[int, Streams]:
    """Streams by local rank; ranks without one are left out."""
    chosen = given if isinstance(given, Mapping) else dict.fromkeys(range(workers), given)
    if not all(0 <= rank < workers and 0 <= streams <= Streams.BOTH for rank, streams in chosen.items()):
        raise SettingsError(
            f"WorkerSpec.{name}={given}: this is 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number by "
            f"local rank, of which there are {workers}."
        )
    return {rank: Streams(streams) for rank, streams in chosen.items() if streams}


def _keep_exit_statuses() -> None:
    """Make the kernel keep the exit statuses of children, which it does not for a program that ignores SIGCHLD."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except ValueError:
            raise SettingsError(
                "This program ignores SIGCHLD, so the exit status of a worker would be lost; call "
                "signal.signal(signal.SIGCHLD, signal.SIG_DFL) first, in the main thread."
            ) from None
