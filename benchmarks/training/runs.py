"""One run of the training program with one launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.recovery.launchers import TORCHRUN as TORCHRUN_LAUNCHER
from benchmarks.support.etcd import BreakableEtcd
from benchmarks.support.packages import installed
from benchmarks.support.processes import ProcessTree
from benchmarks.training.events import Processes
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from torchelastic.agent.workers.processes import Child

IN_PLACE: Final = "in place"
RESTARTS: Final = "with restarts"
TORCHRUN: Final = "torchrun"
TORCHFT: Final = "torchft"
TORCHFT_VERSION: Final = "0.2.0"
TORCH_ALONE: Final = "torch alone"
HOWS: Final = {
    IN_PLACE: "in-place",
    RESTARTS: "restarts",
    TORCHRUN: "restarts",
    TORCHFT: "torchft",
    TORCH_ALONE: "torch-alone",
}
"""The name of the training program's argument, by launcher."""

_POLL: Final = 0.2
"""Seconds between two looks at the events, whose times do not depend on it: more looks would disturb the training."""

_PROGRAM: Final = str(Path(__file__).with_name("program.py"))
_LIGHTHOUSE: Final = str(Path(__file__).with_name("lighthouse.py"))


@dataclass
class Run:
    """One run.

    Attributes:
        processes: the tree in which the agents are started.
        launcher: the launcher.
        where: "inside" or "outside" a collective, where the fault happens.
        endpoint: host:port of the rendezvous.
        workers: the number of workers of each agent.
        limit: the maximum seconds of each wait.
        settle: seconds of training before the world changes.
        flags: more flags for agents of this project.
        agents: the started agents, by their names.
    """

    processes: ProcessTree
    launcher: str
    where: str
    endpoint: str
    workers: int
    limit: float
    settle: float
    flags: tuple[str, ...] = ()
    agents: dict[str, Child] = field(default_factory=dict)
    _id: str = field(default_factory=lambda: secrets.token_hex(4))
    _ended: bool = False

    @property
    def folder(self) -> Path:
        """The folder with the events of the processes."""
        return self.processes.folder / "events"

    def start(self, name: str) -> float:
        """Start an agent with its workers; return the time of the monotonic clock."""
        at = time.monotonic()
        program = (_PROGRAM, str(self.folder), HOWS[self.launcher], self.where)
        each = f"--nproc-per-node={self.workers}"
        if self.launcher == TORCHFT:
            for rank in range(self.workers):
                self._start_group(rank, program)
        elif self.launcher == TORCHRUN:
            flags: tuple[str, ...] = ("--standalone", each, "--max-restarts=100", "--monitor-interval=0.1")
            self._start(name, ["torch.distributed.run", *flags, *program], TORCHRUN_LAUNCHER.environment)
        elif self.launcher == TORCH_ALONE:
            port = self.endpoint.rpartition(":")[2]
            variables = {"MASTER_PORT": port, "WORLD_SIZE": f"{self.workers}"}
            self._start(name, ["benchmarks.training.program", *program[1:]], variables)
        else:
            flags = (f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self._id}", "--local-addr=127.0.0.1")
            nodes = ("--nnodes=1:2", f"--node-name={name}", each, "--max-restarts=100")
            self._start(name, ["torchelastic.run", *flags, *nodes, *self.flags, *program], {})
        return at

    async def trains(self, size: int, steps: int) -> None:
        """Wait until the processes have trained for some steps in a world of this size.

        Raises:
            TimeoutError: they do not within the limit.
        """
        await self.until(lambda: self.seen().steps_of_world(size) >= steps or None, f"no training of {size} ranks")

    async def settled(self, size: int) -> None:
        """Wait until the processes train in a world of this size, and let them train for a while.

        Raises:
            TimeoutError: they do not train within the limit.
        """
        await self.trains(size, 1)
        await asyncio.sleep(self.settle)

    async def until(self, found: Callable[[], float | None], what: str) -> float:
        """Wait until a function returns a value, and return it.

        Raises:
            TimeoutError: it does not within the limit; the message has `what`, and the last output of the agents.
        """
        deadline = time.monotonic() + self.limit
        while (value := found()) is None:
            if time.monotonic() > deadline:
                logs = (path.read_text(errors="replace")[-1500:] for path in self.processes.folder.glob("*.log"))
                raise TimeoutError("\n".join([f"{what} within {self.limit:g} s", *logs]))
            await asyncio.sleep(_POLL)
        return value

    def seen(self) -> Processes:
        """Return the events so far."""
        return Processes.read(self.folder)

    async def fault(self, rank: int, number: signal.Signals) -> float:
        """Let the process of a rank send itself a signal; return the time of the monotonic clock.

        Raises:
            TimeoutError: it does not within the limit.
        """
        running = [process for process in self.seen() if process.events and process.events[-1].rank == rank]
        victim = max(running, key=lambda process: process.events[-1].time)
        (whole := self.folder / f"{victim.pid}.part").write_text(f"{number.value}")
        whole.rename(self.folder / f"{victim.pid}.fault")
        return await self.until(
            lambda: next((at for each in self.seen() for at in each.times("fault")), None), "no fault"
        )

    def terminate(self, name: str, number: signal.Signals = signal.SIGTERM) -> float:
        """Send a signal to an agent; return the time of the monotonic clock. Its workers end with it."""
        at = time.monotonic()
        self.agents[name].signal(number)
        return at

    def _start(self, name: str, module: list[str], environment: Mapping[str, str]) -> None:
        variables = {"BENCHMARK_NODE": name, "OMP_NUM_THREADS": "1", **environment}
        log = self.processes.folder / f"{name}.log"
        self.agents[name] = self.processes.start([sys.executable, "-m", *module], log, variables)

    def _start_group(self, rank: int, program: tuple[str, ...]) -> None:
        """Start one process, a replica group of torchft; start another one when it ends."""
        variables = {
            **_with_torchft(),
            "BENCHMARK_NODE": "a",
            "OMP_NUM_THREADS": "1",
            "LOCAL_RANK": f"{rank}",
            "TORCHFT_LIGHTHOUSE": f"http://{self.endpoint}",
        }
        child = self.processes.start([sys.executable, *program], self.processes.folder / f"group{rank}.log", variables)

        def replace(_: object) -> None:
            if not self._ended:
                self._start_group(rank, program)

        child.ended.add_done_callback(replace)


def _with_torchft() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(installed("torchft", TORCHFT_VERSION)), *sys.path])}


@contextlib.asynccontextmanager
async def running(
    launcher: str, where: str, *, workers: int, limit: float, settle: float, binary: Path, flags: tuple[str, ...] = ()
) -> AsyncIterator[Run]:
    """Provide a run whose agents are not started yet; all its processes end with the block."""
    async with ProcessTree() as tree:
        (tree.folder / "events").mkdir()
        etcd = BreakableEtcd(tree, binary, free_ports(2))
        endpoint = etcd.endpoint
        if launcher in {IN_PLACE, RESTARTS}:
            await etcd.start()
        elif launcher == TORCHFT:
            arguments = [f"--bind={endpoint}", "--min_replicas=1", "--join_timeout_ms=100", "--quorum_tick_ms=10"]
            arguments += ["--heartbeat_timeout_ms=1000"]
            command = [sys.executable, _LIGHTHOUSE, *arguments]
            tree.start(command, tree.folder / "lighthouse.log", _with_torchft())
        run = Run(tree, launcher, where, endpoint, workers, limit, settle, flags)
        try:
            yield run
        finally:
            run._ended = True  # noqa: SLF001 - of this module
