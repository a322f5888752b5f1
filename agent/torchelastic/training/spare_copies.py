"""Copies of the state on spare nodes, so that a spare can go on when no other node is left.

Rank 0 listens, and writes its address and a secret into the TCPStore of the round. A spare connects, sends the secret,
and receives the newest copy in memory, and later each copy that is the newest when the one before is received. A copy
is a line with its manifest, and the content of the state's file.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.protocol.worker import SPARE
from torchelastic.training.checkpoint_files import Manifest
from torchelastic.training.connection import run_in_thread
from torchelastic.training.process_group import connect_to_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchelastic.training.checkpoint_files import CheckpointFiles, CheckpointName

logger = logging.getLogger(__name__)

_SENDER: Final = "torchelastic/copies"
"""The key in the TCPStore of a round with the address and the secret of the rank that sends copies."""

_LINE_LIMIT: Final = 4096
_PART: Final = 2**20
_INTERVAL: Final = 1.0
"""Seconds between two looks for another sender."""

_TIMEOUT: Final = 10.0
"""Seconds without progress after which a connection is closed."""

_CONNECTIONS: Final = 16
"""The maximum number of connections; a spare that is refused tries again."""


class CopySender:
    """Sends the copies in the memory of this node to the spare nodes.

    Args:
        files: the copies.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self._condition = threading.Condition()
        self._newest: CheckpointName | None = None
        self._listener: socket.socket | None = None
        self._secret = secrets.token_hex()
        self._connections = threading.Semaphore(_CONNECTIONS)

    def begin(self) -> None:
        """Become the sender of this round."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with contextlib.suppress(RuntimeError, OSError):  # no thread or port is left, so spares have no copies
            run_in_thread(self._announce, host, port)

    def send(self, name: CheckpointName) -> None:
        """Send a new copy in the background."""
        with self._condition:
            self._newest = name
            self._condition.notify_all()

    def _announce(self, host: str, port: int) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            if self._listener is None:
                family = socket.getaddrinfo(host, port)[0][0]
                self._listener = socket.create_server(("", 0), family=family)
                run_in_thread(self._accept, self._listener)
            store = connect_to_store(host, port, lambda: True)
            store.set(_SENDER, f"{_own_address(host, port)} {self._listener.getsockname()[1]} {self._secret}")

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            while True:
                connection, _ = listener.accept()
                if self._connections.acquire(blocking=False):
                    run_in_thread(self._serve, connection)
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        sent: CheckpointName | None = None
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(_TIMEOUT)
            secret = connection.recv(len(self._secret), socket.MSG_WAITALL)
            while hmac.compare_digest(secret, self._secret.encode()):
                with self._condition:
                    while self._newest is None or self._newest == sent:
                        self._condition.wait()
                    sent = self._newest
                with contextlib.suppress(FileNotFoundError):  # it was deleted: there is a newer copy
                    self._send_copy(sent, connection)
        self._connections.release()

    def _send_copy(self, name: CheckpointName, connection: socket.socket) -> None:
        with Path(f"{name.path}.pt").open("rb") as file:
            connection.sendall(msgspec.json.encode(self._files.manifest(name)) + b"\n")
            connection.sendfile(file)


def _own_address(host: str, port: int) -> str:
    """Return the address of this node for nodes in the network of a host; nothing is sent."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
        unconnected.connect(address)
        own: str = unconnected.getsockname()[0]
        return own


def receive_copies(address: str, files: CheckpointFiles) -> None:
    """Receive copies, and keep the newest one, until this process is no spare of this round any more.

    Args:
        address: host:port of the round's TCPStore.
        files: where the copies are kept.
    """
    host, _, port = address.rpartition(":")

    def is_over() -> bool:
        return os.environ.get(SPARE) != address

    with contextlib.suppress(RuntimeError):  # the TCPStore has ended
        store = connect_to_store(host.strip("[]"), int(port), is_over)

        def sends(sender: bytes) -> bool:
            return not is_over() and store.get(_SENDER) == sender

        while not is_over():
            if store.check([_SENDER]):
                sender = store.get(_SENDER)
                _receive_from(sender.decode(), files, partial(sends, sender))
            time.sleep(_INTERVAL)


def _receive_from(sender: str, files: CheckpointFiles, sends: Callable[[], bool]) -> None:
    host, port, secret = sender.split(" ")
    with (
        contextlib.suppress(OSError, msgspec.DecodeError),  # the sender has ended
        socket.create_connection((host, int(port)), _TIMEOUT) as connection,
        connection.makefile("rb", buffering=0) as reader,
    ):
        connection.sendall(secret.encode())
        while sends():
            if not select.select([connection], [], [], _INTERVAL)[0]:
                continue
            if not (line := reader.readline(_LINE_LIMIT)):
                return
            manifest = msgspec.json.decode(line, type=Manifest)
            parts = _parts(connection, manifest.size)
            try:
                files.delete_old(1, files.write_received(manifest, parts), ())
            except (OSError, ValueError) as error:
                logger.warning("The copy of step %d is not kept on this spare node: %s", manifest.step, error)
                for _ in parts:
                    pass  # the next copy follows


def _parts(connection: socket.socket, size: int) -> Iterator[bytes]:
    while size:
        if not (part := connection.recv(min(size, _PART))):
            raise ConnectionError("its sender has ended")
        size -= len(part)
        yield part
