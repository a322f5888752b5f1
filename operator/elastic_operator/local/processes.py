"""Pods as processes: each is one agent in its own session, with its output in a file, and is killed with its parent.

The agent is that of the Python that runs ``elasticjob``. It runs in the manifest's directory and inherits the
environment of ``elasticjob``. Ctrl-C in the terminal reaches only ``elasticjob run``, which ends its pods gracefully.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.api.spec import user_env
from elastic_operator.controller.model import NewPod, Pod, PodPhase
from elastic_operator.errors import BadInput
from elastic_operator.local.pdeathsig import with_pdeathsig
from elastic_operator.resources.worker_pod import agent_arguments, agent_variables, resolved
from torchelastic.errors import MalformedRecord
from torchelastic.protocol import TERMINATION_MESSAGE_LIMIT, Env, ExitCode, SizeRecord, TerminationMessage, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elastic_operator.controller.model import Job
    from elastic_operator.local.run_dir import RunDir

_LAUNCHER: Final = (sys.executable, "-P", "-m", "torchelastic.run")
"""-P: a file beside the manifest must not replace a module of the agent's."""
_NOT_INHERITED: Final = ("PET_", "TORCHELASTIC_")
_LOOPBACK: Final = "127.0.0.1"
_LOG: Final = "agent.log"
_TERMINATION_LOG: Final = "termination-log"
_LOG_TAIL: Final = 2048
"""Number of bytes of the log that a kubelet uses if there is no termination message (FallbackToLogsOnError)."""


class PodCommand(NamedTuple):
    """The command that starts the process of a pod.

    Attributes:
        argv: the agent's command line.
        env: its whole environment.
        cwd: its working directory.
        checkpoints: the directory for its program's checkpoints.
        logs: the directory of its output and its termination message.
    """

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
        job: its job.
        pod: the pod.
        store: host:port of its store.
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
    )
    variables[Env.NODE_ADDRESS] = _LOOPBACK
    arguments, variables = resolved(agent_arguments(job.spec), variables, user_env(job.spec))
    inherited = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    env = {**inherited, **variables, "PET_LOG_DIR": str(logs)}
    return PodCommand((*_LAUNCHER, *arguments), env, base, checkpoints, logs)


async def check_program(job: Job, *, run: RunDir, base: Path, environ: Mapping[str, str]) -> None:
    """Check that the agent accepts the command line of the pods; the arguments are those of :func:`pod_command`.

    Raises:
        BadInput: the agent does not accept it; the message is the agent's.
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
    except (OSError, ValueError) as error:  # an argument or a variable is too long, or has a NUL
        raise BadInput(f"no process can be started with these arguments and variables: {error}") from None
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != ExitCode.SUCCEEDED:
        lines = said.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise BadInput(lines[-1].removeprefix("torchelastic-run: "))


class PodProcess:
    """A pod: one agent as a process.

    Args:
        new: the pod of the plan.
        changed: called after each change.

    Attributes:
        new: the pod of the plan.
        pod: the pod as the plan sees it, except for its readiness, which the store has.
        pid: its process; None before it has one.
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

    async def run(self, command: Callable[[], PodCommand], available: asyncio.Event | None) -> None:
        """Start the process and wait for its end; kill it when this is cancelled.

        Args:
            command: returns the command, when the process is about to be started.
            available: set when the store serves; None if that is not known.
        """
        if available is not None:
            waits = [asyncio.ensure_future(event.wait()) for event in (available, self._removed)]
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
        except OSError as error:
            self._end(None, f"its process could not be started: {error.strerror}")
            return
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            self.kill()
            await process.wait()
            raise
        self._end(code if code >= 0 else 128 - code, _last_words(chosen.logs, failed=code != 0))

    async def _start(self, command: PodCommand) -> asyncio.subprocess.Process:
        for directory in (command.logs, command.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)
        # After a resumption, pods have the names of earlier pods.
        (command.logs / _TERMINATION_LOG).unlink(missing_ok=True)
        with (command.logs / _LOG).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *with_pdeathsig(command.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.env),
                cwd=command.cwd,
                start_new_session=True,
            )
        self._process = process
        self.pid = process.pid
        self.pod = replace(self.pod, phase=PodPhase.RUNNING, started=time.time())
        if self.pod.terminating:  # it was removed meanwhile
            process.terminate()
            self._kill_after(self._grace)
        self._changed()
        return process

    def remove(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds. A second call can only shorten the grace."""
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
        """Wait until the process has ended."""
        await self._finished.wait()

    def _kill_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.kill)

    def _end(self, exit_code: int | None, message: TerminationMessage | str | None) -> None:
        phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
        self.pod = replace(self.pod, phase=phase, ended=time.time(), exit_code=exit_code, message=message)
        self._finished.set()
        self._changed()


def _last_words(logs: Path, *, failed: bool) -> TerminationMessage | str | None:
    """Return the termination message, or the end of the log if there is none and the pod failed."""
    data = tail(logs / _TERMINATION_LOG, TERMINATION_MESSAGE_LIMIT)
    if data:
        try:
            return decode(data, TerminationMessage)
        except MalformedRecord:
            return data.decode(errors="replace").strip()
    return tail(logs / _LOG, _LOG_TAIL).decode(errors="replace").strip() or None if failed else None


def tail(path: Path, limit: int) -> bytes:
    """Return the last bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - limit, 0))
            return file.read(limit)
    except OSError:
        return b""
