"""Heartbeats: find a worker that hangs, kill it, and report where it hung.

A worker sends a heartbeat by updating the modification time of its heartbeat file. Any program can do this with one
system call. If ``--heartbeat-timeout`` is set, workers run with ``PYTHONFAULTHANDLER=1``, so a Python program that gets
SIGABRT writes its stacks to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
import time
from typing import TYPE_CHECKING, Final

from torchelastic.agent.failures import MESSAGE_LIMIT, FailureCause
from torchelastic.agent.workers.process_tree import read_process
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.records import FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from torchelastic.agent.workers.processes import Child

FAULTHANDLER_ENV: Final = {"PYTHONFAULTHANDLER": "1"}
"""Environment variables that make a Python worker write its stacks when it gets SIGABRT."""

HANG_EXIT_CODES: Final = (-signal.SIGABRT, -signal.SIGKILL)
"""Exit codes of a worker that was killed because it hung."""

_DUMP_TIMEOUT: Final = 2.0
"""Time limit in seconds for a worker to write its stacks."""

_CHECKS_PER_TIMEOUT: Final = 20
"""Number of checks of the files during one timeout."""

_SUSPENDED_FRACTION: Final = 0.25
"""If the time between two checks exceeds this fraction of the timeout, the agent assumes that the machine was
suspended, and restarts the timeouts."""

_CHECK_INTERVAL: Final = 0.01
"""Minimum number of seconds between two checks of the files."""

_HUNG_FRACTION: Final = 0.9
"""When a worker hangs, other workers without a heartbeat for this fraction of the timeout count as hung, too."""

_STOPPED: Final = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger"}
_FRAME_LIMIT: Final = 8
_FATAL: Final = "Fatal Python error: Aborted"
_CURRENT: Final = re.compile(r"^Current thread [^\n]*\(most recent call first\):\n", re.MULTILINE)
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) [^\n]*\(most recent call first\):\n", re.MULTILINE)
_FRAME: Final = re.compile(r'  File "(?P<path>[^"\n]*)", line (?P<line>\d+) in (?P<function>[^\n]+)\n')
_LAUNCHER_FRAMES: Final = ("/torchelastic/agent/workers/fork_server_main.py", "<frozen runpy>")

_WAITING_FOR_OTHERS: Final = ("/torch/distributed/", "/torch/autograd/graph.py")
"""Parts of the file paths in the stack of a worker that waits for a collective operation, also in the backward pass."""


class HeartbeatMonitor:
    """Monitors a round's heartbeats. A worker without a heartbeat for `timeout` seconds counts as hung."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.timeout = timeout
        self._folder = folder
        self._files: dict[int, Path] = {}
        self._changed: dict[int, tuple[int, float]] = {}
        """The time of each file, and when the agent counts this heartbeat, on the event loop's clock."""

    def create_file(self, local_rank: int) -> Path:
        """Create the heartbeat file of a worker before its start; raise OSError if that is not possible."""
        path = self._folder / str(local_rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.watch_file(local_rank, path)
        return path

    def watch_file(self, local_rank: int, path: Path) -> None:
        """Watch the heartbeat file of a worker, which the program may have removed; its timeout begins now."""
        self._files[local_rank] = path
        self._changed[local_rank] = self._modified(local_rank), asyncio.get_running_loop().time()

    def _modified(self, local_rank: int) -> int:
        """Return the time of the last heartbeat in nanoseconds; 0 if the program has removed the file."""
        try:
            return self._files[local_rank].stat().st_mtime_ns
        except OSError:
            return 0

    async def wait_for_hang(
        self, running: Callable[[], Collection[int]], waiting: Callable[[], Collection[int]] = tuple
    ) -> list[int]:
        """Wait until a worker hangs; return the local ranks of the workers without a heartbeat, longest time first.

        Args:
            running: returns the local ranks of the running workers. If there is none, the result is empty.
            waiting: returns those that send no heartbeats now, because they wait for their agent.
        """
        clock = asyncio.get_running_loop().time
        before = clock()
        while ranks := running():
            due = min(self._changed[rank][1] for rank in ranks) + self.timeout - clock()
            await asyncio.sleep(min(max(due, _CHECK_INTERVAL), self.timeout / _CHECKS_PER_TIMEOUT))
            now = clock()
            suspended = now - before > self.timeout * _SUSPENDED_FRACTION
            excused = waiting()
            for rank, (seen, _) in self._changed.items():
                modified = self._modified(rank)
                if suspended or rank in excused:
                    self._changed[rank] = modified, now
                elif modified and modified != seen:
                    age = time.time() - modified / 1e9  # wrong if the system's clock was set
                    self._changed[rank] = modified, now - age if 0 <= age <= now - before else now
            before = now
            ages = {rank: now - self._changed[rank][1] for rank in ranks if rank in running()}
            if max(ages.values(), default=0.0) >= self.timeout:
                hung = [rank for rank in ages if ages[rank] >= self.timeout * _HUNG_FRACTION]
                return sorted(hung, key=lambda rank: -ages[rank])
        return []


def is_stopped(child: Child) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    entry = read_process(child.pid)
    return entry is not None and entry.state in _STOPPED


def describe_missing_heartbeat(child: Child, seconds: float) -> str:
    """Return a description of a worker that has sent no heartbeat for a number of seconds."""
    entry = read_process(child.pid)
    state = _STOPPED.get(entry.state) if entry is not None else None
    return f"{state}: no heartbeat for {seconds:g} s" if state else f"no heartbeat for {seconds:g} s"


async def dump_stacks_and_kill(child: Child) -> None:
    """Make a hung worker write its stacks, and kill it."""
    with contextlib.suppress(OSError, ValueError):  # a core file would contain the whole model
        resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    child.signal(signal.SIGABRT)
    child.signal(signal.SIGCONT)  # a stopped worker handles SIGABRT first
    await asyncio.wait([child.ended], timeout=_DUMP_TIMEOUT)
    child.signal(signal.SIGKILL)
    await asyncio.wait([child.ended])


def explain(symptom: str, tail: str) -> FailureCause:
    """Return why a hung worker was killed, from its symptom (no heartbeat) and the end of its output.

    A worker that waits for a collective operation is a less likely root cause than the worker that it waits for.
    """
    frames = [(match["path"], match["line"], match["function"]) for match in _frames(tail)]
    if not frames:
        return FailureCause(FailureKind.PROGRAM, symptom)
    waits = any(part in path for path, _, _ in frames for part in _WAITING_FOR_OTHERS)
    calls = [f"{function} ({path.rpartition('/')[2]}:{line})" for path, line, function in frames]
    text = f"{symptom}; it was in {', called by '.join(calls)}"
    return FailureCause(FailureKind.COMMUNICATION if waits else FailureKind.PROGRAM, shorten(text, MESSAGE_LIMIT))


def _frames(tail: str) -> list[re.Match[str]]:
    """Return the innermost frames of the thread that got the signal: the main thread, unless it blocks the signal."""
    _, found, dump = tail.rpartition(_FATAL)
    start = (_CURRENT.search(dump) or next(iter(reversed([*_THREAD.finditer(dump)])), None)) if found else None
    if start is None:
        return []
    frames: list[re.Match[str]] = []
    position = start.end()
    while len(frames) < _FRAME_LIMIT and (frame := _FRAME.match(dump, position)):
        if frame["path"].endswith(_LAUNCHER_FRAMES):
            break
        frames.append(frame)
        position = frame.end()
    return frames
