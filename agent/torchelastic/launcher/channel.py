"""The connection between the launcher and the agent of a host: messages in both directions, over two descriptors.

A message is a dictionary in MessagePack and content of any size. Only the launcher's own child has the other end: a
process of this machine, or ssh, which authenticates the host. Nothing else can send a message, so its content may be
unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import queue
import socket
import stat
import struct
import threading
import time
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SIZES: Final = struct.Struct(">IQ")
_HEADER_LIMIT: Final = 1 << 24
_CHUNK: Final = 64 << 20

_PING_INTERVAL: Final = 5.0

PING_TIMEOUT: Final = 30.0
"""Seconds without data after which an end that sends pings counts as lost."""


class Content(io.RawIOBase):
    """The content of a received message, as a file, so that a large object is unpickled while it arrives."""

    def __init__(self, source: io.FileIO, size: int, received: Callable[[], None]) -> None:
        self._source = source
        self._left = size
        self._received = received

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any buffer, as in io
        """Fill a buffer, as far as there is content; raise EOFError if the other end is closed."""
        view = memoryview(buffer).cast("B")[: self._left]
        done = 0
        while done < len(view):
            count = 0
            with contextlib.suppress(OSError):  # the connection is reset
                count = self._source.readinto(view[done : done + _CHUNK])
            if not count:
                raise EOFError
            self._received()
            done += count
        self._left -= done
        return done

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of the content; by default, all that is left."""
        data = bytearray(self._left if size < 0 else min(size, self._left))
        self.readinto(data)
        return bytes(data)


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
        pings: whether to send a message "ping" when nothing else is sent, so that the other end notices a broken path.
    """

    def __init__(self, source: int, target: int, *, pings: bool = False) -> None:
        self._source = source
        self._target = target
        self._interval = _PING_INTERVAL if pings else None
        self._received_at = time.monotonic()
        _open.update((source, target))
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], bytes | IO[bytes]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="torchelastic: channel", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any], content: bytes | IO[bytes] = b"") -> None:
        """Send a message with content, or with the content of an open file, which the channel then closes.

        Without effect if the other end is closed.
        """
        self._queue.put((message, content))

    def messages(self) -> Iterator[tuple[dict[str, Any], Content]]:
        """Yield the messages until the other end is closed; the content must be read before the next message.

        Raises:
            ValueError: the other end has sent something else than messages.
        """
        source = open(self._source, "rb", buffering=0, closefd=False)  # noqa: SIM115 - a descriptor
        try:
            while True:
                header, size = _SIZES.unpack(Content(source, _SIZES.size, self._received).read())
                if header > _HEADER_LIMIT:
                    raise ValueError("not a message")
                message = msgspec.msgpack.decode(Content(source, header, self._received).read())
                yield message, Content(source, size, self._received)
        except EOFError:
            pass
        finally:
            _close(self._source)

    def close(self) -> None:
        """Send what is queued, and close this end."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait until everything is sent, after :meth:`close`."""
        self._thread.join()

    def _write_all(self) -> None:
        # An error means that the other end is closed, which the reader notices.
        with contextlib.suppress(OSError), contextlib.ExitStack() as sent:
            while (item := self._next()) is not None:
                self._write_message(*item)
                sent.close()  # freeing a large file takes time, for which the message after it does not wait
                if not isinstance(item[1], bytes):
                    sent.enter_context(item[1])
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(self._target).st_mode):  # both descriptors are one socket
                with socket.socket(fileno=os.dup(self._target)) as connection:
                    connection.shutdown(socket.SHUT_WR)
        _close(self._target)

    def _next(self) -> tuple[dict[str, Any], bytes | IO[bytes]] | None:
        try:
            return self._queue.get(timeout=self._interval)
        except queue.Empty:
            return {"type": "ping"}, b""

    def _received(self) -> None:
        self._received_at = time.monotonic()

    async def silence(self) -> None:
        """Wait until the other end, which sends pings, has sent nothing for :data:`PING_TIMEOUT`."""
        left = PING_TIMEOUT
        while left > 0:
            await asyncio.sleep(left)
            left = self._received_at + PING_TIMEOUT - time.monotonic()

    def _write_message(self, message: dict[str, Any], content: bytes | IO[bytes]) -> None:
        header = msgspec.msgpack.encode(message)
        if isinstance(content, bytes):
            self._write(_SIZES.pack(len(header), len(content)) + header)
            self._write(content)
            return
        size = left = os.fstat(content.fileno()).st_size
        self._write(_SIZES.pack(len(header), size) + header)
        while left:
            left -= os.sendfile(self._target, content.fileno(), None, min(left, _CHUNK))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._target, view) :]
