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

from torchelastic.agent.memory_kills import OUT_OF_MEMORY
from torchelastic.contract import FailureKind, shorten
from torchelastic.rendezvous.words import name_of

if TYPE_CHECKING:
    from pathlib import Path

    from torchelastic.contract import FailureRecord

MESSAGE_LIMIT: Final = 4096
"""Characters of a message."""

_FILE_LIMIT: Final = 256 << 10
_TAIL_LINES: Final = 5
_LAST_LINES: Final = 20

_COMMUNICATION: Final = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|monitoredBarrier"
    r"|(?:gloo|nccl|c10d|TCPStore|ProcessGroup)(?s:.{0,400}?)"
    r"(?:connection (?:closed|reset|refused)|broken pipe|timed ?out|timeout|remote process exited|pair closure"
    r"|unhandled system error|communicator was aborted)"
    r"|ncclRemoteError|ncclSystemError|connection closed by peer|connection reset by peer"
    r"|watchdog (?:caught collective|got stuck)",
    re.IGNORECASE,
)
"""What a collective says that others have broken: gloo's and NCCL's words, and torch's about them, from 2.8 on."""

_OF_THE_DEVICE: Final = re.compile(r"CUDA error: |out of memory|device-side assert", re.IGNORECASE)
"""What is the program's own doing also where it is a collective that finds it."""

_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARY: Final = re.compile(
    r"(?:site|dist)-packages/|/lib/python3|^<"
    r"|/torch/(?:autograd|distributed|multiprocessing|nn|optim|utils|_\w+)[/.]"  # torch, where it was built
)
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_CHAINED: Final = re.compile(
    r"\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n"
)
_RANK: Final = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_EXCEPTION: Final = re.compile(r"^(?P<text>[A-Za-z_][\w.]*(?:: .*)?)$", re.MULTILINE)
_FATAL: Final = re.compile(r"^Fatal Python error: (?P<text>.+)$", re.MULTILINE)
_TERMINATE: Final = re.compile(
    r"^terminate called after throwing an instance of '(?:\w+::)*(?P<kind>\w+)'\n\s*what\(\): +(?P<text>.+)$",
    re.MULTILINE,
)
_NATIVE_FRAME: Final = re.compile(r"^\s*(?:\[\w+\]: ?)?frame #\d+: ")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a worker ended.

    Attributes:
        kind: how much of an explanation it is.
        message: in words.
        final: whether the program said that trying again is no use.
    """

    kind: FailureKind
    message: str
    final: bool = False


def explain(exit_code: int, *, error_file: Path, tail: str, memory: bool) -> Explanation:
    """Why a worker ended that did not end with 0.

    Args:
        exit_code: what it returned, or the negative number of the signal that ended it.
        error_file: where it may have told of an exception.
        tail: the end of what it printed.
        memory: whether a process was killed for memory in its time.
    """
    told = read_error_file(error_file) or _printed_exception(tail)
    if exit_code == -signal.SIGKILL and memory:
        return Explanation(FailureKind.PROGRAM, OUT_OF_MEMORY)
    if told:
        text = told if exit_code > 0 else f"{told} ({end_of(exit_code)})"
        final = says_final(error_file)
        return Explanation(FailureKind.PROGRAM if final else _kind(told), shorten(text, MESSAGE_LIMIT), final)
    if exit_code in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}:  # somebody else's doing
        return Explanation(FailureKind.PROGRAM, end_of(exit_code))
    if crash := _printed_crash(tail):
        return Explanation(_kind(crash), shorten(f"{end_of(exit_code)}: {crash}", MESSAGE_LIMIT))
    lines = [line.rstrip() for line in tail.splitlines() if line.strip() and not _NATIVE_FRAME.match(line)]
    last = " | ".join(lines[-_TAIL_LINES:])
    text = f"{end_of(exit_code)}; it last printed: {last}" if last else end_of(exit_code)
    kinds = {_kind(line) for line in lines[-_LAST_LINES:]}
    kind = FailureKind.COMMUNICATION if FailureKind.COMMUNICATION in kinds else FailureKind.PROGRAM
    return Explanation(kind, shorten(text, MESSAGE_LIMIT))


def read_error_file(path: Path) -> str:
    """The exception in a file as ``@record`` writes it, with its place in the program; empty where there is none."""
    message = _message_in(path)
    if isinstance(message, str):
        return message.strip()
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack") if isinstance(extra, dict) else None
    return _root(message["message"].strip(), trace if isinstance(trace, str) else "")


def says_final(path: Path) -> bool:
    """Whether the exception in such a file is one after which trying again is no use."""
    message = _message_in(path)
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return isinstance(extra, dict) and extra.get("final") is True


def _message_in(path: Path) -> object:
    """What stands in such a file as the message; None where it is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, opened with care
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(_FILE_LIMIT)
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record.get("message") if isinstance(record, dict) else None


