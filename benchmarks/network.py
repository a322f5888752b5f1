"""Hosts in a network of their own: a switch and its hosts, each in a network namespace, for hosts that fall silent.

The namespaces have no names: each lives as long as the process that was started in it, so nothing of it can be left
behind, and nothing of this machine's own network is touched. What makes a host silent is done at the far end of its
cable, at the switch: the host's own interface stays up, and nothing tells it, or anybody else, that its packets get
lost.
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

    from benchmarks.processes import Household
    from torchelastic.agent.workers.processes import Child

INTERFACE: Final = "eth0"
"""The interface of each host."""

_SWITCH: Final = "switch"
_NETWORK: Final = "198.18.0"  # a range that is reserved for measurements like these
_TOOLS: Final = ("ip", "nsenter", "unshare")


def why_not() -> str:
    """Why there can be no such network here, as a sentence; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces can only be made by root."
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)}: install iproute2 and util-linux."
    tried = subprocess.run(("unshare", "--net", "ip", "link"), capture_output=True, text=True, check=False)
    return f"no network namespace can be had: {tried.stderr.strip()}." if tried.returncode != 0 else ""


class Network:
    """Hosts that reach each other; an async context manager.

    Args:
        household: holds the namespaces' processes.
        hosts: their names.
    """

    def __init__(self, household: Household, hosts: Sequence[str]) -> None:
        self._household = household
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
        """Under which address the others reach a host."""
        return f"{_NETWORK}.{self._hosts.index(host) + 1}"

    def inside(self, host: str) -> tuple[str, ...]:
        """What stands before a command that is to run on a host."""
        return ("nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--")

    def silence(self, host: str) -> None:
        """From now on all packets from and to a host get lost."""
        self._ip(_SWITCH, f"link set port{self._hosts.index(host)} nomaster")

    async def _namespace(self) -> Child:
        """A process in a network namespace of its own, where it waits."""
        ready = self._household.folder / "namespace-ready"
        os.mkfifo(ready)
        try:
            with os.fdopen(os.open(ready, os.O_RDWR | os.O_NONBLOCK), "rb") as pipe:
                command = ("unshare", "--net", "sh", "-c", f"echo > '{ready}'; exec sleep infinity")
                holder = self._household.start(command, Path(os.devnull))
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
            raise RuntimeError(f"no network namespace can be made: unshare ended with {holder.ended.result()}")
        return holder

    def _ip(self, host: str, *commands: str) -> None:
        command = [*self.inside(host), "ip", "-batch", "-"]
        text = "".join(f"{line}\n" for line in commands)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the network of the benchmark cannot be made: {done.stderr.strip()}")
