"""Starting processes and reaping them, on the event loop.

While a :class:`Reaper` is open, the process is a *subreaper*: a worker that is forked twice becomes its child, as if it
had started the worker itself, and so do the worker's orphans. Each child is watched through a pidfd, so an end is known
within a millisecond, nothing polls, and no id can be taken for another process that was given the same number.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.agent import prctl
from torchelastic.agent.process_table import ProcessEntry, Table, read_process, read_table
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_SLOW_DEATH: Final = 5.0
_UNKNOWN: Final = 255
_FIRST_FREE_DESCRIPTOR: Final = 64
_TITLE_ROOM: Final = " " * 512
"""An argument that makes room for a title: see :mod:`torchelastic.agent.title`."""

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[2])


class Child:
    """A child of this process, which leads a process group: what is left of that is killed when the child ends.

    Attributes:
        pid: its id, which stays its own until it is reaped.
        ended: gets its exit code, or the negative number of the signal that ended it.
        end_time: when it was reaped, by the loop's clock; 0 while it runs.
    """

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = loop.create_future()
        self.end_time = 0.0
        self._loop = loop
        self._pidfd = os.pidfd_open(pid)
        loop.add_reader(self._pidfd, self.reap)

    @property
    def running(self) -> bool:
        """Whether it has not been reaped yet."""
        return not self.ended.done()

    def reap(self) -> None:
        """Take its exit status if it has ended."""
        if self.ended.done():
            return
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return
            # As long as it is not reaped, its id is that of its process group and of no other.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:  # somebody else in this process waited for all children
            exit_code = _UNKNOWN
        else:
            exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self.forget()
        self.end_time = self._loop.time()
        self.ended.set_result(exit_code)

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> None:
        """Stop watching it."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class Reaper:
    """The children of this process that it knows, and the orphans that it inherits; a context manager.

    Args:
        alone: this process has no children but those that it is told of, so any other is an orphan, to be reaped. False
            where the process is somebody else's program, whose own children are not touched.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        self._children: dict[int, Child] = {}
        self._loop: asyncio.AbstractEventLoop
        self._was_subreaper = False
        self._adopting = 0
        self._settled = asyncio.Event()
        self._settled.set()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (OSError, AttributeError):
            raise SettingsError("torchelastic needs Linux 5.4 or later: this kernel has no pidfd_open.") from None
        self._was_subreaper = prctl.is_subreaper()
        prctl.set_subreaper(on=True)
        if self.alone:
            self._loop.add_signal_handler(signal.SIGCHLD, self.sweep)
            self.sweep()
        elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # Inherited from the process that started this one. It would have the kernel throw exit statuses away.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        if self.alone:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        for child in self._children.values():
            child.forget()
        self._children.clear()
        prctl.set_subreaper(on=self._was_subreaper)

    @contextlib.contextmanager
    def adopting(self) -> Iterator[None]:
        """While children are on their way whose ids are not known yet, no unknown child is taken for an orphan."""
        self._adopting += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._adopting -= 1
            if not self._adopting:
                self._settled.set()
                if self.alone:
                    self.sweep()

    def adopt(self, pid: int) -> Child:
        """Watch a child of this process, running or already dead."""
        child = Child(pid, self._loop)
        self._children[pid] = child
        child.ended.add_done_callback(lambda _: self._children.pop(pid, None))
        return child

    def knows(self, pid: int) -> bool:
        """Whether this is a child that was adopted and is not reaped yet."""
        return pid in self._children

    def sweep(self) -> None:
        """Reap all that is dead, orphans too where this process is alone."""
        while (status := _wait(os.P_ALL, 0, os.WNOWAIT)) is not None:
            child = self._children.get(status.si_pid)
            if child is not None:
                child.reap()
            elif self._adopting or not self.alone:
                return
            else:
                self.reap_orphan(status.si_pid)

    def reap_orphan(self, pid: int) -> None:
        """Reap a dead child that was never adopted."""
        if pid not in self._children:
            _wait(os.P_PID, pid, 0)

    async def kill_all(self, select: Callable[[Table], Iterable[int]]) -> None:
        """Kill what the selection finds, again and again until it finds nothing that lives; reap what is ours of it.

        Args:
            select: picks the ids of processes from a table; no child is on its way then whose id is not known yet.
        """
        refused: set[ProcessEntry] = set()
        known: set[tuple[int, int]] = set()
        while True:
            await self._settled.wait()
            table = read_table()
            chosen = [table[pid] for pid in select(table) if pid in table]
            chosen.sort(key=lambda entry: (entry.started, entry.pid))  # parents first: a shell would tell of its child
            known.update((entry.pid, entry.started) for entry in chosen)
            for entry in table.values():  # little tells of the dead whose they were, so those killed here are known
                if entry.dead and entry.parent == os.getpid() and (entry.pid, entry.started) in known:
                    self.reap_orphan(entry.pid)
            living = [entry for entry in chosen if not entry.dead and entry not in refused]
            if not living:
                return
            done = await asyncio.gather(*(self._kill(entry) for entry in living))
            refused.update(entry for entry, killed in zip(living, done, strict=True) if not killed)

    async def _kill(self, entry: ProcessEntry) -> bool:
        try:
            pidfd = os.pidfd_open(entry.pid)
        except ProcessLookupError:
            return True
        over = self._loop.create_future()
        try:
            now = read_process(entry.pid)
            if now is None or now.started != entry.started:
                return True
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._loop.add_reader(pidfd, _set, over)
            await self._death(entry.pid, over)
        except ProcessLookupError:
            return True
        except PermissionError:
            logger.warning(
                "Process %d, which a worker left behind, runs as another user and cannot be ended.", entry.pid
            )
            return False
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        return True

    async def _death(self, pid: int, over: asyncio.Future[None]) -> None:
        done, _ = await asyncio.wait([over], timeout=_SLOW_DEATH)
        if not done:
            logger.warning("Process %d was sent SIGKILL and still runs: the kernel holds it, in a driver perhaps.", pid)
            await over


def _set(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def _wait(kind: int, pid: int, options: int) -> os.waitid_result | None:
    try:
        return os.waitid(kind, pid, options | os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None


def spawn(argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
    """Start a process that leads its own session, with all signals at their defaults and nothing blocked.

    Args:
        argv: the executable's path and its arguments.
        environment: its whole environment.
        descriptors: which of our descriptors it gets, by the number that it knows them by.

    Returns:
        Its id.
    """
    with contextlib.ExitStack() as stack:
        actions = []
        for target, source in descriptors.items():
            # Out of the way of the targets, so that none is overwritten before it is copied.
            copy = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_DESCRIPTOR)
            stack.callback(os.close, copy)
            actions.append((os.POSIX_SPAWN_DUP2, copy, target))
        return os.posix_spawn(
            argv[0],
            [*argv],
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )


def python_code(module: str, *, minimal: bool = False) -> list[str]:
    """The command that runs ``main()`` of one of our modules in this interpreter, apart from the user's files.

    Args:
        module: the module's full name.
        minimal: without site-packages and without regard to PYTHON* variables, for a start in a few milliseconds.
    """
    start = f"from {module} import main; main()"
    if minimal:
        return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); {start}"]
    # With -c, the working directory is looked in first: a file there must not take the place of a module of ours.
    return [sys.executable, "-c", f"import sys; sys.flags.safe_path or sys.path.pop(0); {start}", _TITLE_ROOM]
