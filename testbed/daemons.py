"""The processes of a cluster, each with a log; they are killed when the process that started them exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
from typing import TYPE_CHECKING

import aiohttp

from elastic_operator.local.pdeathsig import with_pdeathsig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

START_LIMIT = 90.0
"""Seconds within which a part is ready, even on a busy machine."""

_POLL = 0.05
"""Seconds between two readiness checks; there is no event to wait for."""

_TAIL = 4000
"""Number of characters of the log in the error about a process that has exited."""


class DaemonDied(RuntimeError):  # noqa: N818 - the name is the reason
    """A part of the cluster exited, or was not ready in time.

    Attributes:
        log: the end of its log.
    """

    def __init__(self, name: str, what: str, log: str) -> None:
        super().__init__(f"{name} {what}; the end of its log:\n{log}")
        self.log = log


class Daemon:
    """A process that runs until it is killed. The kernel kills it when the thread that started it ends.

    Args:
        argv: the program and its arguments.
        folder: the folder of its log.
        environ: the complete environment of the process.
        name: the name of its log; by default, the name of the program.
    """

    def __init__(self, argv: Sequence[str], *, folder: Path, environ: Mapping[str, str], name: str = "") -> None:
        self.name = name or os.path.basename(argv[0])  # noqa: PTH119 - a word of a command line
        self.log_file = folder / f"{self.name}.log"
        self.argv = argv
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, also again after :meth:`kill`."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} runs already")
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                with_pdeathsig(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=self.log_file.parent,
                start_new_session=True,  # so that Ctrl-C reaches only pytest, which kills the process
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self.process.pid

    def check(self) -> None:
        """Check that the process has not exited by itself.

        Raises:
            DaemonDied: the process has exited.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            raise self.died(f"ended by itself with {code}")

    def died(self, what: str) -> DaemonDied:
        """Return an error about the process, with the end of its log."""
        return DaemonDied(self.name, what, self.log[-_TAIL:])

    @property
    def log(self) -> str:
        """The text of the log."""
        return self.log_file.read_text(errors="replace")

    def pause(self) -> None:
        """Pause the process: connections stay open, without answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def kill_all(daemons: Iterable[Daemon]) -> None:
    """Kill all of these processes, the last one first."""
    for daemon in reversed(list(daemons)):
        daemon.kill()


async def until_ready(probe: Callable[[], Awaitable[object]], *daemons: Daemon) -> None:
    """Wait until a probe returns something true.

    Args:
        probe: called repeatedly.
        daemons: processes that must run meanwhile, because otherwise another server has answered; a timeout is
            reported for the last of them.

    Raises:
        DaemonDied: a process exited, or the probe failed for too long.
    """
    try:
        async with asyncio.timeout(START_LIMIT):
            ready: object = None
            while not ready:
                ready = await probe()
                for daemon in daemons:
                    daemon.check()
                if not ready:
                    await asyncio.sleep(_POLL)
    except TimeoutError:
        raise daemons[-1].died(f"is not ready after {START_LIMIT:.0f} s") from None


@contextlib.asynccontextmanager
async def probing(authority: str | os.PathLike[str], token: str) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Yield a function that returns the text of a GET with status 200, or an empty string for any other status.

    Args:
        authority: the certificate of the API server's authority.
        token: the token of an administrator.
    """
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=authority))
    headers = {"Authorization": f"Bearer {token}"}
    limit = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit) as session:

        async def get(url: str) -> str:
            try:
                async with session.get(url) as response:
                    return (await response.text() or "empty") if response.status == 200 else ""
            except (aiohttp.ClientError, TimeoutError):
                return ""

        yield get
