"""Ending a worker that hangs, and saying where it did.

A Python program that is sent SIGABRT writes its stacks to its standard error first: the agent starts workers with
``PYTHONFAULTHANDLER=1`` where heartbeats are expected. That needs no thread of the program to be able to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.agent.failure import MESSAGE_LIMIT, Explanation
from torchelastic.contract import FailureKind, shorten

if TYPE_CHECKING:
    from torchelastic.agent.processes import Child

VARIABLES: Final = {"PYTHONFAULTHANDLER": "1"}
"""What workers have in their environment so that they can tell where they hang."""

ENDS: Final = (-signal.SIGABRT, -signal.SIGKILL)
"""Exit codes of a worker that was ended because it hung."""

_MOMENT: Final = 2.0
"""Seconds that a worker has to write its stacks."""

_FRAME_LIMIT: Final = 8

_FATAL: Final = "Fatal Python error: Aborted"
_CURRENT: Final = re.compile(r"^Current thread [^\n]*\(most recent call first\):\n", re.MULTILINE)
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) [^\n]*\(most recent call first\):\n", re.MULTILINE)
_FRAME: Final = re.compile(r'  File "(?P<path>[^"\n]*)", line (?P<line>\d+) in (?P<function>[^\n]+)\n')
_BELOW_THE_PROGRAM: Final = ("/torchelastic/agent/run_program.py", "<frozen runpy>")
"""What has the program run, as the interpreter or the fork server starts it."""

_WAITING_FOR_OTHERS: Final = ("/torch/distributed/", "/torch/autograd/graph.py")
"""Where a worker is that waits in a collective, or in the backward pass, which has collectives in it."""


@dataclass(frozen=True, slots=True)
class Hang:
    """That a worker hangs.

    Attributes:
        seconds: for so long it gave no sign of life.
        state: in which the kernel has it, if that says more: "stopped (SIGSTOP)"; else empty.
    """

    seconds: float
    state: str


def hang_of(child: Child, seconds: float) -> Hang:
    """What is known of a worker that hangs, while it does.

    Args:
        child: its process.
        seconds: for so long it gave no sign of life.
    """
    return Hang(seconds, {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger"}.get(_state(child.pid), ""))


async def end(child: Child, hang: Hang) -> None:
    """End the worker, with its stacks where it can write them."""
    if not hang.state:
        with contextlib.suppress(OSError, ValueError):  # a core file of a whole model is nobody's wish
            resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
        child.signal(signal.SIGABRT)
        await asyncio.wait([child.ended], timeout=_MOMENT)
    child.signal(signal.SIGKILL)
    await asyncio.wait([child.ended])


def explain(hang: Hang, tail: str) -> Explanation:
    """Why the worker was ended.

    A worker that waits for others in a collective is less of an explanation than one that keeps them waiting.

    Args:
        hang: what is known of it.
        tail: the end of what it printed.
    """
    silence = f"no heartbeat for {hang.seconds:g} s"
    if hang.state:
        return Explanation(FailureKind.PROGRAM, f"{hang.state}: {silence}")
    frames = [(match["path"], match["line"], match["function"]) for match in _frames(tail)]
    if not frames:
        return Explanation(FailureKind.PROGRAM, silence)
    waits = any(part in path for path, _, _ in frames for part in _WAITING_FOR_OTHERS)
    places = [f"{function} ({path.rpartition('/')[2]}:{line})" for path, line, function in frames]
    text = f"{silence}; it was in {', called by '.join(places)}"
    return Explanation(FailureKind.COMMUNICATION if waits else FailureKind.PROGRAM, shorten(text, MESSAGE_LIMIT))


def _frames(tail: str) -> list[re.Match[str]]:
    """The innermost frames of the thread that got the signal, which is the main one unless that blocks it."""
    _, found, dump = tail.rpartition(_FATAL)
    if not found:
        return []
    start = _CURRENT.search(dump) or next(iter(reversed([*_THREAD.finditer(dump)])), None)
    if start is None:
        return []
    frames: list[re.Match[str]] = []
    position = start.end()
    while len(frames) < _FRAME_LIMIT and (frame := _FRAME.match(dump, position)):
        if frame["path"].endswith(_BELOW_THE_PROGRAM):
            break
        frames.append(frame)
        position = frame.end()
    return frames


def _state(pid: int) -> str:
    """The letter by which the kernel tells what a process does; empty where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[text.rindex(")") + 2 :][:1]
