"""The connection between the launcher and the agent of a host: messages in both directions, over two descriptors.

A message is a dictionary in MessagePack and content of any size. Only the launcher's own child has the other end: a
process of this machine, or ssh, which authenticates the host. Nothing else can send a message, so its content may be
unpickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import struct
import threading
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

_SIZES: Final = struct.Struct(">IQ")
_CHUNK: Final = 1 << 20


_open: Final[set[int]] = set()


def _close_inherited() -> None:
    """Close the descriptors of all channels in a forked child, which would keep the nodes alive after the launcher."""
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_inherited)


def _close(descriptor: int) -> None:
    _open.discard(descriptor)
    os.close(descriptor)


class Channel:
    """One end of the connection; a thread writes the messages in order.

    Args:
        source: the descriptor to read from; the channel closes both.
        target: the descriptor to write to.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        _open.update((source, target))
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], bytes | Path] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="torchelastic: channel", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any], content: bytes | Path = b"") -> None:
        """Send a message with content, or with the content of a file, which is then removed.

        Without effect if the other end is closed.
        """
        self._queue.put((message, content))

    def receive(self) -> tuple[dict[str, Any], bytearray]:
        """Wait for a message; raise EOFError once if the other end is closed."""
        header, content = _SIZES.unpack(self._read(_SIZES.size))
        return cast("dict[str, Any]", msgspec.msgpack.decode(self._read(header))), self._read(content)

    def close(self) -> None:
        """Send what is queued, and close this end."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait until everything is sent, after :meth:`close`."""
        self._thread.join()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = os.readv(self._source, [view[: 64 * _CHUNK]])
            except OSError:
                count = 0
            if not count:
                _close(self._source)
                raise EOFError
            view = view[count:]
        return data

    def _write_all(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed, which the reader notices
            while (item := self._queue.get()) is not None:
                self._write_message(*item)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(self._target).st_mode):  # both descriptors are one socket
                with socket.socket(fileno=os.dup(self._target)) as connection:
                    connection.shutdown(socket.SHUT_WR)
        _close(self._target)

    def _write_message(self, message: dict[str, Any], content: bytes | Path) -> None:
        header = msgspec.msgpack.encode(message)
        if isinstance(content, bytes):
            self._write(_SIZES.pack(len(header), len(content)) + header)
            self._write(content)
            return
        with content.open("rb") as file:
            size = left = os.fstat(file.fileno()).st_size
            self._write(_SIZES.pack(len(header), size) + header)
            while left:
                left -= os.sendfile(self._target, file.fileno(), None, min(left, 64 * _CHUNK))
        content.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._target, view) :]