def _root(text: str, trace: str) -> str:
    """What is to be told of an exception, with its place in the program.

    Where a program fails, and then a collective while that is dealt with, the first exception is told: the second one
    would look as if others were to blame.

    Args:
        text: the exception.
        trace: its traceback, with those of the exceptions before it.
    """
    first, chained = _CHAINED.split(trace, 1)[0], _CHAINED.search(trace)
    if chained and _kind(text) is FailureKind.COMMUNICATION:
        found = _EXCEPTION.search(first.removeprefix(_TRACEBACK))
        if found and _kind(found["text"]) is FailureKind.PROGRAM:
            return _with_place(found["text"], first)
    return _with_place(text, trace)


def _with_place(text: str, trace: str) -> str:
    """The text with the file and line, the last ones that are not a library's."""
    frames = _frames(trace)
    if not frames:
        return text
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return _at(text, *(own or frames)[-1])


def _frames(trace: str) -> list[tuple[str, str]]:
    return [(frame["path"], frame["line"]) for frame in _FRAME.finditer(trace)]


def _at(text: str, path: str, line: str) -> str:
    name = path.rpartition("/")[2]
    return text if f"({name}, line {line})" in text else f"{text} ({name}:{line})"


def _printed_exception(tail: str) -> str:
    """The last exception that was printed as the interpreter prints one."""
    plain = _RANK.sub("", tail)
    _, found, last = plain.rpartition(_TRACEBACK)
    exception = _EXCEPTION.search(last) if found else None
    if exception is None:
        return ""
    start = len(plain) - len(last) - len(found)
    for chained in reversed([*_CHAINED.finditer(plain, 0, start)]):  # what is printed before it belongs to it
        if chained.end() != start:
            break
        start = plain.rfind(_TRACEBACK, 0, chained.start())
    return _root(exception["text"], plain[max(start, 0) :])


def _printed_crash(tail: str) -> str:
    """The last words of the C++ library, or of the interpreter's fault handler; empty where there are none."""
    terminate, fatal = _last(_TERMINATE, _RANK.sub("", tail)), _last(_FATAL, tail)
    text = fatal["text"] if fatal is not None else ""
    if terminate is not None:
        text = f"{terminate['kind']}: {terminate['text']}"
    if fatal is not None:
        for path, line in _frames(tail[fatal.end() :]):  # the innermost first
            if not _LIBRARY.search(path):
                return _at(text, path, line)
    return text


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(reversed([*pattern.finditer(text)]), None)


def _kind(text: str) -> FailureKind:
    if _OF_THE_DEVICE.search(text) or not _COMMUNICATION.search(text):
        return FailureKind.PROGRAM
    return FailureKind.COMMUNICATION


def end_of(exit_code: int) -> str:
    """How a process ended: an exit code, or the negative number of a signal, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}"


def code_of(exit_code: int) -> int:
    """An exit code as a shell shows it: 128 + n where signal n, here -n, ended the process."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def in_full(failure: FailureRecord) -> str:
    """A failure in words, with where it was and how it ended, for the log of the agent whose worker it was."""
    process = f", process {failure.pid}" if failure.pid else ""
    end = end_of(failure.exit_code)
    told = failure.message or end
    how = "" if end in told else f", {end}"
    return f"rank {failure.rank} on {name_of(failure.node)} ({failure.host}){process}{how}: {told}"
