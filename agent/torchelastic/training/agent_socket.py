"""The socket on which a worker speaks to its agent, in lines of JSON; only this user can reach it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CHANNEL: Final = "TORCHELASTIC_WORKER_CHANNEL"
"""The variable with the path of the agent's socket."""

HEARTBEAT_FILE: Final = "TORCHELASTIC_HEARTBEAT_FILE"
"""The variable with the path of the file whose modification time is the worker's last heartbeat."""

METRICS_FILE: Final = "TORCHELASTIC_METRICS_FILE"
"""The variable with the path of the file in which the worker leaves its metrics."""

LINE_LIMIT: Final = 4096
"""Bytes of a line, in either direction."""

_PATH_LIMIT: Final = 107
"""Bytes of a socket's path that the kernel takes."""

_forked = False


def is_worker() -> bool:
    """Return whether an agent has started this program, and this process is not a child of the worker."""
    if _forked or not os.environ.get(CHANNEL):
        return False
    processes = sys.modules.get("multiprocessing.process")
    return processes is None or not (
        processes.parent_process() is not None
        # While it imports the program's main module, a spawned process does not know its parent yet.
        or getattr(processes.current_process(), "_inheriting", False)
    )


def introduction() -> dict[str, Any]:
    """Return the first message of a process to its agent: its round and local rank."""
    said = {"round": os.environ.get("TORCHELASTIC_ROUND", ""), "local_rank": os.environ.get("LOCAL_RANK", "")}
    return {key: int(text) if text.isdecimal() else 0 for key, text in said.items()}


def connected(path: str, timeout: float) -> socket.socket:
    """Return a connection to the agent's socket.

    Args:
        path: of the socket.
        timeout: seconds for each operation on it; 0 never waits.

    Raises:
        OSError: the agent cannot be reached.
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
    """Yield a path to the same socket that is short enough for the kernel."""
    if len(os.fsencode(path)) <= _PATH_LIMIT:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def received(line: bytes) -> dict[str, Any]:
    """Return the message in a line; raise ValueError if it is not one."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")  # noqa: TRY004 - as with any other malformed line
    return message


def _after_fork() -> None:
    global _forked  # noqa: PLW0603 - it is the state of this process
    # The fork server may have imported this module, but has no channel: its children are workers.
    _forked = bool(os.environ.get(CHANNEL))


os.register_at_fork(after_in_child=_after_fork)
