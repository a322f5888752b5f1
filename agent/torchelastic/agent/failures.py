"""The message and the kind of a worker's failure, and the exit status of an agent.

A worker writes its uncaught exception to its error file, as torch's ``@record`` does. The agent reads a limited part of
that file and of the worker's output.
"""

from __future__ import annotations

import builtins
import json
import logging
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from torchelastic.errors import NoFreePort, SettingsError, StartError, StoreError, StoreRefused
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.pod import ExitCode, TerminationMessage
from torchelastic.protocol.records import FailureKind, FailureRecord, OutcomeRecord, OutcomeState, name_of

if TYPE_CHECKING:
    from pathlib import Path

    from torchelastic.config.settings import AgentSettings

logger = logging.getLogger(__name__)

OUT_OF_MEMORY: Final = "killed by SIGKILL: out of memory"

MESSAGE_LIMIT: Final = 4096
"""Maximum length of a message in characters."""

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
"""Errors of a collective operation after another rank has failed: messages of gloo, NCCL and torch (2.8 and later)."""

_DEVICE_ERROR: Final = re.compile(r"CUDA error: |out of memory|device-side assert", re.IGNORECASE)
"""Errors of the program, even if a collective operation reports them."""

_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARY: Final = re.compile(
    r"(?:site|dist)-packages/|/lib/python3|^<"
    r"|/torch/(?:autograd|distributed|multiprocessing|nn|optim|utils|_\w+)[/.]"  # torch in its source tree
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


class FailureCause(NamedTuple):
    """The kind and the message of a failure. `final` means that the program has declared the failure non-retryable."""

    kind: FailureKind
    message: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The exit of a worker that exited by itself, or that was killed because it hung.

    Attributes:
        exit_code: its exit code, or the negative number of the signal that killed it.
        uptime: seconds from its start to its exit.
        ended: the time of the exit, on the event loop's clock.
        cause: the kind and the message of the failure; the message is empty if the exit code is 0.
    """

    local_rank: int
    rank: int
    pid: int
    exit_code: int
    uptime: float
    ended: float
    cause: FailureCause


def explain(exit_code: int, *, error_file: Path, tail: str, out_of_memory: bool) -> FailureCause:
    """Return why a worker failed, from its exit code, error file and last output, and whether memory ran out."""
    if out_of_memory:
        return FailureCause(FailureKind.PROGRAM, OUT_OF_MEMORY)
    recorded, final = _recorded_exception(error_file)
    if exception := recorded or _printed_exception(tail):
        text = exception if exit_code > 0 else f"{exception} ({describe_exit(exit_code)})"
        return FailureCause(FailureKind.PROGRAM if final else _kind(exception), shorten(text, MESSAGE_LIMIT), final)
    if exit_code in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}:  # sent by another process
        return FailureCause(FailureKind.PROGRAM, describe_exit(exit_code))
    if crash := _printed_crash(tail):
        return FailureCause(_kind(crash), shorten(f"{describe_exit(exit_code)}: {crash}", MESSAGE_LIMIT))
    lines = [line.rstrip() for line in tail.splitlines() if line.strip() and not _NATIVE_FRAME.match(line)]
    last = " | ".join(lines[-_TAIL_LINES:])
    if not last:  # the agent has not seen the output
        return FailureCause(FailureKind.UNKNOWN, describe_exit(exit_code))
    text = f"{describe_exit(exit_code)}; it last printed: {last}"
    kinds = {_kind(line) for line in lines[-_LAST_LINES:]}
    kind = FailureKind.COMMUNICATION if FailureKind.COMMUNICATION in kinds else FailureKind.PROGRAM
    return FailureCause(kind, shorten(text, MESSAGE_LIMIT))


# -- the error file


def _recorded_exception(path: Path) -> tuple[str, bool]:
    """Return the exception in an error file with its source line, or an empty string; and whether it is final."""
    try:
        with path.open("rb") as file:
            message = json.loads(file.read(_FILE_LIMIT))["message"]
        if isinstance(message, str):
            return message.strip(), False
        text, details = message["message"].strip(), message.get("extraInfo")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):  # not torch's format
        return "", False
    details = details if isinstance(details, dict) else {}
    trace = details.get("py_callstack")
    return _root(text, trace if isinstance(trace, str) else ""), details.get("final") is True


# -- the output


def _root(text: str, trace: str) -> str:
    """Return the exception that explains a traceback, with its file and line in the program.

    If a collective operation fails while the program handles another exception, return the other exception.
    """
    first, chained = _CHAINED.split(trace, 1)[0], _CHAINED.search(trace)
    if chained and _kind(text) is FailureKind.COMMUNICATION:
        found = _EXCEPTION.search(first.removeprefix(_TRACEBACK))
        if found and _kind(found["text"]) is FailureKind.PROGRAM:
            return _with_location(found["text"], first)
    return _with_location(text, trace)


def _with_location(text: str, trace: str) -> str:
    """Return the message with the innermost file and line outside of libraries."""
    frames = [(frame["path"], frame["line"]) for frame in _FRAME.finditer(trace)]
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return _at(text, *(own or frames)[-1]) if frames else text


def _at(text: str, path: str, line: str) -> str:
    name = path.rpartition("/")[2]
    return text if f"({name}, line {line})" in text else f"{text} ({name}:{line})"


def _printed_exception(tail: str) -> str:
    """Return the last exception that the interpreter has printed."""
    plain = _RANK.sub("", tail)
    _, found, last = plain.rpartition(_TRACEBACK)
    exception = _EXCEPTION.search(last) if found else None
    if exception is None:
        return ""
    start = len(plain) - len(last) - len(found)
    for chained in reversed([*_CHAINED.finditer(plain, 0, start)]):  # the exceptions to which it is chained
        if chained.end() != start:
            break
        start = plain.rfind(_TRACEBACK, 0, chained.start())
    return _root(exception["text"], plain[max(start, 0) :])


def _printed_crash(tail: str) -> str:
    """Return the message of the interpreter's fault handler or of C++'s terminate handler; empty if there is none."""
    text, position = "", len(tail)
    for fatal in _FATAL.finditer(tail):
        text, position = fatal["text"], fatal.end()
    for terminate in _TERMINATE.finditer(_RANK.sub("", tail)):
        text = f"{terminate['kind']}: {terminate['text']}"
    for frame in _FRAME.finditer(tail, position):  # the innermost first
        if not _LIBRARY.search(frame["path"]):
            return _at(text, frame["path"], frame["line"])
    return text


def _kind(text: str) -> FailureKind:
    if _DEVICE_ERROR.search(text) or not _COMMUNICATION.search(text):
        return FailureKind.PROGRAM
    return FailureKind.COMMUNICATION


def describe_exit(exit_code: int) -> str:
    """Return a description of an exit code or of the negative number of a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}"


