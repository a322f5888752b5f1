"""A network of hosts that can be disconnected: a switch and hosts, each in a network namespace.

The namespaces have no names. Each namespace exists as long as its process runs, so nothing is left behind. The network
of this machine does not change. A host is silenced at the switch: its own interface stays up, and its packets are lost.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.support.processes import ProcessTree
    from torchelastic.agent.workers.processes import Child

INTERFACE: Final = "eth0"
"""The interface of each host."""

_SWITCH: Final = "switch"
_NETWORK: Final = "198.18.0"  # RFC 2544 reserves it for benchmarks
_TOOLS: Final = ("ip", "nsenter", "unshare")


def why_not() -> str:
    """Return the reason why no such network can be created on this machine; empty if one can."""
    if os.geteuid() != 0:
        return "only root can create network namespaces."
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)}: install iproute2 and util-linux."
    tried = subprocess.run(("unshare", "--net", "ip", "link"), capture_output=True, text=True, check=False)
    return f"network namespaces cannot be created: {tried.stderr.strip()}." if tried.returncode != 0 else ""


class Network:
    """Connected hosts; an async context manager.

    Args:
        processes: the tree in which the processes of the namespaces are started.
        hosts: the names of the hosts.
    """

    def __init__(self, processes: ProcessTree, hosts: Sequence[str]) -> None:
        self._processes = processes
        self._hosts = tuple(hosts)
        self._holders: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        for name in (_SWITCH, *self._hosts):
            self._holders[name] = await self._namespace()
        self._ip(_SWITCH, "link add bridge type bridge", "link set bridge up")
        for number, host in enumerate(self._hosts):
            port, there = f"port{number}", self._holders[host].pid
            self._ip(
                _SWITCH,
                f"link add {port} type veth peer name {INTERFACE} netns {there}",
                f"link set {port} master bridge up",
            )
            self._ip(host, "link set lo up", f"addr add {self.address(host)}/24 dev {INTERFACE}")
            self._ip(host, f"link set {INTERFACE} up")
        return self

    async def __aexit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.signal(signal.SIGKILL)
        await asyncio.gather(*(asyncio.shield(holder.ended) for holder in self._holders.values()))

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return f"{_NETWORK}.{self._hosts.index(host) + 1}"

    def inside(self, host: str) -> tuple[str, ...]:
        """Return the prefix of a command that runs it on a host."""
        return ("nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--")

    def silence(self, host: str) -> None:
        """Drop all packets from and to a host from now on."""
        self._ip(_SWITCH, f"link set port{self._hosts.index(host)} nomaster")

    async def _namespace(self) -> Child:
        """Start a process that waits in a new network namespace."""
        ready = self._processes.folder / "namespace-ready"
        os.mkfifo(ready)
        try:
            with os.fdopen(os.open(ready, os.O_RDWR | os.O_NONBLOCK), "rb") as pipe:
                command = ("unshare", "--net", "sh", "-c", f"echo > '{ready}'; exec sleep infinity")
                holder = self._processes.start(command, Path(os.devnull))
                made = asyncio.Event()
                loop = asyncio.get_running_loop()
                loop.add_reader(pipe, made.set)
                holder.ended.add_done_callback(lambda _: made.set())
                try:
                    await made.wait()
                finally:
                    loop.remove_reader(pipe)
        finally:
            ready.unlink()
        if not holder.running:
            raise RuntimeError(f"a network namespace could not be created: unshare exited with {holder.ended.result()}")
        return holder

    def _ip(self, host: str, *commands: str) -> None:
        command = [*self.inside(host), "ip", "-batch", "-"]
        text = "".join(f"{line}\n" for line in commands)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the network of the benchmark could not be created: {done.stderr.strip()}")
