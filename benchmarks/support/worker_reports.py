"""Reports of the workers of a benchmark (:mod:`benchmarks.recovery.worker`), which they write to a named pipe."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torchelastic.agent.workers.processes import Child


class WorkerReport(msgspec.Struct, frozen=True):
    """A report of one worker. All times are from the monotonic clock.

    Attributes:
        node: the benchmark's name of the worker's agent.
        pid: the worker's process id.
        round: the number of the run's round; 0 under torchrun, which does not number rounds.
        rank: the worker's rank.
        world: the number of workers.
        began: when the first line of the program ran.
        imported: when torch was imported.
        met: when the process group was initialized.
        reduced: when the first all-reduce was done.
        at: when the last all-reduce before the report was done.
    """

    node: str
    pid: int
    round: int
    rank: int
    world: int
    began: float
    imported: float
    met: float
    reduced: float
    at: float


class Missing(Exception):  # noqa: N818 - a finding
    """An awaited event did not happen; the message has the reason."""


class WorkerReports:
    """All reports of the workers; an async context manager.

    Args:
        pipe: the path of the named pipe, which is created.

    Attributes:
        pipe: the path of the named pipe.
        received: all reports so far, in the order of their arrival.
    """

    def __init__(self, pipe: Path) -> None:
        self.pipe = pipe
        self.received: list[WorkerReport] = []
        self._rest = b""
        self._descriptor = -1
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        os.mkfifo(self.pipe)
        # The pipe is also opened for writing, so that reading does not end while there is no worker.
        self._descriptor = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.pipe.unlink(missing_ok=True)

    def worker_environment(self, node: str, *, every: float = 0.0, timeout: float) -> dict[str, str]:
        """Return the environment variables for the workers of one agent.

        Args:
            node: the name of the agent.
            every: seconds between reports; 0 for the first report only.
            timeout: the timeout of the workers' process group, in seconds.
        """
        return {
            "BENCHMARK_REPORTS": str(self.pipe),
            "BENCHMARK_NODE": node,
            "BENCHMARK_EVERY": f"{every}",
            "BENCHMARK_TIMEOUT": f"{timeout}",
        }

    def latest(self, node: str) -> WorkerReport | None:
        """Return the last report of a node."""
        return next((report for report in reversed(self.received) if report.node == node), None)

    async def until(
        self, found: Callable[[], Sequence[WorkerReport] | None], *, limit: float, agents: Iterable[Child] = ()
    ) -> Sequence[WorkerReport]:
        """Wait for reports.

        Args:
            found: returns the reports, or None if they are incomplete.
            limit: seconds to wait.
            agents: the agents that must not exit.

        Raises:
            Missing: the reports were not complete within the limit, or an agent exited.
        """
        watched = list(agents)
        wake = self._more.set
        for agent in watched:
            agent.ended.add_done_callback(lambda _: wake())
        try:
            async with asyncio.timeout(limit):
                while True:
                    self._more.clear()
                    if (reports := found()) is not None:
                        return reports
                    for agent in watched:
                        if not agent.running:
                            raise Missing(f"a required agent exited with code {agent.ended.result()}")
                    await self._more.wait()
        except TimeoutError:
            raise Missing(f"not within {limit:g} s") from None

    async def all_of(
        self, nodes: Iterable[str], *, since: float, limit: float, agents: Iterable[Child] = ()
    ) -> Sequence[WorkerReport]:
        """Wait until new workers of these nodes, and no others, have done an all-reduce together.

        Args:
            nodes: all nodes of the world, with one worker each.
            since: a time of the monotonic clock; workers that began earlier do not count.
            limit: seconds to wait.
            agents: the agents that must not exit.

        Raises:
            Missing: the reports were not complete within the limit, or an agent exited.
        """
        wanted = set(nodes)

        def found() -> Sequence[WorkerReport] | None:
            first: dict[str, WorkerReport] = {}
            for report in self.received:
                if report.began > since and report.world == len(wanted) and report.node in wanted:
                    first.setdefault(report.node, report)
            return list(first.values()) if first.keys() == wanted else None

        return await self.until(found, limit=limit, agents=agents)

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._descriptor, 1 << 16)).split(b"\n")
        self.received += [msgspec.json.decode(line, type=WorkerReport) for line in lines]
        self._more.set()
