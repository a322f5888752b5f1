"""Start processes, and reap them on the event loop.

While a :class:`Reaper` is open, this process is a *subreaper*: a worker that is forked twice becomes its child, and so
do the worker's orphans. Each child is watched through a pidfd, so its end is known at once and nothing polls.
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

from torchelastic.agent.workers.linux import (
    TITLE_ROOM,
    ProcessEntry,
    Table,
    has_mark,
    is_subreaper,
    read_process,
    read_table,
    set_subreaper,
    with_descendants,
)
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_SLOW_DEATH: Final = 5.0
_UNKNOWN: Final = 255
_FIRST_FREE_DESCRIPTOR: Final = 64
_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])


class Child:
    """A child process that leads a process group; the rest of the group is killed when the child ends.

    Attributes:
        pid: its id.
        ended: its exit code, or the negative number of the signal that ended it.
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
        """Whether it has not been reaped."""
        return not self.ended.done()

    def reap(self) -> None:
        """Take its exit status if it has ended."""
        if self.ended.done():
            return
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return
            # Until it is reaped, the id of its process group cannot be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:  # other code in this process waited for all children
            exit_code = _UNKNOWN
        else:
            exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self.forget()
        self.end_time = self._loop.time()
        self.ended.set_result(exit_code)

    def signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
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
    """The known children of this process, and the orphans that it inherits; a context manager.

    Args:
        owns_process: this process has no children of its own, so any unknown child is an orphan to be reaped. False in
            another program's process, whose children are not touched.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self.owns_process = owns_process
        self._children: dict[int, Child] = {}
        self._loop: asyncio.AbstractEventLoop
        self._was_subreaper = False
        self._settled = asyncio.Event()
        self._settled.set()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (OSError, AttributeError):
            raise SettingsError("torchelastic needs Linux 5.4 or later: this kernel has no pidfd_open.") from None
        self._was_subreaper = is_subreaper()
        set_subreaper(on=True)
        if self.owns_process:
            self._loop.add_signal_handler(signal.SIGCHLD, self._sweep)
            self._sweep()
        elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the kernel would discard exit statuses
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        if self.owns_process:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        for child in self._children.values():
            child.forget()
        self._children.clear()
        set_subreaper(on=self._was_subreaper)

    @contextlib.contextmanager
    def adopting(self) -> Iterator[None]:
        """A block in which children arrive whose ids are not known yet; no unknown child is taken for an orphan."""
        self._settled.clear()
        try:
            yield
        finally:
            self._settled.set()
            if self.owns_process:
                self._sweep()

    def adopt(self, pid: int) -> Child:
        """Watch a child of this process, running or already dead."""
        child = Child(pid, self._loop)
        self._children[pid] = child
        child.ended.add_done_callback(lambda _: self._children.pop(pid, None))
        return child

    def _sweep(self) -> None:
        """Reap all dead children, known or orphans."""
        while (status := _wait(os.P_ALL, 0, os.WNOWAIT)) is not None:
            child = self._children.get(status.si_pid)
            if child is not None:
                child.reap()
            elif not self._settled.is_set():
                return
            else:
                _wait(os.P_PID, status.si_pid, 0)

    async def kill_trees(self, children: Sequence[Child], mark: str) -> None:
        """Kill these children and all processes that they have started, and reap those that are children of ours.

        Args:
            children: leaders of sessions.
            mark: the tree mark of their processes.
        """
        if self.owns_process:  # otherwise a process without session and mark is found by its parent alone
            for child in children:
                child.signal(signal.SIGKILL)
        refused: set[ProcessEntry] = set()
        killed: set[tuple[int, int]] = set()
        while True:
            await self._settled.wait()
            table = read_table()
            chosen = [table[pid] for pid in self._trees(table, children, mark)]
            chosen.sort(key=lambda entry: (entry.started, entry.pid))  # parents first: a shell reports a killed child
            killed.update((entry.pid, entry.started) for entry in chosen)
            for entry in table.values():  # the dead have lost their mark, so they are recognized by their start
                if entry.dead and self._is_orphan(entry) and (entry.pid, entry.started) in killed:
                    _wait(os.P_PID, entry.pid, 0)
            living = [entry for entry in chosen if not entry.dead and entry not in refused]
            if not living:
                break
            done = await asyncio.gather(*(self._kill(entry) for entry in living))
            refused.update(entry for entry, success in zip(living, done, strict=True) if not success)
        await asyncio.gather(*(asyncio.shield(child.ended) for child in children))

    def _trees(self, table: Table, children: Sequence[Child], mark: str) -> set[int]:
        sessions = {child.pid for child in children}
        orphans = [entry.pid for entry in table.values() if self._is_orphan(entry)]
        roots = [entry.pid for entry in table.values() if entry.session in sessions]
        roots += [pid for pid in orphans if self.owns_process or has_mark(pid, mark)]
        return with_descendants(table, [*roots, *(child.pid for child in children if child.running)])

    def _is_orphan(self, entry: ProcessEntry) -> bool:
        return entry.parent == os.getpid() and entry.pid not in self._children

    async def _kill(self, entry: ProcessEntry) -> bool:
        try:
            pidfd = os.pidfd_open(entry.pid)
        except ProcessLookupError:
            return True
        ended = asyncio.Event()
        try:
            now = read_process(entry.pid)
            if now is None or now.started != entry.started:
                return True
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._loop.add_reader(pidfd, ended.set)
            try:
                await asyncio.wait_for(ended.wait(), _SLOW_DEATH)
            except TimeoutError:
                logger.warning("Process %d still runs after SIGKILL: the kernel holds it, perhaps a driver.", entry.pid)
                await ended.wait()
        except ProcessLookupError:
            return True
        except PermissionError:
            logger.warning("Process %d, started by a worker, runs as another user and cannot be killed.", entry.pid)
            return False
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        return True


def _wait(kind: int, pid: int, options: int) -> os.waitid_result | None:
    try:
        return os.waitid(kind, pid, options | os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None


def spawn(argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
    """Start a process that leads its own session, with default signal handling; returns its id.

    `descriptors` are ours, by the numbers that they have in the process. Its standard input is empty by default.
    """
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("rb")).fileno()
        actions = []
        for target, source in {0: nothing, **descriptors}.items():
            # A copy with a high number, so that none is overwritten before it is copied.
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
    """Return the command that runs ``main()`` of one of our modules in this interpreter.

    If `minimal`, it starts in a few milliseconds, without site-packages and PYTHON* variables.
    """
    start = f"from {module} import main; main()"
    if minimal:
        return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); {start}"]
    # With -c, the working directory comes first in sys.path: a file there must not replace one of our modules.
    return [sys.executable, "-c", f"import sys; sys.flags.safe_path or sys.path.pop(0); {start}", TITLE_ROOM]
