"""One run of a launcher with its agents, as the measurements of recovery need it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.launchers import Ours, Spot
from benchmarks.network import INTERFACE
from elastic_operator.local.etcd import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.beats import Beat, Beats
    from benchmarks.launchers import System
    from benchmarks.network import Network
    from benchmarks.processes import Household
    from torchelastic.agent.workers.processes import Child

GLOO_TIMEOUT: Final = 10.0
"""Seconds after which an all-reduce with somebody who is silent fails. Its default is 30 minutes, for which torchrun
would notice nothing at all; ours needs none."""

_ROOT: Final = Path(__file__).parents[1]
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs take place on.

    Attributes:
        household: holds their processes.
        beats: where their workers tell.
        etcd: host:port of etcd.
        etcd_host: where it is in the network.
        network: the hosts of the agents, by the agents' names; None for all of them on this one.
        limit: seconds for which anything is waited for.
        settle: seconds that a run trains before anything happens to it.
    """

    household: Household
    beats: Beats
    etcd: str
    limit: float
    settle: float
    network: Network | None = None
    etcd_host: str = "etcd"

    def inside(self, host: str) -> tuple[str, ...]:
        """What stands before a command that is to run on a host."""
        return self.network.inside(host) if self.network is not None else ()

    def address(self, host: str) -> str:
        """Under which address a host is reached."""
        return self.network.address(host) if self.network is not None else _LOOPBACK


@dataclass
class Run:
    """One run.

    Attributes:
        stage: where it takes place.
        system: what is measured.
        nnodes: as in ``--nnodes``.
        agents: the agents that were started, by their names.
    """

    stage: Stage
    system: System
    nnodes: str
    agents: dict[str, Child] = field(default_factory=dict)
    _id: str = field(default_factory=lambda: secrets.token_hex(4))
    _meeting: str = ""

    def start(self, *names: str, ready: Path | None = None) -> float:
        """Start agents at once; gives back when, by the monotonic clock.

        Args:
            names: what they are called.
            ready: the file in which one of them tells when it has torch imported.
        """
        stage = self.stage
        starts = []
        for name in names:
            first = not self._meeting
            if first:
                ours = isinstance(self.system, Ours)
                self._meeting = stage.etcd if ours else f"{stage.address(name)}:{free_ports(1)[0]}"
            spot = Spot(self._id, name, stage.address(name), self._meeting, first, tells=ready is not None)
            environment = {
                **stage.beats.worker_environment(name, timeout=GLOO_TIMEOUT),
                **self.system.environment,
                **({"BENCHMARK_READY": str(ready), "PYTHONPATH": str(_ROOT)} if ready is not None else {}),
            }
            if stage.network is not None:
                environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            starts.append((name, [*stage.inside(name), *self.system.command(spot, self.nnodes)], environment))
        at = time.monotonic()
        for name, command, environment in starts:
            self.agents[name] = stage.household.start(command, self.log(name), environment)
        return at

    async def together(self, *names: str, since: float) -> Sequence[Beat]:
        """Wait until these agents' workers, begun since then, are past an all-reduce with each other and nobody else.

        Raises:
            Missing: they were not.
        """
        agents = [self.agents[name] for name in names]
        return await self.stage.beats.all_of(names, since=since, limit=self.stage.limit, agents=agents)

    async def settled(self, *names: str) -> None:
        """Start these agents, and return when they have trained together for a while."""
        await self.together(*names, since=self.start(*names))
        await asyncio.sleep(self.stage.settle)

    def silence(self, name: str) -> float:
        """Have an agent's host fall silent; gives back when, by the monotonic clock.

        Raises:
            RuntimeError: the agents have no hosts of their own.
        """
        if self.stage.network is None:
            raise RuntimeError("only a host in a network of its own can fall silent")
        at = time.monotonic()
        self.stage.network.silence(name)
        return at

    def leader(self) -> str:
        """The agent on which all others depend most: who leads, or hosts torchrun's store."""
        if not isinstance(self.system, Ours):
            return next(iter(self.agents))
        command = [
            *self.stage.inside(self.stage.etcd_host),
            *(sys.executable, "-m", "benchmarks.leader", self.stage.etcd, self._id),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def follower(self) -> str:
        """An agent that is not the leader."""
        leader = self.leader()
        return next(name for name in self.agents if name != leader)

    def worker_of(self, name: str) -> int:
        """The process id of an agent's present worker."""
        beat = self.stage.beats.latest(name)
        if beat is None:
            raise RuntimeError(f"{name} has no worker yet")
        return beat.pid

    def ask_to_leave(self, name: str) -> float:
        """Send an agent SIGTERM; gives back when, by the monotonic clock."""
        at = time.monotonic()
        self.agents[name].signal(signal.SIGTERM)
        return at

    def kill_with_workers(self, name: str) -> float:
        """Kill an agent and all that it has started; gives back when, by the monotonic clock."""
        agent = self.agents[name].pid
        family = self.stage.household.living([agent])
        at = time.monotonic()
        for pid in (agent, *(pid for pid in family if pid != agent)):
            _kill(pid)
        return at

    def last_words(self, limit: int) -> list[str]:
        """The last so many characters that each agent has printed, and not less than a line."""
        found = []
        for name in self.agents:
            text = self.log(name).read_text(errors="replace").strip()
            begin = min(text.rfind("\n") + 1, max(len(text) - limit, 0))
            found.append(f"{name}: {text[begin:]}")
        return found

    def log(self, name: str) -> Path:
        """The file with what an agent prints."""
        return self.stage.household.folder / f"{self._id}-{name}.log"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
