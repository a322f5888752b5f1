"""Connections between nodes, which distinguish a dead node from an unreachable one.

Every node holds one TCP connection to the leader. When a process exits, the kernel of its host closes its connections,
so the peer notices at once; but a network can also break a connection between two healthy nodes. So the node that loses
a connection connects again (:func:`probe`). A refusal means that no process listens on the port: the peer is dead. An
answer means that the peer is alive. If there is no answer, the node's lease in the store decides.

Each side sends exactly one line of JSON: ``{"run": …, "node": …, "key": …, "stay": true}``, answered by
``{"run": …, "node": …, "key": …}``. The run is identified by a digest of its id. ``key`` is a digest of the id of the
sender that needs the key of the server, from the records of the run. Connections with other contents are closed.
A server to which a node of its run sends another key answers without ``key``: that node looks for an earlier process
with this port.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Final, TypeAlias

import msgspec

from torchelastic.connections import connection_limit, excess
from torchelastic.errors import MalformedRecord
from torchelastic.protocol.codec import decode, encode
from torchelastic.rendezvous.run_watch import cancel

LINE_LIMIT: Final = 2048
"""Maximum length of a line in bytes; a longer line closes the connection."""

DIGEST_BYTES: Final = 16

ACCEPT_DELAY: Final = 1.0
"""Seconds until connections are accepted again after the process had no free file descriptor."""

PENDING_CONNECTIONS: Final = 1024
"""Maximum number of connections that have not sent a hello; a thousand nodes may connect at once."""

HELLO_TIMEOUT: Final = 2.0
"""Seconds for the other side to send its line."""

NO_ANSWER_TIMEOUT: Final = 3
"""Seconds without an answer after which the kernel closes a connection: less than a lease of 5 s."""

PROBE_TIMEOUT: Final = 0.3
"""Seconds for a probe of a node whose connection was lost."""

FINAL_PROBE_TIMEOUT: Final = 2.0
"""Seconds after which a node that gives no answer is dead; busy hosts answer late. Callers limit them to the lease."""


class _Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    run: Annotated[str, msgspec.Meta(max_length=2 * DIGEST_BYTES)]
    node: Annotated[str, msgspec.Meta(max_length=270)]
    key: Annotated[str, msgspec.Meta(max_length=2 * DIGEST_BYTES)] = ""
    stay: bool = False


def run_digest(run: str) -> str:
    """Return the digest that identifies a run in a hello."""
    return hashlib.blake2b(run.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()


def keyed_digest(node: str, key: str) -> str:
    """Return the digest with which a node shows in a hello or an answer that it knows the server's key."""
    data = node.encode(errors="surrogatepass")
    return hashlib.blake2b(data, key=key.encode(), digest_size=DIGEST_BYTES).hexdigest()


class ProbeResult(enum.Enum):
    """The result of a probe."""

    ALIVE = "alive"
    DEAD = "dead"
    NO_ANSWER = "no answer"


ConnectionObserver: TypeAlias = Callable[[str, bool], object]
"""A function that is called with a node's id, and whether the node is now connected to this node."""


