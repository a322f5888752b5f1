"""An etcd that a benchmark can kill, pause and empty, or put into a network of its own."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.processes import Household
    from torchelastic.agent.workers.processes import Child

_START_LIMIT: Final = 30.0


class BreakableEtcd:
    """One etcd with one member. It does not wait for the disk, as that of ``elasticjob run`` does not.

    Args:
        household: its process belongs to it, and so do its files.
        binary: the program.
        ports: for clients and for peers; the same again after each start.
        host: the address on which it listens.
        inside: what stands before its command, to run it in another network.
    """

    def __init__(
        self,
        household: Household,
        binary: Path,
        ports: Sequence[int],
        *,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        self._household = household
        self._binary = binary
        self._client, self._peer = (f"{host}:{port}" for port in ports)
        self._inside = inside
        self._data = household.folder / "etcd"
        self._child: Child | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return self._client

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            RuntimeError: it does not run.
        """
        if self._child is None:
            raise RuntimeError("etcd does not run")
        return self._child.pid

    async def start(self) -> None:
        """Start it, with the data that it left; returns when it serves."""
        address = self._household.folder / "etcd-ready"
        command = [
            *self._inside,
            *(str(self._binary), "--name=local", f"--data-dir={self._data}"),
            *(f"--listen-client-urls=http://{self._client}", f"--advertise-client-urls=http://{self._client}"),
            *(f"--listen-peer-urls=http://{self._peer}", f"--initial-advertise-peer-urls=http://{self._peer}"),
            *(f"--initial-cluster=local=http://{self._peer}", "--unsafe-no-fsync", "--log-level=warn"),
            *("--heartbeat-interval=10", "--election-timeout=100"),
        ]
        log = self._household.folder / "etcd.log"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.setblocking(False)
            ready.bind(str(address))
            try:
                self._child = self._household.start(command, log, {"NOTIFY_SOCKET": str(address)})
                told = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ready, 4096))
                await asyncio.wait((told, self._child.ended), timeout=_START_LIMIT, return_when=asyncio.FIRST_COMPLETED)
                if not told.done():
                    told.cancel()
                    raise RuntimeError(f"etcd did not start:\n{log.read_text(errors='replace')[-2000:]}")
            finally:
                address.unlink()

    async def kill(self) -> None:
        """End it with SIGKILL; its data stay."""
        if self._child is not None:
            child, self._child = self._child, None
            child.signal(signal.SIGKILL)
            await asyncio.shield(child.ended)

    def wipe(self) -> None:
        """Take its data away while it does not run."""
        shutil.rmtree(self._data)

    def pause(self) -> None:
        """Have it stand still: connections stay, nobody answers."""
        if self._child is not None:
            self._child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._child is not None:
            self._child.signal(signal.SIGCONT)
