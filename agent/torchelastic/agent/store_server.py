"""The process that serves an epoch's TCPStore, as the agent has it: begun, watched, and ended."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Final

from torchelastic.agent.failure import end_of
from torchelastic.agent.forked_child import STORE
from torchelastic.agent.memory_kills import OUT_OF_MEMORY
from torchelastic.agent.store_main import READY
from torchelastic.errors import StartError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from torchelastic.agent.fork_server import ForkServer
    from torchelastic.agent.memory_kills import MemoryKills
    from torchelastic.agent.processes import Child

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 2
"""A process that is killed before it serves may have been killed long before, unseen in the fork server's store."""


class StoreServer:
    """A process that serves a TCPStore.

    Args:
        child: the process.
        memory_kills: counts processes that were killed for memory.
        before: how many had been before this one began.

    Attributes:
        ended: gets the process's exit code if it ends, by itself or by :meth:`kill`.
    """

    def __init__(self, child: Child, memory_kills: MemoryKills, before: int) -> None:
        self._child = child
        self._memory_kills = memory_kills
        self._before = before
        self.ended: asyncio.Future[int] = child.ended

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def out_of_memory(self) -> bool:
        """Whether it has ended, and was killed for memory."""
        return self.ended.done() and self._memory_kills.explains(self.ended.result(), since=self._before)

    def kill(self) -> None:
        """End it, without waiting for that: the next epoch's store has a socket of its own."""
        self._child.signal(signal.SIGKILL)

    async def close(self) -> None:
        """End it, and wait until it has ended."""
        self.kill()
        await asyncio.shield(self._child.ended)


async def serve(
    listener: socket.socket,
    fork_server: ForkServer,
    memory_kills: MemoryKills,
    begun: Callable[[StoreServer], None],
) -> StoreServer:
    """Serve a TCPStore, once torch is imported.

    Args:
        listener: the socket on which it is served, listening; not closed.
        fork_server: gives the process.
        memory_kills: counts processes that were killed for memory.
        begun: is told of each process that is to serve it, before it does.

    Raises:
        StartError: it cannot be served.
    """
    for _ in range(_ATTEMPTS):
        try:
            server, serves = await _begin(listener, fork_server, memory_kills, begun)
        except OSError as error:
            raise StartError(f"the epoch's TCPStore cannot be served: {error.strerror}") from None
        if serves:
            return server
        exit_code = await asyncio.shield(server.ended)
        if exit_code >= 0:
            raise StartError(
                f"the store on port {listener.getsockname()[1]} cannot be served; what it printed says why"
            )
        end = OUT_OF_MEMORY if server.out_of_memory else end_of(exit_code)
        logger.warning("The process that was to serve the epoch's TCPStore was %s.", end)
    raise StartError(f"the process that was to serve the epoch's TCPStore was {end}")


async def _begin(
    listener: socket.socket,
    fork_server: ForkServer,
    memory_kills: MemoryKills,
    begun: Callable[[StoreServer], None],
) -> tuple[StoreServer, bool]:
    """A process that is told to serve, and whether it does; if not, it is about to end."""
    before = memory_kills.count()
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    [process] = await fork_server.fork(1)
    with process.link:
        server = StoreServer(process.child, memory_kills, before)
        begun(server)
        try:
            process.begin(STORE, {"host": local, "port": port}, (2, 2), [listener.fileno()])
            process.link.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(process.link, len(READY))
        except ConnectionError:  # it has ended, and what it was told is unread
            return server, False
        except BaseException:
            server.kill()
            raise
    return server, answer == READY
