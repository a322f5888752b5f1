"""Saying in words why a worker ended, and how much of an explanation that is.

What a worker leaves behind (the file with its exception, the end of its output) was written by the user's program and
is not trusted: it is read within bounds, and nothing in it is followed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.contract import FailureKind, shorten

if TYPE_CHECKING:
    from pathlib import Path

MESSAGE_LIMIT: Final = 4096
"""Characters of a message."""

_FILE_LIMIT: Final = 256 << 10
_TAIL_LINES: Final = 5

_COMMUNICATION: Final = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError"
    r"|(?:gloo|nccl|c10d|TCPStore|ProcessGroup)(?s:.{0,400}?)"
    r"(?:connection (?:closed|reset|refused)|broken pipe|timed ?out|timeout|remote process exited"
    r"|unhandled system error)"
    r"|connection closed by peer|connection reset by peer|watchdog caught collective",
    re.IGNORECASE,
)
_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARY: Final = re.compile(r"(?:site|dist)-packages/|/lib/python3|^<")
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_EXCEPTION: Final = re.compile(r"^(?:\[rank\d+\]: ?)?(?P<text>[A-Za-z_][\w.]*(?:: .*)?)$")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a worker ended.

    Attributes:
        kind: how much of an explanation it is.
        message: in words.
    """

    kind: FailureKind
    message: str


def explain(exit_code: int, *, error_file: Path, tail: str, memory: bool) -> Explanation:
    """Why a worker ended that did not end with 0.

    Args:
        exit_code: what it returned, or the negative number of the signal that ended it.
        error_file: where it may have told of an exception.
        tail: the end of what it printed.
        memory: whether a process was killed for memory in its time.
    """
    told = read_error_file(error_file) or _traceback_in(tail)
    if exit_code == -signal.SIGKILL and memory:
        return Explanation(FailureKind.PROGRAM, "killed by SIGKILL: out of memory")
    if told:
        text = told if exit_code > 0 else f"{told} ({_end_of(exit_code)})"
        return Explanation(_kind(told), shorten(text, MESSAGE_LIMIT))
    if exit_code in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}:  # somebody else's doing
        return Explanation(FailureKind.PROGRAM, _end_of(exit_code))
    last = "\n".join(line.rstrip() for line in tail.splitlines() if line.strip()).splitlines()[-_TAIL_LINES:]
    text = f"{_end_of(exit_code)}; it last printed: " + " | ".join(last) if last else _end_of(exit_code)
    return Explanation(_kind(tail), shorten(text, MESSAGE_LIMIT))


def read_error_file(path: Path) -> str:
    """The exception in a file as ``@record`` writes it, with its place in the program; empty where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, opened with care
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        data = file.read(_FILE_LIMIT)
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    message = record.get("message") if isinstance(record, dict) else None
    if isinstance(message, str):
        return message.strip()
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack") if isinstance(extra, dict) else None
    return _with_place(message["message"].strip(), trace if isinstance(trace, str) else "")


def _with_place(text: str, trace: str) -> str:
    """The text with the file and line, the last ones that are not a library's."""
    frames = [(frame["path"], frame["line"]) for frame in _FRAME.finditer(trace)]
    if not frames:
        return text
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    path, line = (own or frames)[-1]
    name = path.rpartition("/")[2]
    return text if f"({name}, line {line})" in text else f"{text} ({name}:{line})"


def _traceback_in(tail: str) -> str:
    """The last exception that was printed as the interpreter prints one."""
    _, found, trace = tail.rpartition(_TRACEBACK)
    if not found:
        return ""
    for line in trace.splitlines():
        plain = re.sub(r"^\[rank\d+\]: ?", "", line)
        if not plain.startswith(" ") and (match := _EXCEPTION.match(plain)):
            return _with_place(match["text"], re.sub(r"^\[rank\d+\]: ?", "", trace, flags=re.MULTILINE))
    return ""


def _kind(text: str) -> FailureKind:
    return FailureKind.COMMUNICATION if _COMMUNICATION.search(text) else FailureKind.PROGRAM


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}"
