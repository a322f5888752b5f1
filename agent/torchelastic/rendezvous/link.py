"""Links: how a death is told from a silence.

Every node holds one TCP connection to the leader. The kernel of a host that is alive closes the connections of a
process that died, however it died, so a broken link is known at once; but so is one that the network cut between two
healthy nodes. What decides is the second look: whoever sees a link break connects again (:func:`probe`). Refused means
that nobody listens there any more: a death. Answered means alive. Silence means neither, and then the node's lease in
the store has the last word.

The protocol is one line of JSON each way, and then nothing: ``{"run": …, "node": …, "stay": true}``, answered by
``{"run": …, "node": …}``. The run is told by a digest of its id, which may be of any length. Who speaks of another run,
or anything else, is hung up on.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import hashlib
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, Self

import msgspec

from torchelastic.contract import decode, encode
from torchelastic.errors import MalformedRecord, NoPortFree

if TYPE_CHECKING:
    from types import TracebackType

    from torchelastic.settings import PortRange

LINE_LIMIT: Final = 2048
"""Bytes of a line; longer ones are hung up on."""

BACKLOG: Final = 4096
"""So many connections may wait to be accepted: of a thousand nodes that link at once, none is to be turned away.

A connection that finds no room is not refused: its client tries again a second later."""

DIGEST_BYTES: Final = 16

GREETING_TIMEOUT: Final = 2.0
"""Seconds for the other side to say its line."""

SILENCE_LIMIT: Final = 3
"""Seconds after which the kernel breaks a link whose other end it does not hear: before a lease of 5 s can end, so that
nobody has to be looked at when it does."""

SECOND_LOOK: Final = 0.3
"""Seconds for a look at a peer whose link has broken: the kernel of its host refuses another one at once."""

LAST_LOOK: Final = 2.0
"""Seconds for a look of which silence is the last word, though the link stands: a host that is gone would have broken
it, and on a busy one an answer may be late. No longer than the lease."""


class _Greeting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one line that each side says."""

    run: Annotated[str, msgspec.Meta(max_length=2 * DIGEST_BYTES)]
    node: Annotated[str, msgspec.Meta(max_length=270)]
    stay: bool = False


def run_digest(run: str) -> str:
    """What stands for a run's id in greetings."""
    return hashlib.blake2b(run.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()


class Verdict(enum.Enum):
    """What a second look at a node has shown."""

    ALIVE = "alive"
    DEAD = "dead"
    SILENT = "silent"


class LinkObserver(Protocol):
    """Who wants to know about the links that others hold to this node."""

    def link_came(self, node: str) -> None:
        """The node holds a link now."""

    def link_broke(self, node: str) -> None:
        """Its last link is gone."""


class LinkServer:
    """Answers greetings, and tells an observer who holds a link.

    An async context manager.

    Args:
        run: the run's id; links of other runs are refused.
        node: this node's id.
        host: the address on which to listen.
        observer: is told about links that come and break.
        ports: the only ones on which it may listen; None for any.

    Raises:
        NoPortFree: none of these ports is free.
    """

    def __init__(
        self, *, run: str, node: str, host: str, observer: LinkObserver, ports: PortRange | None = None
    ) -> None:
        self._greeting = _Greeting(run=run_digest(run), node=node)
        self._observer = observer
        self._links: dict[str, int] = {}
        self._listener = listen(host, ports)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()
        self._closed = False

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def holds(self, node: str) -> bool:
        """Whether the node holds a link to this one."""
        return node in self._links

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._accepted, sock=self._listener, limit=LINE_LIMIT, backlog=BACKLOG, start_serving=False
            )
            await self._server.start_serving()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Listen no more, and cut all links; also where it was never entered."""
        self._closed = True
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            # Of what it has just accepted, asyncio makes connections in the next turn; on a closed server it cannot.
            await asyncio.sleep(0)
            self._server.close()
        self._listener.close()
        # Their connections are cut, and so they end by themselves: asyncio reports a cancelled handler as a mistake.
        for transport in list(self._transports):
            transport.abort()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection, of which is known from its first moment on; it may come when the listener is closed."""
        if self._closed:
            writer.transport.abort()
            return
        self._transports.add(writer.transport)
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            greeting = await _read_greeting(reader)
            if greeting is None or greeting.run != self._greeting.run:
                return
            writer.write(encode(self._greeting) + b"\n")
            if greeting.stay:
                _break_in_silence(writer)
                await self._hold(greeting.node, reader)
        except OSError:
            pass  # the other side is gone
        finally:
            self._transports.discard(writer.transport)
            await _close(writer)

    async def _hold(self, node: str, reader: asyncio.StreamReader) -> None:
        self._links[node] = self._links.get(node, 0) + 1
        self._observer.link_came(node)
        try:
            with suppress(OSError):
                await reader.read(1)  # nothing more is ever said: this returns when the link breaks
        finally:
            self._links[node] -= 1
            if not self._links[node]:
                del self._links[node]
                self._observer.link_broke(node)


