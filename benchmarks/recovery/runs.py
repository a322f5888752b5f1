"""One run of a launcher with its agents, for the recovery benchmark."""

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

from benchmarks.recovery.network import INTERFACE
from elastic_operator.local.processes import free_ports
from torchelastic.protocol.pod import Env

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.recovery.launchers import Launcher
    from benchmarks.recovery.network import Network
    from benchmarks.support.processes import ProcessTree
    from benchmarks.support.worker_reports import WorkerReport, WorkerReports
    from torchelastic.agent.workers.processes import Child

GLOO_TIMEOUT: Final = 10.0
"""Seconds after which an all-reduce with an unreachable host fails. With the default of 30 minutes, torchrun would not
notice an unreachable host in time. torchelastic's agents do not need this timeout."""

_ROOT: Final = Path(__file__).parents[2]


@dataclass
class Run:
    """One run.

    Attributes:
        processes: the tree in which the agents are started.
        reports: the reports of the agents' workers.
        etcd: host:port of etcd.
        certificates: the folder with the certificates for etcd; None without TLS.
        launcher: the launcher that is measured.
        nnodes: the value of ``--nnodes``.
        limit: the maximum seconds of each wait.
        settle: seconds of training before a fault.
        network: the hosts of the agents, by the agents' names; None if all agents are on this host.
        agents: the started agents, by their names.
    """

    processes: ProcessTree
    reports: WorkerReports
    etcd: str
    certificates: Path | None
    launcher: Launcher
    nnodes: str
    limit: float
    settle: float
    network: Network | None = None
    agents: dict[str, Child] = field(default_factory=dict)
    _id: str = field(default_factory=lambda: secrets.token_hex(4))
    _endpoint: str = ""

    def start(self, *names: str, ready: Path | None = None) -> float:
        """Start agents at once, and return the time of the monotonic clock.

        Args:
            names: the names of the agents.
            ready: the file to which an agent writes the time at which it has imported torch; None for no file.
        """
        starts = []
        for name in names:
            address = self.network.address(name) if self.network is not None else "127.0.0.1"
            first = not self._endpoint
            if first:
                self._endpoint = self.etcd if self.launcher.is_ours else f"{address}:{free_ports(1)[0]}"
            command = self.launcher.command(
                node=name,
                address=address,
                endpoint=self._endpoint,
                run_id=self._id,
                nnodes=self.nnodes,
                first=first,
                reports_ready=ready is not None,
            )
            environment = {
                **self.reports.worker_environment(name, timeout=GLOO_TIMEOUT),
                **self.launcher.environment,
                **self._tls,
                **({"BENCHMARK_READY": str(ready), "PYTHONPATH": str(_ROOT)} if ready is not None else {}),
                **({"GLOO_SOCKET_IFNAME": INTERFACE} if self.network is not None else {}),
            }
            starts.append((name, [*self._inside(name), *command], environment))
        at = time.monotonic()
        for name, command, environment in starts:
            self.agents[name] = self.processes.start(command, self._log(name), environment)
        return at

    async def together(self, *names: str, since: float) -> Sequence[WorkerReport]:
        """Wait until new workers of these agents, and no others, have done an all-reduce together.

        Raises:
            Missing: there was no such all-reduce within the limit.
        """
        agents = [self.agents[name] for name in names]
        return await self.reports.all_of(names, since=since, limit=self.limit, agents=agents)

    async def settled(self, *names: str) -> None:
        """Start these agents, and let them train for a while."""
        await self.together(*names, since=self.start(*names))
        await asyncio.sleep(self.settle)

    def leader(self) -> str:
        """Return the name of the leading agent, or of the agent that hosts torchrun's store."""
        if not self.launcher.is_ours:
            return next(iter(self.agents))
        command = [*self._inside("etcd"), sys.executable, "-m", "benchmarks.recovery.leader", self.etcd, self._id]
        environment = {**os.environ, **self._tls}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    @property
    def _tls(self) -> dict[str, str]:
        return {} if self.certificates is None else {Env.ETCD_TLS: f"{self.certificates}"}

    def follower(self) -> str:
        """Return the name of an agent that is not the leader."""
        leader = self.leader()
        return next(name for name in self.agents if name != leader)

    def kill_worker(self, name: str) -> float:
        """Kill an agent's worker with SIGKILL, and return the time of the monotonic clock."""
        report = self.reports.latest(name)
        if report is None:
            raise RuntimeError(f"{name} has no worker yet")
        at = time.monotonic()
        os.kill(report.pid, signal.SIGKILL)
        return at

    def ask_to_leave(self, name: str) -> float:
        """Send SIGTERM to an agent, and return the time of the monotonic clock."""
        at = time.monotonic()
        self.agents[name].signal(signal.SIGTERM)
        return at

    def kill_with_workers(self, name: str) -> float:
        """Kill an agent and its descendants with SIGKILL, and return the time of the monotonic clock."""
        agent = self.agents[name].pid
        family = self.processes.living([agent])
        at = time.monotonic()
        for pid in (agent, *(pid for pid in family if pid != agent)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    def silence(self, name: str) -> float:
        """Drop all packets of an agent's host, and return the time of the monotonic clock.

        Raises:
            RuntimeError: the run has no network.
        """
        if self.network is None:
            raise RuntimeError("only a host in its own network can be silenced")
        at = time.monotonic()
        self.network.silence(name)
        return at

    def last_output(self, limit: int) -> list[str]:
        """Return the last line of each agent's output, or its last ``limit`` characters if the line is shorter."""
        found = []
        for name in self.agents:
            text = self._log(name).read_text(errors="replace").strip()
            begin = min(text.rfind("\n") + 1, max(len(text) - limit, 0))
            found.append(f"{name}: {text[begin:]}")
        return found

    def _inside(self, host: str) -> tuple[str, ...]:
        return self.network.inside(host) if self.network is not None else ()

    def _log(self, name: str) -> Path:
        return self.processes.folder / f"{self._id}-{name}.log"
