"""The connection of a worker to its agent; :mod:`torchelastic.protocol.worker` defines the messages.

A process opens one connection, when it first sends a message. Sending never blocks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from _thread import start_new_thread
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchelastic.protocol.worker import (
    LINE_LIMIT,
    RANK_IN_ROUND,
    WORKER_SOCKET,
    Hello,
    NoticeMessage,
    WorkerMessage,
    WorldMessage,
    encode_lines,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class AgentConnection:
    """The connection of this process to its agent. May be used from any thread, and from signal handlers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may send; never held while waiting
        self._socket: socket.socket | None = None
        self._read = False
        self._sees_forks = False
        self._takers: dict[type[msgspec.Struct], Callable[[Any], object]] = {}
        self._at_end: set[Callable[[], object]] = set()

    def _leave_to_parent(self) -> None:
        """Close this process's copy of its parent's connection, after a fork."""
        if self._socket is not None and self._socket.fileno() >= 0:  # in a fork of a fork, it is closed
            os.close(self._socket.detach())  # this process has no thread that reads from it

    def send(self, message: WorkerMessage) -> bool:
        """Send a message without blocking, and connect first if necessary; return whether it was sent."""
        with self._lock:
            try:
                lines = encode_lines(message)
                if self._socket is None:
                    if not self._sees_forks:
                        self._sees_forks = True
                        os.register_at_fork(after_in_child=self._leave_to_parent)
                    self._socket = connect(os.environ.get(WORKER_SOCKET, ""), 0.0)
                    lines = encode_lines(hello()) + lines
                # A message this short is sent completely or not at all.
                return bool(self._socket.send(lines, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
            except BlockingIOError:  # the agent does not read, or is stopped
                return False
            except OSError:  # the agent has closed the connection, or has exited
                self.close()
                return False

    def read(
        self, kind: type[NoticeMessage | WorldMessage], take: Callable[[Any], object], closed: Callable[[], object]
    ) -> None:
        """Pass the agent's messages of a kind to `take`, in a thread; call `closed` when the connection ends."""
        with self._lock:
            self._takers[kind] = take
            self._at_end.add(closed)
            if self._socket is not None and not self._read:
                self._read = True
                run_in_thread(self._listen, self._socket)

    def close(self) -> None:
        """Close the connection; the next message opens another one."""
        with self._lock:
            connection, self._socket, self._read = self._socket, None, False
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it
            with contextlib.suppress(OSError):  # the program has closed the descriptor
                connection.close()

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(None)  # sending stays non-blocking
            with connection.makefile("rb") as lines:
                while line := lines.readline(LINE_LIMIT):
                    message = msgspec.json.decode(line, type=NoticeMessage | WorldMessage)
                    if (take := self._takers.get(type(message))) is not None:
                        take(message)
        with self._lock:
            if self._socket is connection:
                self.close()
        for closed in [*self._at_end]:
            closed()


AGENT_CONNECTION: Final = AgentConnection()
"""The connection of this process."""


def run_in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Run a function in a thread that blocks all signals; a signal handler may call this.

    Raises:
        RuntimeError: no thread can be started, or the program is exiting.
    """
    with blocked_signals():
        start_new_thread(function, arguments)  # the locks of threading could block a signal handler


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block all signals in this thread, and in threads that it starts meanwhile: the main thread handles signals."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def hello(check_timeout: float | None = None) -> Hello:
    """Return the first message of this process to its agent."""
    values = os.environ.get("TORCHELASTIC_ROUND", ""), os.environ.get(RANK_IN_ROUND) or os.environ.get("RANK", "")
    number, rank = (int(text) if text.isdecimal() else 0 for text in values)
    return Hello(round=number, rank=rank, check_timeout=check_timeout)


def connect(path: str, timeout: float) -> socket.socket:
    """Return a connection to the agent's socket; operations on it wait for at most `timeout` seconds.

    Raises:
        OSError: the agent cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection
