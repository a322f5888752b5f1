"""The agent that runs a node's workers on this machine, for launchers in Python.

With our own rendezvous it is the same agent as ``torchelastic-run``'s. It lives in a thread with an event loop of its
own, so it can be run from any thread, and where a loop runs already.

The calling program keeps its signal handlers. One that raises (as Ctrl-C's does) ends :meth:`LocalElasticAgent.run`
with what it raised, once the other nodes know and the workers are gone; one that calls :meth:`LocalElasticAgent.stop`
ends it in order. When the program is killed, as a SIGTERM without a handler does, its workers die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import secrets
import signal
import socket
import threading
import types
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torchelastic.contract import ExitCode, SizeRecord
from torchelastic.errors import SettingsError
from torchelastic.output import DEFAULT_ROLE
from torchelastic.rendezvous.api import RendezvousConnectionError, RendezvousGracefulExitError, RendezvousParameters
from torchelastic.settings import AgentSettings, LogSettings, RendezvousSettings, StartMethod, Streams

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torchelastic.agent.ending import Ending
    from torchelastic.agent.function_call import FunctionCall
    from torchelastic.agent.library_agent import LibraryAgent
    from torchelastic.rendezvous.handler import ElasticRendezvousHandler
    from torchelastic.rendezvous.polled import PolledNode
    from torchelastic.settings import Program

__all__ = ["LocalElasticAgent"]

logger = logging.getLogger(__name__)

_one_at_a_time: Final = threading.Lock()


class LocalElasticAgent:
    """Runs the workers of one node until they have succeeded or the run has failed.

    Args:
        spec: what they run, how many there are, and how the nodes meet.
        start_method: "fork-server" (also "forkserver", "fork"): workers are forked from a process that has torch
            imported; "exec" (also "spawn"): each is a new interpreter, which imports everything anew.
        exit_barrier_timeout: seconds for which this node, when its workers have succeeded, waits for the others' on a
            handler that is not ours. Ours waits as long as any of them runs.
        log_dir: a folder for the workers' output; None for no files.
        logs_specs: torch's word for it: its folder is taken, where ``log_dir`` is not given.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when workers are ended because this node leaves.

    Raises:
        SettingsError: what is asked for cannot be; the message says what to change.
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
        self._lock = threading.Lock()
        self._agent: LibraryAgent | None = None
        self._stopped = False

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - a spec has one role, and torch has it asked for
        """Run the workers, in as many epochs as it takes.

        Args:
            role: of the workers to run; there is one.

        Raises:
            RendezvousError: this node cannot meet the others.
            SettingsError: what is asked for cannot be; the message says what to change.
            RuntimeError: another agent runs in this process, or this one is multiprocessing's and has no work yet.
            Exception: whatever the handler's ``next_rendezvous`` raised, where it is not ours; and whatever a signal
                handler of the program raised meanwhile.
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
            with self._prepared() as (agent, node):
                return self._result(agent, node, self._run(agent))
        finally:
            _one_at_a_time.release()

    def stop(self) -> None:
        """Have the agent leave the run, as on SIGTERM: :meth:`run` returns soon, with the state STOPPED.

        From any thread, or a signal handler; called twice, the agent does not wait for its workers.
        """
        self._stopped = True
        if (agent := self._agent) is not None:
            agent.ask_to_go()

    def _run(self, agent: LibraryAgent) -> Ending:
        """Run the agent in a thread of its own, and wait for it, open to the program's signal handlers."""
        ending: Future[Ending] = Future()

        def live() -> None:
            try:
                ending.set_result(asyncio.run(agent.run_beside()))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                ending.set_exception(error)

        thread = threading.Thread(target=live, name="torchelastic: agent")
        thread.start()
        self._agent = agent
        if self._stopped:
            agent.ask_to_go()
        try:
            return ending.result()
        except BaseException:
            agent.ask_to_go()  # which is nothing where it has ended
            raise
        finally:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException:  # noqa: BLE001 - a second signal: what the first one raised is on its way
                    agent.ask_to_go()
            self._agent = None

    # -- what the agent is made of

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[tuple[LibraryAgent, PolledNode | None]]:
        from torchelastic.agent.library_agent import LibraryAgent
        from torchelastic.metrics.agent import AgentMetrics
        from torchelastic.rendezvous.handler import ElasticRendezvousHandler

        call, program = self._program()
        handler = self._spec.rdzv_handler or _alone()
        node_id = f"{_name_of(handler)}.{secrets.token_hex(4)}"
        if isinstance(handler, ElasticRendezvousHandler):
            settings, node = self._settings(handler, program), None
        else:
            settings, node = self._on_foreign_handler(handler, program, node_id)
        with AgentMetrics() as metrics:
            yield LibraryAgent(settings, metrics, node=node, node_id=node_id, call=call), node

    def _program(self) -> tuple[FunctionCall | None, Program]:
        from torchelastic.agent.function_call import FunctionCall
        from torchelastic.agent.program import program_of_command

        program = self._spec.program
        if isinstance(program, str):
            command = (program, *(str(argument) for argument in self._spec.args))
            return None, program_of_command(command, self._start_method)
        call = FunctionCall(program, self._spec.args)
        return call, call.program(self._start_method)

    def _settings(self, handler: ElasticRendezvousHandler, program: Program) -> AgentSettings:
        from torchelastic.rendezvous.handler import NO_LIMIT

        spec, settings = self._spec, handler.settings
        rules = dataclasses.replace(settings.rendezvous, max_restarts=spec.max_restarts)
        if not handler.bounds_early_failures:  # the budget is small here, and all of it was asked for
            rules = dataclasses.replace(rules, early_failures=NO_LIMIT)
        return AgentSettings(
            rendezvous=rules,
            store=settings.store,
            node_name=settings.node_name,
            address=spec.local_addr or settings.address,
            interface=settings.interface,
            place=settings.place,
            **self._common(program),
        )

    def _on_foreign_handler(self, handler: Any, program: Program, node_id: str) -> tuple[AgentSettings, PolledNode]:  # noqa: ANN401 - with next_rendezvous, and maybe more
        from torchelastic.rendezvous.polled import PolledNode, PolledSettings

        spec = self._spec
        node = PolledNode(
            handler,
            PolledSettings(
                workers=spec.local_world_size,
                max_restarts=spec.max_restarts,
                interval=spec.monitor_interval,
                patience=self._exit_barrier_timeout,
                address=spec.local_addr or "",
                store_host=spec.master_addr or "",
                store_port=spec.master_port or 0,
            ),
            node=node_id,
        )
        run_id = getattr(handler, "get_run_id", lambda: "none")()
        settings = AgentSettings(
            rendezvous=RendezvousSettings(run_id, SizeRecord(min=1, max=1), max_restarts=spec.max_restarts),
            store=None,
            node_name=socket.gethostname(),
            address=spec.local_addr or "",
            **self._common(program),
        )
        return settings, node

    def _common(self, program: Program) -> dict[str, Any]:
        spec = self._spec
        return {
            "program": program,
            "workers": spec.local_world_size,
            "role": spec.role,
            "logs": self._logs,
            "stop_grace": self._shutdown_timeout,
            "heartbeat_timeout": spec.heartbeat_timeout,
            "final_exit_codes": frozenset(spec.final_exit_codes),
        }

    # -- what comes out

    def _result(self, agent: LibraryAgent, node: PolledNode | None, ending: Ending) -> RunResult:
        from torchelastic.agent.library_agent import process_failure

        message = ending.message
        match ending.code:
            case ExitCode.SUCCEEDED:
                return RunResult(WorkerState.SUCCEEDED, return_values=agent.results)
            case ExitCode.FAILED if message.failure is not None:
                cause = {message.failure.rank: process_failure(message.failure)}
                return RunResult(WorkerState.FAILED, failures={**cause, **agent.failures, **cause})
            case ExitCode.BAD_INPUT:
                raise SettingsError(message.message)
            case ExitCode.LEFT | ExitCode.INTERRUPTED:
                return RunResult(WorkerState.STOPPED)
        if (error := None if node is None else node.error) is None:
            raise RendezvousConnectionError(message.message)
        if any(
            kind.__name__ == RendezvousGracefulExitError.__name__ for kind in type(error).__mro__
        ):  # torch's, or ours
            return RunResult(WorkerState.STOPPED)
        raise error


