"""The first steps of a process that was forked from the fork server, up to what it was forked for.

It is forked blank: what it is to be, and with which descriptors, it is told by the agent over a socket of its own,
once the agent watches it. So it can be forked before anybody knows what for.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent import messages, prctl
from torchelastic.agent.title import set_title

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

STORE: Final = "store"
WORKER: Final = "worker"
"""What it can be for."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is told to be.

    Attributes:
        role: STORE or WORKER.
        payload: what it has to know for that.
        descriptors: those for its role.
    """

    role: str
    payload: Mapping[str, Any]
    descriptors: Sequence[int]


def take_order(link: socket.socket, agent: int) -> Order:
    """Become a process of its own, whose parent is the agent, and wait to be told what it is for.

    Args:
        link: the socket to the agent.
        agent: the agent's process id.
    """
    os.setsid()
    set_title(["torchelastic: spare process"])
    try:
        message, descriptors = messages.receive(link)
    except (EOFError, OSError):  # the agent is gone, or no longer wants it
        os._exit(1)
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    memory, out, err, *extra = descriptors
    payload = messages.from_memory(memory)
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return Order(message["role"], payload, extra)
