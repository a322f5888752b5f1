"""Commands that a user types while a job runs on this machine, on a terminal or with output to a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import sys
import termios
from typing import TYPE_CHECKING, Self

from tests.support.local_runs import LIMIT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


SECOND_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "ELASTICJOB_HOME": str(home)}


@contextlib.asynccontextmanager
async def typed(home: Path, *argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command beside the job, and kill the command after the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "elastic_operator.cli.main", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(home),
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def answer(home: Path, *argv: str) -> tuple[int, str, str]:
    """Run a command, and return its exit code and its output on stdout and stderr."""
    async with typed(home, *argv) as process, asyncio.timeout(LIMIT):
        out, err = await process.communicate()
        return await process.wait(), out.decode(), err.decode()


class Terminal:
    """A command on a terminal of 80 columns and 24 lines, with its output; ``program`` has the arguments of Python."""

    program: Sequence[str] = ("-m", "elastic_operator.cli.main")

    def __init__(self, home: Path, *argv: str) -> None:
        self._argv = argv
        self._environ = {**environment(home), "TERM": "xterm-256color"}
        self._environ.pop("NO_COLOR", None)
        self.screen = ""
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._side, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.program,
            *self._argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=self._environ,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self._side, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._side)
        os.close(self._side)

    def _read(self) -> None:
        try:
            self.screen += os.read(self._side, 1 << 16).decode(errors="replace")
        except OSError:  # the command has closed its side
            asyncio.get_running_loop().remove_reader(self._side)
        self._more.set()

    def type(self, text: str) -> None:
        """Type text; "\\x03" is Ctrl-C if the command has a controlling terminal."""
        os.write(self._side, text.encode())

    async def shows(self, text: str) -> None:
        """Wait until the command has written this text."""
        try:
            async with asyncio.timeout(LIMIT):
                while text not in self.screen:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} was not shown, but this was:\n{self.screen}") from None

    async def exit_code(self) -> int:
        async with asyncio.timeout(LIMIT):
            return await self.process.wait()