def _alone() -> ElasticRendezvousHandler:
    from torchelastic.rendezvous.handler import ElasticRendezvousHandler

    return ElasticRendezvousHandler(RendezvousParameters("torchelastic", "", "", 1, 1))


def _name_of(handler: object) -> str:
    settings = getattr(handler, "settings", None)
    return str(getattr(settings, "node_name", "")) or socket.gethostname()


def _streams(name: str, given: int | Mapping[int, int], workers: int) -> Mapping[int, Streams]:
    """Streams by local rank; ranks without one are left out."""
    chosen = given if isinstance(given, Mapping) else dict.fromkeys(range(workers), given)
    if not all(0 <= rank < workers and 0 <= streams <= Streams.BOTH for rank, streams in chosen.items()):
        raise SettingsError(
            f"WorkerSpec.{name}={given}: this is 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number by "
            f"local rank, of which there are {workers}."
        )
    return types.MappingProxyType({rank: Streams(streams) for rank, streams in chosen.items() if streams})


def _keep_exit_statuses() -> None:
    """See to it that the kernel tells how children end, which a program that ignores SIGCHLD has it not do.

    Raises:
        SettingsError: that cannot be changed from this thread.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError:
        raise SettingsError(
            "This program ignores SIGCHLD, so nobody can know how a worker ended; call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) first, in the main thread."
        ) from None
