"""Real workers for tests: any source text, each started in a new round."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Self

from tests.support.agents import until_gone as gone
from torchelastic.agent.workers.linux import read_process
from torchelastic.agent.workers.pool import StoreServer, WorkerGroup, Workers, WorkerStart
from torchelastic.config.settings import LogSettings, Program, ProgramKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torchelastic.agent.failures import WorkerExit

__all__ = [
    "ANY_PROGRAM", "LIMIT", "TELL", "Crew", "eventually", "exit_of", "gone", "lives", "told",
]  # fmt: skip

ANY_PROGRAM = Program(ProgramKind.SCRIPT, (str(Path(__file__).with_name("any_program.py")),))

LIMIT = 180.0
"""Seconds after which a test gives up; no measurement uses it."""


@dataclass
class Crew:
    """Workers of :data:`ANY_PROGRAM`, one group at a time.

    Args:
        folder: for programs, logs and files that the programs write.
    """

    folder: Path
    round: int = 0
    group: WorkerGroup | None = None
    store: StoreServer | None = None
    workers: Workers = field(init=False)

    async def __aenter__(self) -> Self:
        self.workers = Workers(ANY_PROGRAM, LogSettings(self.folder / "logs"), local_world_size=2)
        await self.workers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.workers.__aexit__(kind, error, trace)

    async def clear(self) -> None:
        """End what the previous test has left."""
        if self.group is not None:
            await self.group.stop(0)
        if self.store is not None:
            await self.store.close()
        self.group = self.store = None

    async def start(self, source: str, count: int = 1, **env: str) -> WorkerGroup:
        """Start workers of a source text; HERE is the folder of their round."""
        self.round += 1
        here = self.here
        here.mkdir()
        program = here / "program.py"
        program.write_text(dedent(source))
        common = {"PROGRAM": str(program), "HERE": str(here), "WORLD_SIZE": str(count), **env}
        starts = [
            WorkerStart(rank, rank, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
        ]
        self.group = await self.workers.start(self.round, starts)
        return self.group

    async def start_with_store(self, source: str, count: int = 2, **env: str) -> WorkerGroup:
        """Start workers with a TCPStore."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.store = await self.workers.serve_store(listener)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return await self.start(source, count, **meeting, **env)

    async def end_of(self, source: str, **env: str) -> WorkerExit:
        """Run one worker to its end."""
        return await exit_of(await self.start(source, **env))

    @property
    def here(self) -> Path:
        """The folder of the present round."""
        return self.folder / f"round_{self.round}"

    def log(self, rank: int = 0) -> str:
        """The output of a worker of the present round."""
        return (self.folder / f"logs/round_{self.round}/rank_{rank}/output.log").read_text()

    async def told(self, name: str) -> str:
        """The contents of a file in the program's folder, once it exists: see :data:`TELL`."""
        return await told(self.here / name)


TELL = """
import os
from pathlib import Path

def tell(name, text=""):
    here = Path(os.environ["HERE"])
    (here / f"{name}.part").write_text(str(text))
    (here / f"{name}.part").rename(here / name)
"""
"""Source of a function that writes a file atomically, for :meth:`Crew.told`."""


async def eventually(condition: Callable[[], object]) -> None:
    """Return when the condition holds; for files and exits of other processes, which cannot be awaited."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)


async def told(path: Path) -> str:
    """The text of a file, once it exists."""
    await eventually(path.exists)
    return path.read_text()


async def exit_of(group: WorkerGroup) -> WorkerExit:
    """The next exit, with a time limit."""
    async with asyncio.timeout(LIMIT):
        exit_ = await group.next_exit()
    assert exit_ is not None
    return exit_


def lives(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    entry = read_process(pid)
    return entry is not None and not entry.dead
