"""What the agent and its fork server say to each other: small JSON messages, each with descriptors beside it.

One message is one packet of a SOCK_SEQPACKET socket, so none is ever cut. What may be large (environments) is in a
file in memory whose descriptor goes along.
"""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL: Final = 3
"""The descriptor by which the fork server knows its connection to the agent."""

MESSAGE_LIMIT: Final = 64 << 10
"""Bytes of one message."""

DESCRIPTOR_LIMIT: Final = 250
"""Descriptors beside one message; the kernel's own limit is 253."""


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    socket.send_fds(connection, [encode(message)], list(descriptors))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors.

    Raises:
        EOFError: the other side is gone.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT, DESCRIPTOR_LIMIT)
    if not data:
        raise EOFError
    return decode(data), descriptors


def encode(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    return json.dumps(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A message from its bytes."""
    message: dict[str, Any] = json.loads(data)
    return message


def in_memory(payload: object) -> int:
    """A descriptor of a file in memory that holds the payload as JSON."""
    descriptor = os.memfd_create("payload", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(payload).encode())
    return descriptor


def from_memory(descriptor: int) -> Any:  # noqa: ANN401 - whatever was put there
    """What :func:`in_memory` put there; the descriptor is closed."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return json.loads(file.read())
