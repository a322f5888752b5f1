"""A pod as a process: one agent in a session of its own, tied to the run, with its output in a file.

A session of its own, so that Ctrl-C in the terminal reaches ``elasticjob run`` alone, which ends its pods in order.
Its workers are the agent's to end: they never outlive it, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.local.tether import tethered
from elastic_operator.model import Pod, PodPhase
from torchelastic.contract import TERMINATION_MESSAGE_LIMIT, TerminationMessage, decode
from torchelastic.errors import MalformedRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elastic_operator.model import NewPod

_LAST_WORDS_BYTES: Final = 2048
"""What the kubelet takes of a container's log where there is no termination message (FallbackToLogsOnError)."""


@dataclass(frozen=True, slots=True)
class PodCommand:
    """What a pod's process is.

    Attributes:
        argv: the agent's command line.
        env: its whole environment.
        folder: in which it runs.
        checkpoints: the folder that its program is given; made where it is not there.
        log: file that gets its output.
        termination_log: file that gets its last words.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    checkpoints: Path
    log: Path
    termination_log: Path


class PodProcess:
    """One pod.

    Attributes:
        new: what the plan asked for.
        uid: unique for all time.
        created: when it was made.
        started: when its process started; None before.
        terminating: whether its removal has begun.
        pid: of the process; None before it has one.
        ended: when it ended; None while it has not.
    """

    def __init__(self, new: NewPod, *, uid: str, changed: Callable[[], None]) -> None:
        """A pod that has not started.

        Args:
            new: what the plan asked for.
            uid: unique for all time.
            changed: called whenever an attribute has changed.
        """
        self.new = new
        self.uid = uid
        self.created = time.time()
        self.started: float | None = None
        self.terminating = False
        self.pid: int | None = None
        self.ended: float | None = None
        self._exit_code: int | None = None
        self._message: TerminationMessage | str | None = None
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._grace: float | None = None
        self._going = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def name(self) -> str:
        """The pod's name."""
        return self.new.name

    @property
    def phase(self) -> PodPhase:
        """Where its process stands."""
        if self.ended is not None:
            return PodPhase.SUCCEEDED if self._exit_code == 0 else PodPhase.FAILED
        return PodPhase.PENDING if self.started is None else PodPhase.RUNNING

    def observed(self, *, ready: bool) -> Pod:
        """The pod as the plan sees it.

        Args:
            ready: whether its agent serves, which the store tells.
        """
        return Pod(
            name=self.name,
            uid=self.uid,
            index=self.new.index,
            phase=self.phase,
            ready=ready and self.phase is PodPhase.RUNNING,
            terminating=self.terminating,
            created=self.created,
            started=self.started,
            ended=self.ended,
            exit_code=self._exit_code,
            message=self._message,
            failures=self.new.failures,
            failed=self.new.failed,
            size=self.new.size,
        )

    async def run(self, command: Callable[[], PodCommand], available: asyncio.Event | None) -> None:
        """Start the process and see it through to its end; it is killed when this is cancelled.

        Args:
            command: gives what its process is, when it is time to start it.
            available: set when it is worth starting; None for at once.
        """
        if available is not None:
            await _first(available, self._going)
        if self.terminating:
            self._end(exit_code=None, message="it was removed before it started")
            return
        chosen = command()
        try:
            process = await self._start(chosen)
        except OSError as error:
            self._end(exit_code=None, message=f"its process could not be started: {error.strerror}")
            return
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            self.kill()
            await process.wait()
            raise
        finally:
            if self._kill_timer is not None:
                self._kill_timer.cancel()
        self._end(exit_code=code if code >= 0 else 128 - code, message=_last_words(chosen, failed=code != 0))

    async def _start(self, command: PodCommand) -> asyncio.subprocess.Process:
        for folder in (command.log.parent, command.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        # After a resumption pods have the names of earlier ones, but not their last words.
        command.termination_log.unlink(missing_ok=True)
        with command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *tethered(command.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.env),
                cwd=command.folder,
                start_new_session=True,
            )
        self._process = process
        self.pid = process.pid
        self.started = time.time()
        if self._grace is not None:
            self._signal_end(process, self._grace)
        self._changed()
        return process

    def remove(self, grace: float) -> None:
        """Begin to end it: SIGTERM, and SIGKILL when it is still there after ``grace`` seconds.

        Called again, it shortens the grace, and never lengthens it.
        """
        first, self.terminating = not self.terminating, True
        self._going.set()
        self._grace = grace if self._grace is None else min(grace, self._grace)
        if self._process is not None and self._process.returncode is None:
            self._signal_end(self._process, self._grace, tell=first)
        if first:
            self._changed()

    def kill(self) -> None:
        """End it at once; what it had no time to end ends with it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._finished.wait()

    def _signal_end(self, process: asyncio.subprocess.Process, grace: float, *, tell: bool = True) -> None:
        if tell:
            process.terminate()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_timer = asyncio.get_running_loop().call_later(grace, self.kill)

    def _end(self, *, exit_code: int | None, message: TerminationMessage | str | None) -> None:
        self.ended = time.time()
        self._exit_code = exit_code
        self._message = message
        self._finished.set()
        self._changed()


def _last_words(command: PodCommand, *, failed: bool) -> TerminationMessage | str | None:
    """The termination message; where there is none and the pod failed, the end of its log."""
    data = _tail(command.termination_log, TERMINATION_MESSAGE_LIMIT)
    if data:
        try:
            return decode(data, TerminationMessage)
        except MalformedRecord:
            return data.decode(errors="replace").strip()
    if not failed:
        return None
    return _tail(command.log, _LAST_WORDS_BYTES).decode(errors="replace").strip() or None


def _tail(path: Path, limit: int) -> bytes:
    """The last bytes of a file; none where there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - limit, 0))
            return file.read(limit)
    except OSError:
        return b""


async def _first(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
