"""The agents of the soak, each in its slot: started, replaced, looked at, and counted."""

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

from benchmarks.beats import Missing
from benchmarks.launchers import WORKER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.beats import Beat, Beats
    from benchmarks.breakable_etcd import BreakableEtcd
    from benchmarks.processes import Household
    from torchelastic.agent.workers.processes import Child

EVERY: Final = 0.1
"""Seconds between two beats of a worker."""

SPARE: Final = "torchelastic: spare process"
SPARES: Final = 2
"""So many does an agent of one worker keep: for that worker, and for the store of a round."""

_TIMEOUT: Final = 600.0
"""Seconds for the workers' process group: it is the agents who are to notice."""

_MANY: Final = 1_000_000


class Field:
    """The agents of one run and their etcd.

    Args:
        household: holds all processes.
        beats: where the workers tell.
        etcd: serves.
        agents: how many.
        lease: in seconds.
        limit: seconds within which all agents train together again.
    """

    def __init__(
        self, household: Household, beats: Beats, etcd: BreakableEtcd, *, agents: int, lease: float, limit: float
    ) -> None:
        self.etcd = etcd
        self.agents = agents
        self._household = household
        self._beats = beats
        self._lease = lease
        self._limit = limit
        self._children: dict[int, Child] = {}

    # -- what the faults do

    def start(self, slot: int) -> None:
        """Start an agent where there is none."""
        conf = f"lease={self._lease:g},last_call_timeout=2,crash_loop_limit={_MANY}"
        command = [
            *(sys.executable, "-m", "torchelastic.run", f"--nnodes=1:{self.agents}", f"--node-name=agent{slot}"),
            *(f"--rdzv-endpoint={self.etcd.endpoint}", "--rdzv-id=soak", "--local-addr=127.0.0.1"),
            *(f"--rdzv-conf={conf}", f"--max-restarts={_MANY}", str(WORKER)),
        ]
        env = self._beats.worker_environment(f"{slot}", every=EVERY, timeout=_TIMEOUT)
        self._children[slot] = self._household.start(command, self.log(slot), env)

    def child(self, slot: int) -> Child:
        """The agent's process."""
        return self._children[slot]

    def worker(self, slot: int) -> int:
        """The process id of the agent's last worker."""
        beat = self._beats.latest(f"{slot}")
        if beat is None:
            raise Missing(f"agent {slot} never had a worker")
        return beat.pid

    def tree(self, slot: int | None) -> set[tuple[int, int]]:
        """What lives of the agent and all that it has started (with no slot: of everything), by id and start."""
        roots = None if slot is None else [self.child(slot).pid]
        return {(entry.pid, entry.started) for entry in self._household.living(roots).values()}

    def titled(self, slot: int, title: str) -> list[int]:
        """The process ids of the agent's processes with this title."""
        return [pid for pid in self._household.living([self.child(slot).pid]) if _title(pid) == title]

    def kill(self, pid: int) -> None:
        """Kill a process, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def ends(self, slot: int) -> int:
        """Wait for the agent's end; gives back its exit code.

        Raises:
            Missing: it goes on.
        """
        try:
            async with asyncio.timeout(self._limit):
                return await asyncio.shield(self.child(slot).ended)
        except TimeoutError:
            raise Missing(f"agent {slot} goes on for {self._limit:g} s") from None

    # -- how the run fares

    async def together(self, since: float) -> Sequence[Beat]:
        """Wait until all agents' workers have trained together after a time; gives back a beat of each.

        Raises:
            Missing: they have not.
        """

        def found() -> Sequence[Beat] | None:
            beats = [self._beats.latest(f"{slot}") for slot in range(self.agents)]
            there = [beat for beat in beats if beat is not None and beat.at > since and beat.world == self.agents]
            return there if len(there) == self.agents and len({beat.round for beat in there}) == 1 else None

        return await self._beats.until(found, limit=self._limit, agents=self._children.values())

    async def together_for(self, seconds: float) -> Sequence[Beat]:
        """Wait until all agents' workers have trained together for so long in one round.

        Raises:
            Missing: they have not.
        """
        beats = await self.together(time.monotonic())
        while True:
            await asyncio.sleep(seconds)
            before, beats = beats, await self.together(time.monotonic())
            if before[0].round == beats[0].round:
                return beats

    def state(self) -> str:
        """What is known of each agent, for whoever looks into a failure."""
        parts = []
        for slot, child in self._children.items():
            log = self.log(slot).read_text(errors="replace").splitlines()[-40:]
            parts.append("\n".join([f"agent {slot}: {self._beats.latest(f'{slot}')}, process {child.pid}", *log]))
        return "\n\n".join(parts)

    def log(self, slot: int) -> Path:
        """The file with what the agents in a slot print."""
        return self._household.folder / f"agent{slot}.log"

    # -- what there is

    def inventory(self) -> Counter[str]:
        """How many processes there are by their titles, dead ones included, and how many descriptors those have open.

        What lies among the temporary files is counted, too, by the beginning of its name.
        """
        found: Counter[str] = Counter()
        agents = {child.pid for child in self._children.values()}
        workers = {self.worker(slot) for slot in self._children}
        etcd = {self.etcd.pid}
        for pid, entry in self._household.all().items():
            title = _title(pid)
            if entry.dead:
                title = "dead"
            elif pid in agents:
                title = "agent"
            elif pid in workers:
                title = "worker"
            elif pid in etcd:
                continue  # its descriptors are its own business
            elif not title.startswith("torchelastic: "):
                title = "unknown"
            found[f"{title}: processes"] += 1
            found[f"{title}: descriptors"] += _descriptors(pid)
        found.update(f"temporary: {_kind(path.name)}" for path in self._household.scratch.iterdir())
        return found

    async def inventory_at_rest(self, limit: float) -> Counter[str]:
        """The same, once each agent has its store of spare processes filled.

        Raises:
            Missing: it never is.
        """
        deadline = time.monotonic() + limit
        while (found := self.inventory())[f"{SPARE}: processes"] < SPARES * self.agents:
            if time.monotonic() > deadline:
                raise Missing(f"the agents do not come to rest: {dict(found)}")
            await asyncio.sleep(0.5)
        return found


def _kind(name: str) -> str:
    """The name of a temporary file without what makes it a name of its own."""
    return re.sub(r"[A-Za-z0-9_]{8}$", "*", name)


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return ""


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only their number is wanted
    return 0