def describe_in_log(failure: FailureRecord) -> str:
    """Describe a failure for the agent's log: its rank, node, process, exit and message."""
    process = f", process {failure.pid}" if failure.pid else ""
    end = describe_exit(failure.exit_code)
    message = failure.message or end
    how = "" if end in message else f", {end}"
    return f"rank {failure.rank} on {name_of(failure.node)} ({failure.host}){process}{how}: {message}"


def failure_of_worker(worker: WorkerExit, round: int, node: str, settings: AgentSettings) -> FailureRecord:
    """Return the failure of a worker, as its node reports it."""
    code = worker.exit_code if worker.exit_code >= 0 else 128 - worker.exit_code  # as a shell shows it
    final = worker.cause.final or code in settings.non_retryable_exit_codes
    return FailureRecord(
        round=round,
        rank=worker.rank,
        local_rank=worker.local_rank,
        node=node,
        exit_code=max(min(worker.exit_code, 255), -255),
        kind=worker.cause.kind,
        host=settings.address,
        pid=worker.pid,
        message=worker.cause.message,
        uptime=builtins.round(worker.uptime, 3),
        non_retryable=final,
        uncharged=not final and code in settings.uncharged_exit_codes,
    )


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How an agent exits: its exit code, and the termination message with the reason."""

    code: ExitCode
    message: TerminationMessage

    @classmethod
    def because(cls, code: ExitCode, reason: str, message: str, *, round: int = 0) -> ExitStatus:
        """Return the status of an agent that exits for a reason other than a failed worker."""
        return cls(code, TerminationMessage(reason=reason, message=message, round=round))

    @classmethod
    def of_error(cls, error: BaseException | None) -> ExitStatus:
        """Return the status of an agent that cannot take part; ``error`` is None if the rendezvous ended without one.

        An unreachable store and a store that refuses the agent give different exit codes.
        """
        match error:
            case SettingsError() | StartError():
                return cls.because(ExitCode.BAD_INPUT, "BadInput", f"{error}")
            case NoFreePort():
                return cls.because(ExitCode.NO_PORT, "NoPortFree", f"{error}")
            case StoreRefused():
                return cls.because(ExitCode.AGENT_ERROR, "StoreRefused", f"{error}")
            case StoreError():
                return cls.because(ExitCode.STORE_UNAVAILABLE, "StoreUnavailable", f"{error}")
        logger.error("the rendezvous failed unexpectedly", exc_info=error)
        message = "the rendezvous ended unexpectedly" if error is None else str(error) or type(error).__name__
        return cls.because(ExitCode.AGENT_ERROR, "Defect", message)

    @classmethod
    def of_run(cls, outcome: OutcomeRecord) -> ExitStatus:
        """Return the status of an agent whose run has ended."""
        if outcome.state is OutcomeState.SUCCEEDED:
            logger.info("the run has succeeded")
            return cls.because(ExitCode.SUCCEEDED, "Succeeded", "", round=outcome.round)
        reason = "WorkerFailed" if outcome.failure is not None else "TooFewNodes"
        return cls(
            ExitCode.FAILED,
            TerminationMessage(reason=reason, message=outcome.message, round=outcome.round, failure=outcome.failure),
        )
