"""The etcd of a benchmark: a real etcd with one member and without data.

Like the etcd of ``elasticjob run``, this etcd does not wait for the disk (``--unsafe-no-fsync``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_operator.certificates import write_certificates
from elastic_operator.local.processes import EtcdProcess, find_etcd
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect, follow
from torchelastic.store.etcd_process import tls_flags

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.support.processes import ProcessTree
    from torchelastic.agent.workers.processes import Child


_START_LIMIT: Final = 30.0
_KEYS: Final = "/benchmark/wake/"
_ROUNDS: Final = 20
_LEASE: Final = 60.0


async def choose_etcd(named: Path | None = None) -> Path:
    """Return the named etcd binary, or the newest in the test bed's cache, or the one that ``elasticjob run`` uses.

    Raises:
        BadInput: there is no usable binary.
    """
    if named is not None:
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "elastic-operator" / "bin"
    kept = sorted(cache.glob("etcd-v*/etcd"), key=_version)
    return kept[-1] if kept else find_etcd(os.environ.get("PATH"))


@contextlib.asynccontextmanager
async def etcd_serving(binary: Path) -> AsyncIterator[EtcdProcess]:
    """Run an etcd within the block.

    Raises:
        BadInput: the etcd cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-etcd-") as folder:
        process = EtcdProcess(binary, Path(folder), os.environ, changed=lambda: None, emit=lambda _: None)
        running = asyncio.create_task(process.run())
        ready = asyncio.create_task(process.ready.wait())
        try:
            await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            yield process
        finally:
            running.cancel()
            ready.cancel()
            await asyncio.gather(running, ready, return_exceptions=True)


class BreakableEtcd:
    """An etcd that a benchmark can kill, pause and empty, or run in another network.

    Args:
        processes: the tree in which etcd is started, with a folder for its data.
        binary: the etcd binary.
        ports: the ports for clients and for peers.
        host: the address on which etcd listens.
        inside: a prefix of the command that runs etcd in another network.
        tls: whether clients need a certificate, as at the etcd that the operator creates for a job.

    Attributes:
        certificates: the folder with the certificates; None without TLS.
    """

    def __init__(
        self,
        processes: ProcessTree,
        binary: Path,
        ports: Sequence[int],
        *,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
        tls: bool = False,
    ) -> None:
        self.certificates = processes.folder / "tls" if tls else None
        if self.certificates is not None:
            write_certificates(self.certificates, "benchmark", host)
        self._processes = processes
        self._binary = binary
        self._client, self._peer = (f"{host}:{port}" for port in ports)
        self._inside = inside
        self._data = processes.folder / "etcd"
        self._child: Child | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return self._client

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            RuntimeError: etcd does not run.
        """
        if self._child is None:
            raise RuntimeError("etcd does not run")
        return self._child.pid

    async def start(self) -> None:
        """Start etcd with its existing data, if any, and wait until it serves."""
        address = self._processes.folder / "etcd-ready"
        clients = f"{'http' if self.certificates is None else 'https'}://{self._client}"
        command = [
            *self._inside,
            *(str(self._binary), "--name=local", f"--data-dir={self._data}"),
            *(f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"),
            *(() if self.certificates is None else tls_flags(f"{self.certificates}")),
            *(f"--listen-peer-urls=http://{self._peer}", f"--initial-advertise-peer-urls=http://{self._peer}"),
            *(f"--initial-cluster=local=http://{self._peer}", "--unsafe-no-fsync", "--log-level=warn"),
            *("--heartbeat-interval=10", "--election-timeout=100"),
        ]
        log = self._processes.folder / "etcd.log"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.setblocking(False)
            ready.bind(str(address))
            try:
                self._child = self._processes.start(command, log, {"NOTIFY_SOCKET": str(address)})
                message = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ready, 4096))
                await asyncio.wait(
                    (message, self._child.ended), timeout=_START_LIMIT, return_when=asyncio.FIRST_COMPLETED
                )
                if not message.done():
                    message.cancel()
                    raise RuntimeError(f"etcd did not start:\n{log.read_text(errors='replace')[-2000:]}")
            finally:
                address.unlink()

    async def kill(self) -> None:
        """Kill etcd with SIGKILL; its data remain."""
        if self._child is not None:
            child, self._child = self._child, None
            child.signal(signal.SIGKILL)
            await asyncio.shield(child.ended)

    def wipe(self) -> None:
        """Delete the data. Call this only while etcd does not run."""
        shutil.rmtree(self._data)

    def pause(self) -> None:
        """Pause etcd with SIGSTOP; its connections stay open."""
        if self._child is not None:
            self._child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue etcd with SIGCONT."""
        if self._child is not None:
            self._child.signal(signal.SIGCONT)


async def wake(endpoint: str) -> None:
    """Send some requests of each kind to an etcd, so that the first measured requests are not slower."""
    store = await connect(StoreSettings(endpoints=(endpoint,)))
    try:
        for _ in range(_ROUNDS):
            lease = await store.grant(_LEASE)
            async with aclosing(follow(store, _KEYS)) as news:
                await anext(news)
                revision = await store.put(f"{_KEYS}a", b"a", lease=lease)
                await store.compare_and_swap(f"{_KEYS}a", b"b", expected=revision, lease=lease)
                while not await anext(news):
                    pass
            await store.keep_alive(lease)
            await store.revoke(lease)
    finally:
        await store.close()


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far in seconds, including time in the kernel."""
    # The first field of each thread is its time on a processor in nanoseconds; /proc/PID/stat counts in ticks of 10 ms.
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="utf-8").split()[0]) for task in tasks) / 1e9


def _version(binary: Path) -> tuple[int, ...]:
    number = binary.parent.name.split("-")[1].removeprefix("v")
    return tuple(int(part) for part in number.split(".") if part.isdigit())