async def hold_link(address: str, *, run: str, node: str, peer: str, observer: LinkObserver) -> Verdict:
    """Hold a link to a peer until it breaks; then say, by a second look, what became of the peer.

    Args:
        address: host:port of the peer's link server.
        run: the run's id.
        node: this node's id.
        peer: the peer's id.
        observer: is told when the link stands and when it broke.
    """
    verdict, streams = await _greet(address, _Greeting(run=run_digest(run), node=node, stay=True), peer)
    if streams is None:
        return verdict
    reader, writer = streams
    _break_in_silence(writer)
    observer.link_came(peer)
    try:
        with suppress(OSError):
            await reader.read(1)
    finally:
        observer.link_broke(peer)
        await _close(writer)
    return await probe(address, run=run, node=node, peer=peer)


async def probe(address: str, *, run: str, node: str, peer: str, timeout: float = SECOND_LOOK) -> Verdict:  # noqa: ASYNC109
    """Look whether a peer is alive.

    Args:
        address: host:port of its link server.
        run: the run's id.
        node: this node's id.
        peer: the peer's id.
        timeout: seconds after which no answer is a silence.
    """
    verdict, streams = await _greet(address, _Greeting(run=run_digest(run), node=node), peer, timeout)
    if streams is not None:
        await _close(streams[1])
    return verdict


async def _greet(
    address: str,
    greeting: _Greeting,
    peer: str,
    timeout: float = GREETING_TIMEOUT,  # noqa: ASYNC109
) -> tuple[Verdict, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_LIMIT)
            try:
                writer.write(encode(greeting) + b"\n")
                answer = await _read_greeting(reader)
            except BaseException:
                await _close(writer)
                raise
    except (ConnectionRefusedError, ConnectionResetError):
        return Verdict.DEAD, None
    except (OSError, TimeoutError, ValueError, OverflowError):  # the last two where it is no address at all
        return Verdict.SILENT, None
    if answer is not None and answer.run == greeting.run and answer.node == peer:
        return Verdict.ALIVE, (reader, writer)
    await _close(writer)
    # Another node of this run has taken over the port: the peer is gone. Anything else says nothing about the peer.
    return (Verdict.DEAD if answer is not None and answer.run == greeting.run else Verdict.SILENT), None


async def _read_greeting(reader: asyncio.StreamReader) -> _Greeting | None:
    try:
        async with asyncio.timeout(GREETING_TIMEOUT):
            line = await reader.readuntil(b"\n")
        return decode(line, _Greeting)
    except (MalformedRecord, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        return None


def _break_in_silence(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):  # it is broken already, and whoever reads from it will learn so
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_LIMIT - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_LIMIT * 1000)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def listen(host: str, ports: PortRange | None = None, *, after: int = 0) -> socket.socket:
    """A listening socket on a free port of this address; of all addresses, where it is none of this machine's own.

    A pod may be known to its peers by an address that only a gateway in front of it has.

    Args:
        host: the address.
        ports: the only ports that may be taken; None for any.
        after: the port among them that is not to be taken again, and behind which the search begins, so that each of
            them rests for as long as there are others.

    Raises:
        OSError: no socket can be had.
        NoPortFree: none of these ports is free.
    """
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return _listening(info[0], info[4], ports, after)
    except OSError:
        return _listening(socket.AF_INET, ("", 0), ports, after)


def _listening(
    family: int, address: tuple[str | int, ...] | tuple[int, bytes], ports: PortRange | None, after: int
) -> socket.socket:
    if ports is None:
        return _bound(family, address)
    for port in ports.after(after):
        try:
            return _bound(family, (address[0], port, *address[2:]), again=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise NoPortFree(
        f"No port of --port-range {ports} is free on this node: give it a wider range, or see what else listens there "
        "(ss -tlnp); each agent on a host needs up to 4 of them at a time."
    )


def _bound(family: int, address: tuple[Any, ...], *, again: bool = False) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if again:  # connections of the one before may linger
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
