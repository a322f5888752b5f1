"""The job's etcd as a process: started on free ports, started again with its data when it dies, ended with the run.

It is a real etcd with one member that listens on the loopback interface only. Its data are thrown away at the end, so
it need not wait for the disk (``--unsafe-no-fsync``). That it serves is told by etcd itself, as to systemd: a datagram
``READY=1`` on the socket named by $NOTIFY_SOCKET. Nothing polls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import BadInput
from elastic_operator.local.tether import tethered
from elastic_operator.model import EtcdState, JobEvent
from elastic_operator.names import LocalReason

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_READY_TIMEOUT: Final = 30.0
_FIRST_ATTEMPTS: Final = 3
_LONGEST_DELAY: Final = 5.0
_PORTS: Final = range(20_000, 30_000)
"""Below the range from which the kernel takes the ports of outgoing connections: there, a client that tries to reach a
dead etcd could take its port, or even connect to itself."""


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to run an etcd.

    Attributes:
        binary: the program.
        data: folder of its data; removed at the end.
        log: file that gets what it says.
        environ: its environment; variables with which etcd would be configured are left out.
    """

    binary: Path
    data: Path
    log: Path
    environ: Mapping[str, str]


class EtcdProcess:
    """One etcd, kept running for as long as :meth:`run` does.

    Attributes:
        state: where it stands.
        pid: of the process; None while there is none.
        port: on which it serves clients; 0 before the first start, and when it is not to run any more.
        restarts: how often it was started again.
        ready: set while it serves.
    """

    def __init__(
        self, settings: EtcdSettings, *, changed: Callable[[], None], tell: Callable[[JobEvent], None]
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._tell = tell
        self._peer_port = 0
        self.state = EtcdState.ABSENT
        self.pid: int | None = None
        self.port = 0
        self.restarts = 0
        self.ready = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """host:port for clients; empty where it has none."""
        return f"127.0.0.1:{self.port}" if self.port else ""

    async def run(self) -> None:
        """Start it, and again whenever it dies; end it when this is cancelled.

        Raises:
            BadInput: it cannot be started at all.
        """
        try:
            await self._start_first()
            delay = 0.0
            while True:
                # A port that something else took meanwhile, a full disk: both can pass.
                await asyncio.sleep(delay)
                self.restarts += 1
                async with self._process() as (process, notifications):
                    if await self._serves(process, notifications):
                        delay = 0.0
                        self._tell(JobEvent(LocalReason.ETCD_RESTARTED, f"etcd serves again (process {process.pid})"))
                        await self._until_it_dies(process)
                    else:
                        delay = min(max(0.5, delay * 2), _LONGEST_DELAY)
        finally:
            self.state = EtcdState.ABSENT
            self.port = 0
            shutil.rmtree(self._settings.data, ignore_errors=True)
            self._changed()

    async def _start_first(self) -> None:
        """The first start: the ports may turn out to be taken, then others are tried. Returns when it has died."""
        for _ in range(_FIRST_ATTEMPTS):
            self.port, self._peer_port = free_ports(2)
            async with self._process() as (process, notifications):
                if await self._serves(process, notifications):
                    await self._until_it_dies(process)
                    return
            shutil.rmtree(self._settings.data, ignore_errors=True)
        raise BadInput(
            f"{self._settings.binary} ended before it served; its last words: {self._last_words()}. "
            f"Its log is {self._settings.log}"
        )

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[Process, socket.socket]]:
        """A process that is dead when the block ends, and the socket on which it says that it serves."""
        self.state = EtcdState.STARTING
        self._changed()
        with _notification_socket() as (notifications, address):
            environ = {name: value for name, value in self._settings.environ.items() if not _configures_etcd(name)}
            with self._settings.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *tethered(self._command()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ | {"NOTIFY_SOCKET": address},
                    start_new_session=True,
                )
            self.pid = process.pid
            try:
                yield process, notifications
            finally:
                self.ready.clear()
                self.pid = None
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def _serves(self, process: Process, notifications: socket.socket) -> bool:
        """Wait until it serves; False where it ended before, or took too long."""
        dead = asyncio.ensure_future(process.wait())
        told = asyncio.ensure_future(_told_ready(notifications))
        try:
            await asyncio.wait((dead, told), timeout=_READY_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if not told.done() or process.returncode is not None:
                return False
        finally:
            dead.cancel()
            told.cancel()
        self.state = EtcdState.READY
        self.ready.set()
        self._changed()
        return True

    async def _until_it_dies(self, process: Process) -> None:
        code = await process.wait()
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        self._tell(
            JobEvent(
                LocalReason.ETCD_DIED,
                f"etcd (process {process.pid}) {how}; it is started again, and training goes on meanwhile",
                warning=True,
            )
        )

    def _command(self) -> Sequence[str]:
        settings = self._settings
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        return (
            *(str(settings.binary), "--name=local", f"--data-dir={settings.data}"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=local={peer}", "--unsafe-no-fsync"),
            # There is nobody to be elected but itself, so a start need not wait a second for others to speak.
            *("--heartbeat-interval=20", "--election-timeout=200"),
            *("--logger=zap", "--log-level=warn", f"--log-outputs={settings.log}"),
        )

    def _last_words(self) -> str:
        try:
            lines = self._settings.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:500] if lines else "none"


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of the loopback interface that nothing listens on now, all different.

    Raises:
        BadInput: too few are free.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(_PORTS, 1000):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return tuple(found)
    raise BadInput(f"no ports between {_PORTS.start} and {_PORTS.stop} of 127.0.0.1 are free for etcd")


def _configures_etcd(variable: str) -> bool:
    return variable.startswith("ETCD_") and variable != "ETCD_UNSUPPORTED_ARCH"


@contextlib.contextmanager
def _notification_socket() -> Iterator[tuple[socket.socket, str]]:
    """A datagram socket in the abstract namespace, which leaves no file behind, and its name for $NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        notifications.setblocking(False)
        notifications.bind("")  # the kernel chooses a name, which begins with a NUL; here that is written as @
        yield notifications, "@" + notifications.getsockname()[1:].decode()


async def _told_ready(notifications: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while b"READY=1" not in await loop.sock_recv(notifications, 4096):
        pass
