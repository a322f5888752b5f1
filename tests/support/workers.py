"""Real workers that run a source text of the test in a new round."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

from torchelastic.agent.workers.pool import WorkerGroup, Workers
from torchelastic.agent.workers.process_tree import read_process, read_table, with_descendants
from torchelastic.config.settings import AgentSettings, LogSettings, Program, ProgramKind, RendezvousSettings
from torchelastic.protocol.records import SizeRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from torchelastic.agent.failures import WorkerExit

ANY_PROGRAM = Program(ProgramKind.SCRIPT, (str(Path(__file__).with_name("any_program.py")),))

LIMIT = 180.0
"""The limit of each wait in seconds, even on a busy machine; no measurement depends on it."""


_exits: WeakKeyDictionary[WorkerGroup, asyncio.Queue[WorkerExit]] = WeakKeyDictionary()


def workers_of(
    program: Program, logs: LogSettings | None = None, count: int = 1, *, owns_process: bool = False
) -> Workers:
    """Return the workers of an agent, as a context manager that is not entered yet."""
    settings = AgentSettings(
        rendezvous=RendezvousSettings("tests", SizeRecord(min=1, max=1)),
        store=None,
        node_name="here",
        address="127.0.0.1",
        program=program,
        workers=count,
        logs=logs or LogSettings(),
    )
    return Workers(settings, owns_process=owns_process)


async def start_workers(
    workers: Workers, *environments: Mapping[str, str], round: int = 1, listener: socket.socket | None = None
) -> WorkerGroup:
    """Start a round with a worker for each environment, to which its ranks are added."""
    exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
    ranked = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, env in enumerate(environments)]
    group = await workers.start(round, ranked, exits.put_nowait, listener)
    _exits[group] = exits
    return group


@dataclass
class WorkerRunner:
    """Workers of :data:`ANY_PROGRAM`, one group at a time.

    Args:
        folder: the folder of programs, logs, and files that the programs write.
    """

    folder: Path
    round: int = 0
    group: WorkerGroup | None = None
    workers: Workers = field(init=False)

    async def __aenter__(self) -> Self:
        self.workers = workers_of(ANY_PROGRAM, LogSettings(self.folder / "logs", combined=True), 2)
        await self.workers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.workers.__aexit__(kind, error, trace)

    async def clear(self) -> None:
        """Stop the workers of the previous test."""
        if self.group is not None:
            await self.group.stop(0)
        self.group = None

    async def start(
        self, source: str, count: int = 1, *, listener: socket.socket | None = None, **env: str
    ) -> WorkerGroup:
        """Start workers that run a source text; HERE is the folder of their round."""
        self.round += 1
        here = self.here
        here.mkdir()
        program = here / "program.py"
        program.write_text(dedent(source))
        common = {"PROGRAM": str(program), "HERE": str(here), "WORLD_SIZE": str(count), **env}
        self.group = await start_workers(self.workers, *[common] * count, round=self.round, listener=listener)
        return self.group

    async def start_with_store(self, source: str, count: int = 2, **env: str) -> WorkerGroup:
        """Start workers with a TCPStore."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            store_env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            return await self.start(source, count, listener=listener, **store_env, **env)

    async def end_of(self, source: str, **env: str) -> WorkerExit:
        """Run one worker until it exits, and return its exit."""
        return await next_exit(await self.start(source, **env))

    @property
    def here(self) -> Path:
        """The folder of the current round."""
        return self.folder / f"round_{self.round}"

    def log(self, rank: int = 0) -> str:
        """Return the output of a worker of the current round."""
        return (self.folder / f"logs/round_{self.round}/rank_{rank}/output.log").read_text()

    async def text_of(self, name: str) -> str:
        """Wait for a file in the program's folder, and return its text; see :data:`TELL`."""
        return await text_of(self.here / name)


TELL = """
import os
from pathlib import Path

def tell(name, text=""):
    here = Path(os.environ["HERE"])
    (here / f"{name}.part").write_text(str(text))
    (here / f"{name}.part").rename(here / name)
"""
"""Source of a function that writes a file atomically, for :meth:`WorkerRunner.text_of`."""


async def poll_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; only for files and exits of other processes, which cannot be awaited."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.005)


async def text_of(path: Path) -> str:
    """Wait for a file, and return its text."""
    await poll_until(path.exists)
    return path.read_text()


async def next_exit(group: WorkerGroup) -> WorkerExit:
    """Wait for the next exit of a worker."""
    async with asyncio.timeout(LIMIT):
        return await _exits[group].get()


def titled(agent: int, title: str) -> list[int]:
    """Return the live processes of an agent with this title."""
    table, found = read_table(), []
    for pid in with_descendants(table, [agent]):
        with contextlib.suppress(OSError):  # it has just exited
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not table[pid].dead and command.startswith(f"torchelastic: {title}".encode()):
                found.append(pid)
    return found


def lives(pid: int) -> bool:
    """Return whether the process exists and has not exited."""
    entry = read_process(pid)
    return entry is not None and not entry.dead
