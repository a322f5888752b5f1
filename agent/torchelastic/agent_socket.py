"""The connection of a worker to its agent: a Unix socket with lines of JSON, accessible to this user only.

A process opens one connection, when it first sends a message. Sending never blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from _thread import start_new_thread
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

CHANNEL: Final = "TORCHELASTIC_WORKER_CHANNEL"
"""The environment variable with the path of the agent's socket."""

HEARTBEAT_FILE: Final = "TORCHELASTIC_HEARTBEAT_FILE"
"""The environment variable with the path of the file whose modification time is the worker's last heartbeat."""

METRICS_FILE: Final = "TORCHELASTIC_METRICS_FILE"
"""The environment variable with the path of the file to which the worker writes its metrics."""

LINE_LIMIT: Final = 4096
"""Maximum length of a line in bytes, in either direction."""

own_pid = os.getpid()
"""The id of the process that imported this module. A forked worker replaces it with its own id; other forks do not."""


def is_worker() -> bool:
    """Return whether this process is a worker of an agent; a child of a worker is not."""
    if os.getpid() != own_pid or not os.environ.get(CHANNEL):
        return False
    processes = sys.modules.get("multiprocessing.process")
    return processes is None or not (
        processes.parent_process() is not None
        # While a spawned process imports the program's main module, its parent is not set yet.
        or getattr(processes.current_process(), "_inheriting", False)
    )


class AgentConnection:
    """The connection of this process to its agent. May be used from any thread, and from signal handlers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may send; never held while waiting
        self._socket: socket.socket | None = None
        self._read = False
        self._sees_forks = False

    def _leave_to_parent(self) -> None:
        """Close this process's copy of its parent's connection, after a fork."""
        if self._socket is not None and self._socket.fileno() >= 0:  # in a fork of a fork, it is closed
            os.close(self._socket.detach())  # this process has no thread that reads from it

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message without blocking, and connect first if necessary; return whether it was sent."""
        with self._lock:
            try:
                lines = [message]
                if self._socket is None:
                    if not self._sees_forks:
                        self._sees_forks = True
                        os.register_at_fork(after_in_child=self._leave_to_parent)
                    self._socket = connect(os.environ.get(CHANNEL, ""), 0.0)
                    lines = [introduction(), message]
                # A message this short is sent completely or not at all.
                return bool(self._socket.send(encode_lines(*lines), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
            except BlockingIOError:  # the agent does not read, or is stopped
                return False
            except OSError:  # the agent has closed the connection, or has exited
                self.close()
                return False

    def read(self, take: Callable[[dict[str, Any]], object], closed: Callable[[], object]) -> None:
        """Start a thread that passes the agent's messages to `take`, and calls `closed` when the connection ends."""
        with self._lock:
            if self._socket is not None and not self._read:
                self._read = True
                run_in_thread(self._listen, self._socket, take, closed)

    def close(self) -> None:
        """Close the connection; the next message opens another one."""
        with self._lock:
            connection, self._socket, self._read = self._socket, None, False
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it
            with contextlib.suppress(OSError):  # the program has closed the descriptor
                connection.close()

    def _listen(
        self, connection: socket.socket, take: Callable[[dict[str, Any]], object], closed: Callable[[], object]
    ) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            connection.settimeout(None)  # sending stays non-blocking
            with connection.makefile("rb") as lines:
                while line := lines.readline(LINE_LIMIT):
                    take(decode_line(line))
        with self._lock:
            if self._socket is connection:
                self.close()
        closed()


AGENT: Final = AgentConnection()
"""The connection of this process."""


def run_in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Run a function in a thread that blocks all signals; a signal handler may call this.

    Raises:
        RuntimeError: no thread can be started, or the program is exiting.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        start_new_thread(function, arguments)  # the locks of threading could block a signal handler
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def introduction() -> dict[str, Any]:
    """Return the first message of a process to its agent: its round and rank."""
    values = {"round": os.environ.get("TORCHELASTIC_ROUND", ""), "rank": os.environ.get("RANK", "")}
    return {key: int(text) if text.isdecimal() else 0 for key, text in values.items()}


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


def encode_lines(*messages: dict[str, Any]) -> bytes:
    """Return messages as lines of JSON."""
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def decode_line(line: bytes) -> dict[str, Any]:
    """Return the message in a line; raise ValueError if the line is not a message."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")  # noqa: TRY004 - as with any other malformed line
    return message
