"""What a program that runs as a worker can tell its agent, and ask of it; all of it is up to the program.

* :func:`heartbeat` says that the worker makes progress. A program that is not Python touches the file named by
  ``TORCHELASTIC_HEARTBEAT_FILE`` instead; the variable is there where ``--heartbeat-timeout`` is given.
* :func:`ask_for_notice` asks for time to save before the epoch changes as planned (somebody joins or leaves, or the
  size is changed); :func:`notice` and :func:`saved` are the rest of it. Who does not ask is ended at once.
* :func:`epoch_stands` says, before a checkpoint is committed, whether this worker's epoch is still the present one.
* :class:`NonRetryableException` ends the whole run, whatever restarts are left.

How far training is, it tells with what is in :mod:`torchelastic.progress`.

Where no agent has started the program, there is nobody to tell and nothing to come: then all of it does nothing.

A worker is one process. What it starts by forking, or by :mod:`multiprocessing`, does not answer for it: there only
:func:`epoch_stands` does anything. A program that a worker *executes* speaks for it, as one that a shell script starts.

The agent is spoken to over a UNIX socket that only this user can reach, in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

__all__ = ["NonRetryableException", "Notice", "ask_for_notice", "epoch_stands", "heartbeat", "notice", "saved"]

CHANNEL: Final = "TORCHELASTIC_WORKER_CHANNEL"
"""The variable with the path of the agent's socket."""

HEARTBEAT_FILE: Final = "TORCHELASTIC_HEARTBEAT_FILE"
"""The variable with the path of the file whose time of change is the worker's last heartbeat."""

METRICS_FILE: Final = "TORCHELASTIC_METRICS_FILE"
"""The variable with the path of the file in which the worker leaves what it measures, where its agent shows that."""

LINE_LIMIT: Final = 4096
"""Bytes of a line, in either direction."""

_PATH_LIMIT: Final = 107
"""Bytes of a socket's path that the kernel takes."""

_LONGEST: Final = 1e6
"""Seconds that may be asked for; whatever is, the agent has bounds of its own."""

_PATIENCE: Final = 5.0
"""Seconds for which the agent is waited for where its answer is not."""


