"""What the workers of a benchmark tell (:mod:`benchmarks.programs.worker`), through a named pipe: nothing is polled."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torchelastic.agent.workers.processes import Child


class Beat(msgspec.Struct, frozen=True):
    """A sign of life of one worker. All times are the monotonic clock's.

    Attributes:
        node: its agent, as the benchmark calls it.
        pid: its process id.
        round: of the run, 0 under a launcher that has none.
        rank: its rank.
        world: how many workers train together.
        began: when the first line of its program ran.
        imported: when torch was imported.
        met: when its process group stood.
        reduced: when it was past its first all-reduce.
        at: when it was past the all-reduce that it tells of.
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
    """What was waited for did not come; the message says why."""


class Beats:
    """All that has been told; an async context manager.

    Args:
        pipe: where the named pipe is made.

    Attributes:
        pipe: its path.
        told: all beats in their order.
    """

    def __init__(self, pipe: Path) -> None:
        self.pipe = pipe
        self.told: list[Beat] = []
        self._rest = b""
        self._descriptor = -1
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        os.mkfifo(self.pipe)
        # For writing too, so that it never ends: there are times without any worker.
        self._descriptor = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.pipe.unlink(missing_ok=True)

    def worker_environment(self, node: str, *, every: float = 0.0, timeout: float) -> dict[str, str]:
        """What the workers of one agent need in their environment.

        Args:
            node: what the agent is called.
            every: seconds between beats, 0 for the first one only.
            timeout: of their process group, in seconds.
        """
        return {
            "BENCHMARK_BEATS": str(self.pipe),
            "BENCHMARK_NODE": node,
            "BENCHMARK_EVERY": f"{every}",
            "BENCHMARK_TIMEOUT": f"{timeout}",
        }

    def latest(self, node: str) -> Beat | None:
        """The last beat of a node."""
        return next((beat for beat in reversed(self.told) if beat.node == node), None)

    async def until(
        self, found: Callable[[], Sequence[Beat] | None], *, limit: float, agents: Iterable[Child] = ()
    ) -> Sequence[Beat]:
        """Wait for beats.

        Args:
            found: looks whether they are there.
            limit: seconds to wait.
            agents: when one of them has ended, they will not come.

        Raises:
            Missing: they did not come.
        """
        watched = list(agents)
        wake = self._more.set
        for agent in watched:
            agent.ended.add_done_callback(lambda _: wake())
        try:
            async with asyncio.timeout(limit):
                while True:
                    self._more.clear()
                    if (beats := found()) is not None:
                        return beats
                    for agent in watched:
                        if not agent.running:
                            raise Missing(f"an agent that was needed ended with exit code {agent.ended.result()}")
                    await self._more.wait()
        except TimeoutError:
            raise Missing(f"not within {limit:g} s") from None

    async def all_of(
        self, nodes: Iterable[str], *, since: float, limit: float, agents: Iterable[Child] = ()
    ) -> Sequence[Beat]:
        """Wait until a worker of each of these nodes, begun since then, is past an all-reduce with those of the others.

        Args:
            nodes: which make up the whole world, one worker each.
            since: by the monotonic clock.
            limit: seconds to wait.
            agents: when one of them has ended, they will not come.

        Raises:
            Missing: they did not come.
        """
        wanted = set(nodes)

        def found() -> Sequence[Beat] | None:
            first: dict[str, Beat] = {}
            for beat in self.told:
                if beat.began > since and beat.world == len(wanted) and beat.node in wanted:
                    first.setdefault(beat.node, beat)
            return list(first.values()) if first.keys() == wanted else None

        return await self.until(found, limit=limit, agents=agents)

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._descriptor, 1 << 16)).split(b"\n")
        self.told += [msgspec.json.decode(line, type=Beat) for line in lines]
        self._more.set()
