"""Messages between the agent, the fork server and the processes that it forks.

A message is JSON in one packet of a SOCK_SEQPACKET socket, with descriptors beside it. Large content (environments)
is in a memory file, whose descriptor is sent along.
"""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL: Final = 3
"""The fork server's descriptor for its connection to the agent."""

MESSAGE_LIMIT: Final = 64 << 10
"""Bytes of one message."""

DESCRIPTOR_LIMIT: Final = 250
"""Descriptors beside one message; the kernel's limit is 253."""

WORKER: Final = "worker"
STORE: Final = "store"
"""Roles of a forked process."""

READY: Final = b"ready"
"""Sent by a process with the role STORE when it serves."""


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors.

    Raises:
        EOFError: the connection is closed.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT, DESCRIPTOR_LIMIT)
    if not data:
        raise EOFError
    return json.loads(data), descriptors


def to_memory_file(content: object) -> int:
    """A descriptor of a memory file with the content as JSON."""
    descriptor = os.memfd_create("content", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(content).encode())
    return descriptor


def from_memory_file(descriptor: int) -> Any:  # noqa: ANN401 - any JSON
    """The content of such a file; closes the descriptor."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return json.loads(file.read())
