"""The first steps of a process that was forked from the fork server, up to what it was forked for.

It is forked blank: what it is to be, and with which descriptors, it is told by the agent over a socket of its own,
once the agent watches it. So it can be forked before anybody knows what for.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, Protocol

from torchelastic.agent import messages, prctl
from torchelastic.agent.store_main import StoreRole
from torchelastic.agent.title import set_title
from torchelastic.agent.worker_main import WorkerRole

if TYPE_CHECKING:
    import socket

STORE: Final = "store"
WORKER: Final = "worker"
"""What it can be for."""


class Role(Protocol):
    """What a forked process is for."""

    def play(self) -> None:
        """Be that, until the end of the process."""


def take_role(link: socket.socket, agent: int) -> Role:
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
    if message["role"] == STORE:
        return StoreRole(link=link, listener=extra[0], **payload)
    link.close()
    return WorkerRole(**payload)
