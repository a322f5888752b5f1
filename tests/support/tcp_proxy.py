"""A TCP proxy between a client and a server, which cuts, delays or silences connections."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS_OF_ACCEPTING: Final = 5
"""An upper bound of the iterations of the event loop from accept(2) until the task of the connection runs."""


class _Line:
    """One connection through the proxy.

    Attributes:
        flowing: cleared while no bytes are forwarded.
        writers: the writers to the client and to the server.
    """

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.writers = writers

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay: Callable[[], float]) -> None:
        """Forward the bytes that one side sends until a side closes its connection."""
        with contextlib.suppress(OSError):
            while chunk := await source.read(1 << 16):
                await asyncio.sleep(delay())
                await self.flowing.wait()
                sink.write(chunk)
                await sink.drain()
        self.cut()

    def cut(self) -> None:
        """Abort the connections to both sides."""
        for writer in self.writers:
            writer.transport.abort()
        self.flowing.set()  # so that a waiting task finds the connection closed


class TcpProxy:
    """Forwards connections from :attr:`endpoint` to the target within ``async with``.

    Args:
        target: the address of the server: host:port.

    Attributes:
        delay: seconds by which requests are delayed; answers are not delayed.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.delay = 0.0
        self._target = host, int(port)
        self._silent = False
        self._lines: set[_Line] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        # Stop accepting, and wait until each accepted connection has its task; close() would leave its socket open.
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        for _ in range(_STEPS_OF_ACCEPTING):
            await asyncio.sleep(0)
        # Tasks are not canceled, because asyncio would report that as an error.
        while self._tasks:
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)
        self._server.close()
        await self._server.wait_closed()

    @property
    def endpoint(self) -> str:
        """The address on which the proxy listens: host:port."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Abort all connections; new connections are accepted."""
        for line in tuple(self._lines):
            line.cut()

    def fall_silent(self, *, new_too: bool = True) -> None:
        """Stop forwarding on the existing connections, and optionally on new ones, but keep them open."""
        self._silent = new_too
        for line in self._lines:
            line.flowing.clear()

    def speak_again(self) -> None:
        """Forward bytes again."""
        self._silent = False
        for line in self._lines:
            line.flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        line = _Line(writer, target_writer)
        if self._silent:
            line.flowing.clear()
        self._lines.add(line)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(line.carry(reader, target_writer, lambda: self.delay))
                both.create_task(line.carry(target_reader, writer, lambda: 0.0))
        finally:
            line.cut()
            self._lines.discard(line)
