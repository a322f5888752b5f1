"""The agents of the soak, each in a numbered slot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.recovery.launchers import WORKER
from benchmarks.support.worker_reports import Missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.support.etcd import BreakableEtcd
    from benchmarks.support.processes import ProcessTree
    from benchmarks.support.worker_reports import WorkerReport, WorkerReports
    from torchelastic.agent.workers.processes import Child

EVERY: Final = 0.1
"""Seconds between two reports of a worker."""

SPARE: Final = "torchelastic: spare process"
SPARES: Final = 2
"""The spare processes of an agent with one worker: for the worker, and for the store of a round."""

_TIMEOUT: Final = 600.0
"""The timeout of the workers' process group in seconds; the agents should notice faults earlier."""

_MANY: Final = 1_000_000


class Agents:
    """The agents of one run and their etcd.

    Args:
        processes: the tree in which the agents are started.
        reports: the reports of the workers.
        etcd: a running etcd.
        count: the number of agents.
        lease: the lease in seconds.
        limit: seconds within which all agents must train together again.
    """

    def __init__(
        self,
        processes: ProcessTree,
        reports: WorkerReports,
        etcd: BreakableEtcd,
        *,
        count: int,
        lease: float,
        limit: float,
    ) -> None:
        self.etcd = etcd
        self.count = count
        self._processes = processes
        self._reports = reports
        self._lease = lease
        self._limit = limit
        self._children: dict[int, Child] = {}

    def start(self, slot: int) -> None:
        """Start the agent of a slot."""
        conf = f"lease={self._lease:g},last_call_timeout=2,crash_loop_limit={_MANY}"
        command = [
            *(sys.executable, "-m", "torchelastic.run", f"--nnodes=1:{self.count}", f"--node-name=agent{slot}"),
            *(f"--rdzv-endpoint={self.etcd.endpoint}", "--rdzv-id=soak", "--local-addr=127.0.0.1"),
            *(f"--rdzv-conf={conf}", f"--max-restarts={_MANY}", str(WORKER)),
        ]
        env = self._reports.worker_environment(f"{slot}", every=EVERY, timeout=_TIMEOUT)
        self._children[slot] = self._processes.start(command, self.log(slot), env)

    def child(self, slot: int) -> Child:
        """Return the agent's process."""
        return self._children[slot]

    def worker(self, slot: int) -> int:
        """Return the process id of the agent's last worker."""
        report = self._reports.latest(f"{slot}")
        if report is None:
            raise Missing(f"agent {slot} never had a worker")
        return report.pid

    def tree(self, slot: int | None) -> set[tuple[int, int]]:
        """Return the ids and start times of an agent's living processes; without a slot, those of all agents."""
        roots = None if slot is None else [self.child(slot).pid]
        return {(entry.pid, entry.started) for entry in self._processes.living(roots).values()}

    def titled(self, slot: int, title: str) -> list[int]:
        """Return the ids of an agent's processes with this title."""
        return [pid for pid in self._processes.living([self.child(slot).pid]) if _title(pid) == title]

    def kill(self, pid: int) -> None:
        """Kill a process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def ends(self, slot: int) -> int:
        """Wait until the agent exits, and return its exit code.

        Raises:
            Missing: the agent did not exit within the limit.
        """
        try:
            async with asyncio.timeout(self._limit):
                return await asyncio.shield(self.child(slot).ended)
        except TimeoutError:
            raise Missing(f"agent {slot} did not exit within {self._limit:g} s") from None

    async def together(self, since: float) -> Sequence[WorkerReport]:
        """Wait until all agents' workers have trained together after a time, and return a report of each.

        Raises:
            Missing: they did not train together within the limit.
        """

        def found() -> Sequence[WorkerReport] | None:
            reports = [self._reports.latest(f"{slot}") for slot in range(self.count)]
            there = [
                report for report in reports if report is not None and report.at > since and report.world == self.count
            ]
            return there if len(there) == self.count and len({report.round for report in there}) == 1 else None

        return await self._reports.until(found, limit=self._limit, agents=self._children.values())

    async def together_for(self, seconds: float) -> Sequence[WorkerReport]:
        """Wait until all agents' workers have trained together in one round for this time.

        Raises:
            Missing: they did not train together within the limit.
        """
        reports = await self.together(time.monotonic())
        while True:
            await asyncio.sleep(seconds)
            before, reports = reports, await self.together(time.monotonic())
            if before[0].round == reports[0].round:
                return reports

    def state(self) -> str:
        """Return the last report and output of each agent, for the analysis of a failure."""
        parts = []
        for slot, child in self._children.items():
            log = self.log(slot).read_text(errors="replace").splitlines()[-40:]
            parts.append("\n".join([f"agent {slot}: {self._reports.latest(f'{slot}')}, process {child.pid}", *log]))
        return "\n\n".join(parts)

    def log(self, slot: int) -> Path:
        """Return the log file of a slot."""
        return self._processes.folder / f"agent{slot}.log"

    def inventory(self) -> Counter[str]:
        """Count the processes, including zombies, and their open descriptors by title, and temporary files by name."""
        found: Counter[str] = Counter()
        agents = {child.pid for child in self._children.values()}
        workers = {self.worker(slot) for slot in self._children}
        etcd = {self.etcd.pid}
        for pid, entry in self._processes.all().items():
            title = _title(pid)
            if entry.dead:
                title = "dead"
            elif pid in agents:
                title = "agent"
            elif pid in workers:
                title = "worker"
            elif pid in etcd:
                continue  # the number of its descriptors varies
            elif not title.startswith("torchelastic: "):
                title = "unknown"
            found[f"{title}: processes"] += 1
            found[f"{title}: descriptors"] += _descriptors(pid)
        found.update(f"temporary: {_kind(path.name)}" for path in self._processes.scratch.iterdir())
        return found

    async def inventory_at_rest(self, limit: float) -> Counter[str]:
        """Return the inventory when each agent has its spare processes.

        Raises:
            Missing: an agent had no spare processes within the limit.
        """
        deadline = time.monotonic() + limit
        while (found := self.inventory())[f"{SPARE}: processes"] < SPARES * self.count:
            if time.monotonic() > deadline:
                raise Missing(f"the agents do not have their spare processes: {dict(found)}")
            await asyncio.sleep(0.5)
        return found


def _kind(name: str) -> str:
    """Return the name of a temporary file without its random part."""
    return re.sub(r"[A-Za-z0-9_]{8}$", "*", name)


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return ""


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only the number is needed
    return 0
