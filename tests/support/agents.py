"""Real agents with real workers, started as a user starts them, and their output."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

TIMEOUT = 180.0
"""The limit of each wait in seconds, even on a busy machine; no measurement depends on it."""

MEETING = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
round, rank, world = os.environ["TORCHELASTIC_ROUND"], dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(1))
print(f"round {round} rank {rank} of {world} pid {os.getpid()}", flush=True)
while True:
    stop = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(stop)
    if stop.item():
        break
    time.sleep(0.01)
dist.destroy_process_group()
print(f"rank {rank} is done", flush=True)
"""
"""A program whose workers form a process group, print a line, and run until a file exists."""


class AgentProcess:
    """A ``torchelastic-run`` process and the ``lines`` of its output; it runs within ``async with``.

    Args:
        arguments: the arguments of ``torchelastic-run``.
        env: variables in addition to the test's environment.
        cwd: the agent's working directory.
        within: a command to which the agent's command line is appended.
    """

    program: Sequence[str] = ("-m", "torchelastic.run")
    """The arguments of Python before those of the agent."""

    settings: ClassVar[Mapping[str, str]] = {"PET_PREFIX": "1", "PET_MAX_RESTARTS": "100"}
    """The agent's settings, as in a pod; arguments override them."""

    def __init__(
        self,
        *arguments: str | Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self._within = within
        self._env = {**os.environ, **self.settings, **(env or {})}
        self._cwd = cwd
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._more = asyncio.Condition()
        self._closed = False
        self.lines: list[str] = []

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._within,
            sys.executable,
            *self.program,
            *self._arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._env,
            cwd=self._cwd,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        if self._reading is not None:
            await self._reading

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait_for_line(self, pattern: str, *, since: int = 0) -> re.Match[str]:
        """Wait for a matching line of output, from line ``since`` on; fail with the whole output if there is none."""
        try:
            async with asyncio.timeout(TIMEOUT), self._more:
                position = since
                while True:
                    while position < len(self.lines):
                        if match := re.search(pattern, self.lines[position]):
                            return match
                        position += 1
                    assert not self._closed, f"exited without the line {pattern!r}:\n{self.output}"
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"never printed {pattern!r}:\n{self.output}") from None

    async def wait_until_training(self, *, world: int, since: int = 0) -> int:
        """Wait until a worker has joined a process group of this size, and return its process id."""
        return int((await self.wait_for_line(rf"round \d+ rank \d+ of {world} pid (\d+)", since=since))[1])

    async def code(self) -> int:
        """Wait until the agent exits, and return its exit code."""
        try:
            async with asyncio.timeout(TIMEOUT):
                code = await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"the agent did not exit:\n{self.output}") from None
        if self._reading is not None:
            await self._reading
        return code

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the agent."""
        self.process.send_signal(number)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._more:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self._more.notify_all()
        async with self._more:
            self._closed = True
            self._more.notify_all()


async def until_gone(pid: int) -> None:
    """Wait until a process that is not a child of this process has exited."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            async with asyncio.timeout(TIMEOUT):
                await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)


class WithoutSettings(AgentProcess):
    """A launcher without settings of its own."""

    settings: ClassVar[Mapping[str, str]] = {}

    def __init__(self, module: str, *arguments: str | Path, within: Sequence[str] = ()) -> None:
        self.program = ("-m", module)
        super().__init__(*arguments, within=within)
