"""Serving an epoch's TCPStore, in a process of its own: it outlives any single worker, and no epoch meets another's."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.agent.title import set_title

if TYPE_CHECKING:
    import socket

READY: Final = b"ready"
"""What the process says once the store serves."""


@dataclass(frozen=True, slots=True)
class StoreRole:
    """The process that serves a store.

    Attributes:
        link: a socket to the agent, which is told when the store serves.
        listener: the socket on which it serves, bound and listening.
        host: an address under which the store is reached from this machine.
        port: the listener's port.
    """

    link: socket.socket
    listener: int
    host: str
    port: int

    def play(self) -> None:
        """Serve until the process is killed."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

        _store = TCPStore(
            self.host, self.port, None, is_master=True, wait_for_workers=False, master_listen_fd=self.listener
        )
        self.link.send(READY)
        set_title(["torchelastic: store of the epoch"])
        while True:
            signal.pause()