class NonRetryableException(Exception):  # noqa: N818 - the name that torchelastic's users know
    """Raised by a program that would only fail again: the run fails with it, and is not restarted.

    A program's own exceptions may derive from it. What counts is the exception that ends the worker.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Have the agent told if this is what ends the program, however the program was started."""
        _watch_for_the_end()
        return super().__new__(cls, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Notice:
    """That the epoch is about to change, and the workers of it to be ended.

    Attributes:
        reason: why, in one word: ``node_joined``, ``node_left`` or ``resized``.
        cause: the same in a sentence.
        deadline: when the epoch ends at the latest, by :func:`time.monotonic`.
    """

    reason: str
    cause: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 where it is over."""
        return max(self.deadline - time.monotonic(), 0.0)


def heartbeat() -> None:
    """Say that this worker makes progress; cheap enough for every step.

    Once ``--heartbeat-timeout`` is given, a worker that has not said so for that time, or not since its start, counts
    as hung. It is ended, which is a failure that tells where it hung.
    """
    _here.beat()


def ask_for_notice(seconds: float = 30.0, callback: Callable[[Notice], object] | None = None) -> None:
    """Ask for time to save before a planned change of the epoch.

    It is asked for until the worker ends; asking again changes what is asked for. The agent's ``--notice`` bounds it.
    When this returns, the agent knows.

    Args:
        seconds: how long the change waits for this worker at most; 0 takes the question back.
        callback: called with the notice, in a thread of its own, when there is one; where it returns or raises, this
            worker has answered. None for a program that polls :func:`notice` and answers with :func:`saved`.

    Raises:
        ValueError: the seconds are no such time.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be a time of 0 or more, and not {seconds}")
    _here.ask(seconds, callback)


def notice() -> Notice | None:
    """The notice that this worker has asked for and not answered yet; None where there is none. Cheap enough to poll.

    None again where the change was called off.
    """
    return _here.notice()


def saved() -> None:
    """Answer the notice that :func:`notice` gave last: as far as this worker is concerned, the epoch may change now."""
    _here.saved()


def epoch_stands(timeout: float = 5.0) -> bool:
    """Whether the epoch that this process belongs to is still the present one, to be asked before a commit.

    The agent reads it afresh from where the nodes meet; where that cannot be reached, it goes by what it knows. It is
    no lock: the epoch may end right after the answer, so what is committed must bear to be committed twice.

    Args:
        timeout: seconds to wait for an answer at most.

    Returns:
        False also where no answer comes: whoever is cut off from its agent must not commit anything. True where no
        agent has started the program.
    """
    path = os.environ.get(CHANNEL)
    if not path:
        return True
    try:
        with connected(path, timeout) as connection, connection.makefile("rb") as lines:
            # The agent is to answer a moment before it is waited for no more.
            _send(connection, {**introduction(), "stands": 0.8 * min(timeout, _LONGEST)})
            return _received(lines.readline(LINE_LIMIT)).get("stands") is True
    except (OSError, ValueError):
        return False


def is_worker() -> bool:
    """Whether an agent has started this program, and this process is none that it has forked for itself."""
    return bool(os.environ.get(CHANNEL)) and _here.is_the_worker()


class _Here:
    """This process as a worker: what it has asked for, and what it was told."""

    def __init__(self) -> None:
        self._begin(forked=False)

    def after_fork(self) -> None:
        """Begin anew in a child; that of a worker is none."""
        connection = self._connection
        # The fork server may have this module imported, but has no channel: its children are workers.
        self._begin(forked=bool(os.environ.get(CHANNEL)))
        if connection is not None:
            os.close(connection.detach())  # also where the thread that reads it, and is not here, holds on to it

    def _begin(self, *, forked: bool) -> None:
        self._forked = forked
        self._lock = threading.RLock()  # entered anew by a signal handler that answers
        self._heartbeat_file: str | None = None
        self._connection: socket.socket | None = None
        self._callback: Callable[[Notice], object] | None = None
        self._heard = threading.Event()
        self._signals: set[int] = set()
        self._standing: tuple[int, Notice] | None = None
        self._shown = 0
        self._answered = 0

    def beat(self) -> None:
        if self._heartbeat_file is None:
            self._heartbeat_file = os.environ.get(HEARTBEAT_FILE, "") if self.is_the_worker() else ""
        if self._heartbeat_file:
            with contextlib.suppress(OSError):
                os.utime(self._heartbeat_file)

    def ask(self, seconds: float, callback: Callable[[Notice], object] | None) -> None:
        path = os.environ.get(CHANNEL)
        if not path or not self.is_the_worker():
            return
        with self._lock:
            self._callback = callback
            if self._connection is None:
                self._connect(path)
            if self._connection is None:
                return
            heard = self._heard = threading.Event()
            self._say({"ask": min(seconds, _LONGEST)})
        heard.wait(_PATIENCE)

    def notice(self) -> Notice | None:
        standing = self._standing
        if standing is None:
            return None
        self._shown, told = standing
        return told

    def saved(self) -> None:
        self._answer(self._shown)

    def is_the_worker(self) -> bool:
        """Whether this process may be the worker, and is none that it has forked or had multiprocessing start."""
        if self._forked:
            return False
        processes = sys.modules.get("multiprocessing.process")
        return processes is None or not (
            processes.parent_process() is not None
            # While it imports the program's main module, a process that was spawned does not know its parent yet.
            or getattr(processes.current_process(), "_inheriting", False)
        )

    def _connect(self, path: str) -> None:
        try:
            connection = connected(path, _PATIENCE)
            _send(connection, introduction())
        except OSError:  # the agent is gone, and this process is soon
            return
        connection.settimeout(None)
        self._connection = connection
        # The program's signals are its own: none is to be taken by a thread that it does not know of.
        self._signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _run_beside("torchelastic: notices", self._listen, connection)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)

    def _say(self, message: dict[str, Any]) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                _send(self._connection, message)

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError), connection, connection.makefile("rb") as lines:
            while line := lines.readline(LINE_LIMIT):
                self._take(_received(line))
        with self._lock:  # the agent has hung up: nothing more will come, and nothing is owed
            if self._connection is connection:
                self._connection = self._standing = None
                self._heard.set()

    def _take(self, message: dict[str, Any]) -> None:
        if "heard" in message:
            self._heard.set()
            return
        number, seconds = int(message["notice"]), float(message["seconds"])
        with self._lock:
            if seconds == 0:
                self._standing = None
                return
            if number <= self._answered:
                return
            known = self._standing is not None and self._standing[0] == number
            told = Notice(str(message["reason"]), str(message["cause"]), time.monotonic() + seconds)
            self._standing = number, told
            callback = self._callback
        if callback is not None and not known:
            _run_beside("torchelastic: notice", self._call, callback, number, told)

    def _call(self, callback: Callable[[Notice], object], number: int, told: Notice) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)  # what the callback starts gets the program's
        try:
            callback(told)
        finally:
            self._answer(number)

    def _answer(self, number: int) -> None:
        with self._lock:
            if self._standing is not None and self._standing[0] == number:
                self._standing = None
                self._answered = number
                self._say({"saved": number})


_here: Final = _Here()
os.register_at_fork(after_in_child=_here.after_fork)


def _run_beside(name: str, doing: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=doing, args=arguments, name=name, daemon=True).start()


def introduction() -> dict[str, Any]:
    """What a process says of itself to its agent first."""
    said = {"epoch": os.environ.get("TORCHELASTIC_EPOCH", ""), "local_rank": os.environ.get("LOCAL_RANK", "")}
    return {key: int(text) if text.isdecimal() else 0 for key, text in said.items()}


def connected(path: str, timeout: float) -> socket.socket:
    """A connection to the agent.

    Args:
        path: of its socket.
        timeout: seconds for which anything may take on it; 0 where nothing is waited for.

    Raises:
        OSError: there is none to be had.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        with short_path(path) as reachable:
            connection.connect(reachable)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """A path to the same socket that is short enough for the kernel, wherever the user's temporary files are."""
    if len(os.fsencode(path)) <= _PATH_LIMIT:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _received(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")  # noqa: TRY004 - as with any other line that is none
    return message


def _watch_for_the_end() -> None:
    """Have the interpreter's last word on an exception also go to the agent; once, and beside what the program set."""
    if isinstance(getattr(sys.excepthook, "__self__", None), _LastWord) or not os.environ.get(CHANNEL):
        return
    sys.excepthook = _LastWord(sys.excepthook).tell


class _LastWord:
    """What is done with the exception that ends the program: the agent is told of it, and all else is as before."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from torchelastic.agent import error_file

        if isinstance(error, NonRetryableException):
            error_file.write(error)
        self._before(kind, error, trace)
