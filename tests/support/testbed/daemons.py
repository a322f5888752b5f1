"""The parts of a cluster: processes with a log each, which end with the process that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from elastic_operator.local.pdeathsig import with_pdeathsig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_TAIL = 4000
"""Characters of a log that are shown when its process has ended too early."""


class DaemonDied(RuntimeError):  # noqa: N818 - it says what happened
    """A part of the cluster ended, or is not ready in time.

    Attributes:
        log: the end of its log.
    """

    def __init__(self, name: str, what: str, log: str) -> None:
        super().__init__(f"{name} {what}; the end of its log:\n{log}")
        self.log = log


class Daemon:
    """A process that goes on until it is killed. Must be started in a thread that lives as long as it is to run.

    Args:
        argv: the program and its arguments.
        folder: where its log goes.
        environ: its whole environment.
    """

    def __init__(self, argv: Sequence[str], *, folder: Path, environ: Mapping[str, str]) -> None:
        self.name = os.path.basename(argv[0])  # noqa: PTH119 - the program's name, of a command line
        self.log = folder / f"{self.name}.log"
        self._argv = argv
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, also again after it was killed."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} runs already")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                with_pdeathsig(self._argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=self.log.parent,
                start_new_session=True,  # Ctrl-C is for pytest, which ends them
            )

    @property
    def pid(self) -> int:
        """Of its process."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    def check(self) -> None:
        """See that it has not ended by itself.

        Raises:
            DaemonDied: it has.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            raise self.died(f"ended by itself with {code}")

    def died(self, what: str) -> DaemonDied:
        """The error that says what is wrong with it, and shows its log."""
        return DaemonDied(self.name, what, self.log.read_text(errors="replace")[-_TAIL:])

    def pause(self) -> None:
        """Have it stand still: connections stay, nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL. Nothing happens where it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def kill_all(daemons: Iterable[Daemon]) -> None:
    """End all of them, the last one first."""
    for daemon in reversed(list(daemons)):
        daemon.kill()