class PeerServer:
    """Answers hellos of nodes of the same run, and notifies an observer of connections; closes the listener.

    Attributes:
        observer: called when a node connects, and when its last connection is lost.
    """

    def __init__(self, *, run: str, node: str, key: str, listener: socket.socket) -> None:
        self.observer: ConnectionObserver = lambda *_: None
        self._key = key
        self._hello = _Hello(run=run_digest(run), node=node, key=keyed_digest(node, key))
        self._connections: Counter[str] = Counter()
        self._listener = listener
        self._serving: dict[socket.socket, asyncio.Task[None]] = {}
        self._pending: dict[socket.socket, str] = {}  # the addresses of connections without a hello, oldest first
        self._limit = connection_limit(PENDING_CONNECTIONS)

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def is_connected(self, node: str) -> bool:
        """Return whether the node holds a connection to this one."""
        return self._connections[node] > 0

    def start(self) -> None:
        """Start accepting connections."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Stop listening and close all connections; may be called before :meth:`start`, and more than once."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        await cancel(*self._serving.values())

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, (address, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no file descriptor is free
            loop.remove_reader(self._listener)
            loop.call_later(ACCEPT_DELAY, self.start)
            return
        if (oldest := excess(self._pending, address, self._limit)) is not None:
            self._pending.pop(oldest)
            with suppress(OSError):  # unread data would reset the connection, which means that this node is dead
                oldest.recv(LINE_LIMIT)
            self._serving[oldest].cancel()
        self._pending[connection] = address
        self._serving[connection] = task = loop.create_task(self._serve(connection))
        task.add_done_callback(lambda _: self._forget(connection))

    def _forget(self, connection: socket.socket) -> None:
        self._pending.pop(connection, None)
        del self._serving[connection]
        connection.close()  # if the task was cancelled before it started

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
        try:
            hello = await _read_hello(reader)
            if hello is None or hello.run != self._hello.run or not hello.key:
                return
            if not hmac.compare_digest(hello.key.encode(), keyed_digest(hello.node, self._key).encode()):
                writer.write(encode(msgspec.structs.replace(self._hello, key="")) + b"\n")
                return
            self._pending.pop(connection, None)
            writer.write(encode(self._hello) + b"\n")
            if hello.stay:
                await self._hold(hello.node, reader, writer)
        except OSError:
            pass  # the peer has disconnected
        finally:
            await _close(writer)

    async def _hold(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[node] += 1
        self.observer(node, True)
        try:
            await _until_lost(reader, writer)
        finally:
            self._connections[node] -= 1
            if not self._connections[node]:
                del self._connections[node]
                self.observer(node, False)


async def hold_connection(
    address: str, *, run: str, node: str, peer: str, key: str, observer: ConnectionObserver
) -> ProbeResult:
    """Hold a connection to a peer's server until it is lost; then probe the peer and return the result."""
    hello = _Hello(run=run_digest(run), node=node, key=keyed_digest(node, key), stay=True)
    result, streams = await _exchange_hellos(address, hello, peer, key)
    if streams is None:
        return result
    reader, writer = streams
    observer(peer, True)
    try:
        await _until_lost(reader, writer)
    finally:
        observer(peer, False)
        await _close(writer)
    return await probe(address, run=run, node=node, peer=peer, key=key)


async def probe(
    address: str,
    *,
    run: str,
    node: str,
    peer: str,
    key: str,
    timeout: float = PROBE_TIMEOUT,  # noqa: ASYNC109
) -> ProbeResult:
    """Connect to a peer's server; return whether the peer is alive, is dead, or does not answer in time."""
    hello = _Hello(run=run_digest(run), node=node, key=keyed_digest(node, key))
    result, streams = await _exchange_hellos(address, hello, peer, key, timeout)
    if streams is not None:
        await _close(streams[1])
    return result


async def _exchange_hellos(
    address: str,
    hello: _Hello,
    peer: str,
    key: str,
    timeout: float = HELLO_TIMEOUT,  # noqa: ASYNC109
) -> tuple[ProbeResult, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout), AsyncExitStack() as stack:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_LIMIT)
            stack.push_async_callback(_close, writer)
            writer.write(encode(hello) + b"\n")
            answer = await _read_hello(reader)
            if answer is None or answer.run != hello.run:
                return ProbeResult.NO_ANSWER, None  # the answer shows nothing about the peer
            if answer.node != peer:
                return ProbeResult.DEAD, None  # another node of this run has taken over the port
            if not hmac.compare_digest(answer.key.encode(), keyed_digest(peer, key).encode()):
                return ProbeResult.NO_ANSWER, None
            stack.pop_all()
            return ProbeResult.ALIVE, (reader, writer)
    except (ConnectionRefusedError, ConnectionResetError):
        return ProbeResult.DEAD, None
    except (OSError, TimeoutError, ValueError, OverflowError):  # the last two: an invalid address
        return ProbeResult.NO_ANSWER, None


async def _read_hello(reader: asyncio.StreamReader) -> _Hello | None:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            line = await reader.readuntil(b"\n")
        return decode(line, _Hello)
    except (MalformedRecord, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        return None


async def _until_lost(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, NO_ANSWER_TIMEOUT - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, NO_ANSWER_TIMEOUT * 1000)
        await reader.read(1)  # the peer sends nothing more: this returns when the connection is lost


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
