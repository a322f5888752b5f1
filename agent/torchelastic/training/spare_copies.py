"""Copies of the state on spare nodes, so that a spare can go on when no other node is left.

Rank 0 listens, and writes its address and a secret into the TCPStore of the round. A spare asks once a second for a
newer copy than its own: it sends the secret, and the token and the step of its copy. Rank 0 answers with the newest
copy in the memory of its node, as a line with its manifest and the content of the state's file; or with nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.protocol.worker import SPARE
from torchelastic.training.checkpoint_files import Manifest
from torchelastic.training.connection import run_in_thread
from torchelastic.training.process_group import connect_to_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchelastic.training.checkpoint_files import CheckpointFiles

logger = logging.getLogger(__name__)

_SERVER: Final = "torchelastic/copies"
"""The key in the TCPStore of a round with the address and the secret of the rank that sends copies."""

_LINE_LIMIT: Final = 4096
_PART: Final = 2**20
_INTERVAL: Final = 1.0
"""Seconds between two requests of a spare."""

_TIMEOUT: Final = 5.0
"""Seconds without progress after which a connection is closed."""

_TURN_TIMEOUT: Final = 60.0
"""Seconds in which the server sends copies to other spares before it answers."""

_RECEIVING: Final = threading.Lock()
"""Held by the thread that receives copies."""


class CopyServer:
    """Sends the newest copy in the memory of this node to spare nodes, one after the other.

    So at most one copy that was replaced meanwhile takes memory.

    Args:
        files: the copies.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._secret = secrets.token_hex()

    def begin(self) -> None:
        """Become the server of this round, in a thread. If that fails, spares have no copies."""
        if host := os.environ.get("MASTER_ADDR"):
            with contextlib.suppress(RuntimeError):  # no thread can be started
                run_in_thread(self._announce, host, int(os.environ["MASTER_PORT"]))

    def _announce(self, host: str, port: int) -> None:
        with contextlib.suppress(RuntimeError, OSError), self._lock:  # for example, the TCPStore has ended
            if self._listener is None:
                listener = socket.create_server(("", 0), family=socket.getaddrinfo(host, port)[0][0])
                run_in_thread(self._serve, listener)
                self._listener = listener
            own = f"{_own_address(host, port)} {self._listener.getsockname()[1]} {self._secret}"
            connect_to_store(host, port, lambda: True).set(_SERVER, own)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # for example, no file descriptor is free
                time.sleep(_INTERVAL)
                continue
            with contextlib.suppress(OSError, ValueError), connection:  # the spare has ended, or it is a stranger
                connection.settimeout(_TIMEOUT)
                try:
                    self._answer(connection)
                finally:
                    connection.shutdown(socket.SHUT_RDWR)  # a process that was forked meanwhile keeps it open

    def _answer(self, connection: socket.socket) -> None:
        secret, token, step = connection.recv(_LINE_LIMIT).split()  # a line this short arrives at once
        newest = max(self._files.checkpoints(), default=None)
        if newest is None or not hmac.compare_digest(secret, self._secret.encode()):
            return
        if (newest.token, newest.step) > (int(token), int(step)):
            with Path(f"{newest.path}.pt").open("rb") as file:
                connection.sendall(msgspec.json.encode(self._files.manifest(newest)) + b"\n")
                connection.sendfile(file)


def _own_address(host: str, port: int) -> str:
    """Return the address of this node for nodes in the network of a host; nothing is sent."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
        unconnected.connect(address)
        own: str = unconnected.getsockname()[0]
        return own


def receive_copies(address: str, files: CheckpointFiles) -> None:
    """Receive newer copies until this process is no spare of this round any more.

    Args:
        address: host:port of the round's TCPStore.
        files: where the newest copy is kept.
    """
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)

    def is_over() -> bool:
        return os.environ.get(SPARE) != address

    with _RECEIVING:  # the thread of the round before may still receive a copy
        store = None
        seen = max(((own.token, own.step) for own in files.checkpoints()), default=(0, -1))
        while not is_over():
            try:
                if store is None:
                    # If nothing listens, this fails without the stacks that torch prints.
                    with socket.create_connection(place, _TIMEOUT):
                        store = connect_to_store(*place, is_over)
                if store.check([_SERVER]):
                    seen = _receive_newer(store.get(_SERVER).decode(), files, seen, is_over)
            except RuntimeError:  # the TCPStore has ended, or its connection
                store = None
            except (OSError, msgspec.DecodeError):  # the server of copies, or the TCPStore, has ended
                pass
            time.sleep(_INTERVAL)


def _receive_newer(
    server: str, files: CheckpointFiles, seen: tuple[int, int], is_over: Callable[[], bool]
) -> tuple[int, int]:
    """Receive a copy if there is a newer one than `seen`; return its token and its step, also if it cannot be kept."""
    host, port, secret = server.split()
    with (
        socket.create_connection((host, int(port)), _TIMEOUT) as connection,
        connection.makefile("rb", buffering=0) as reader,
    ):
        connection.sendall(f"{secret} {seen[0]} {seen[1]}\n".encode())
        connection.settimeout(_TURN_TIMEOUT)
        if not (line := reader.readline(_LINE_LIMIT)):
            return seen
        connection.settimeout(_TIMEOUT)
        manifest = msgspec.json.decode(line, type=Manifest)
        try:
            files.delete_old(1, files.write_received(manifest, _parts(connection, manifest.size, is_over)), ())
        except (ConnectionError, TimeoutError):
            raise
        except (OSError, ValueError) as error:
            if files.is_new(error):
                message = "The copy of step %d is not kept on this spare node in %s: %s"
                logger.warning(message, manifest.step, files.folder, error)
        return manifest.token, manifest.step


def _parts(connection: socket.socket, size: int, is_over: Callable[[], bool]) -> Iterator[bytes]:
    while size:
        if is_over() or not (part := connection.recv(min(size, _PART))):
            raise ConnectionError("The copy has ended too early, or this process is no spare any more.")
        size -= len(part)
        yield part
