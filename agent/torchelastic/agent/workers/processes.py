"""Start processes, and reap them on the event loop.

While a :class:`Reaper` is open, this process is a *subreaper*: the kernel makes it the parent of workers that are
forked twice, and of orphans that a worker leaves. A pidfd reports the exit of each child at once, without polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import posix
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from torchelastic.agent.workers.process_tree import (
    CLEANUP_TIMEOUT,
    SESSIONS,
    TITLE_ROOM,
    ProcessEntry,
    Table,
    has_mark,
    read_process,
    read_table,
    removes_shared_memory,
    set_subreaper,
    with_descendants,
)
from torchelastic.config.machine import control_groups
from torchelastic.connections import former_descriptor_limit
from torchelastic.errors import SettingsError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_KILL_TIMEOUT: Final = 5.0
_RESTART_DELAY: Final = 0.2
_UNKNOWN: Final = 255
_FIRST_FREE_DESCRIPTOR: Final = 64
_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])


class MemoryKills:
    """Counts the kernel's out-of-memory kills in this process's control group, or else on the machine."""

    def __init__(self, root: Path = Path("/")) -> None:
        names = ("memory.events", "memory.oom_control")  # of versions 2 and 1
        self._files = [folder / name for folder in control_groups("memory", root) for name in names]
        self._files = [path for path in self._files if path.exists()] + [root / "proc/vmstat"]

    def count(self) -> int:
        """Return the number of kills so far; 0 if there is no counter."""
        for path in self._files:
            with contextlib.suppress(OSError):
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


class Child:
    """A child process that leads a session; when the child exits, the rest of the session is killed.

    Only helpers that remove the child's shared memory continue.

    Attributes:
        pid: the process id.
        ended: a future with the exit code, or with the negative number of the signal that killed the process.
        began: when the process began its work, on the loop's clock.
        end_time: when the process was reaped, on the same clock; 0 while it runs.
    """

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop, memory_kills: MemoryKills) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = loop.create_future()
        self.end_time = 0.0
        self._loop = loop
        self._memory_kills = memory_kills
        self._pidfd = os.pidfd_open(pid)
        self.begin()
        loop.add_reader(self._pidfd, self.reap)

    def begin(self) -> None:
        """Record the start of the work: earlier out-of-memory kills do not explain the exit of the process."""
        self.began = self._loop.time()
        self._killed_before = self._memory_kills.count()

    @property
    def running(self) -> bool:
        """Whether the process has not been reaped."""
        return not self.ended.done()

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed the process because memory ran out."""
        killed = self.ended.done() and self.ended.result() == -signal.SIGKILL
        return killed and self._memory_kills.count() > self._killed_before

    def reap(self) -> None:
        """If the process has exited, reap it and set `ended`."""
        if self.ended.done():
            return
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            self._kill_session()
        except ChildProcessError:  # other code in this process has reaped the child
            exit_code = _UNKNOWN
        else:
            exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.end_time = self._loop.time()
        self.ended.set_result(exit_code)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, 0)  # fails if no process is left, which is faster than reading the table
            for entry in read_table().values():
                if entry.session == self.pid and not removes_shared_memory(entry.pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(entry.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


class Reaper:
    """The known children of this process, and the orphans that it inherits; kills the known children at its exit.

    Args:
        owns_process: whether this process has no other children, so that any unknown child is an orphan to be reaped.
            False in another program's process, whose children are not touched.

    Attributes:
        closing: whether the reaper is closing, so that no child should be replaced.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self.owns_process = owns_process
        self.closing = False
        self._memory_kills = MemoryKills()
        self._children: dict[int, Child] = {}
        self._daemons: set[int] = set()
        self._cleanups: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._settled = asyncio.Event()
        self._settled.set()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (OSError, AttributeError):
            raise SettingsError("torchelastic needs Linux 5.4 or later: this kernel has no pidfd_open.") from None
        set_subreaper(on=True)
        if self.owns_process:
            self._loop.add_signal_handler(signal.SIGCHLD, self._sweep)
            self._sweep()
        elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the kernel would discard exit statuses
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closing = True
        children = [*self._children.values()]
        for child in children:
            child.signal(signal.SIGKILL)
        await asyncio.gather(*(asyncio.shield(child.ended) for child in children), *self._cleanups)
        if self.owns_process:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        set_subreaper(on=False)

    @contextlib.contextmanager
    def adopting(self) -> Iterator[None]:
        """Return a context manager in whose block unknown children are not reaped, because they may be new."""
        self._settled.clear()
        try:
            yield
        finally:
            self._settled.set()
            if self.owns_process:
                self._sweep()

    def adopt(self, pid: int) -> Child:
        """Watch a child of this process; it may have exited."""
        child = Child(pid, self._loop, self._memory_kills)
        self._children[pid] = child
        child.ended.add_done_callback(lambda _: self._children.pop(pid, None))
        return child

    def spare(self, daemon: int) -> None:
        """Let the session of this child continue when workers, or this process, end."""
        self._daemons.add(daemon)

    def _sweep(self) -> None:
        """Reap all exited children, known ones and orphans."""
        while (status := _wait(os.P_ALL, 0, os.WNOWAIT)) is not None:
            child = self._children.get(status.si_pid)
            if child is not None:
                child.reap()
            elif not self._settled.is_set():
                return
            else:
                _wait(os.P_PID, status.si_pid, 0)

    async def kill_trees(self, children: Sequence[Child], mark: str, *, only_sessions: bool = False) -> None:
        """Kill these children and all processes that they started, and reap those that are children of this process.

        Helpers that remove shared memory have a moment more, in which the next children may already run. With
        `only_sessions`, processes that have started sessions of their own continue.
        """
        if self.owns_process:  # in another program, a living parent may be the only way to find a process
            for child in children:
                child.signal(signal.SIGKILL)
        refused: set[ProcessEntry] = set()
        killed: set[tuple[int, int]] = set()
        while True:
            await self._settled.wait()
            table = read_table()
            chosen = [table[pid] for pid in self._trees(table, children, mark, only_sessions=only_sessions)]
            chosen.sort(key=lambda entry: (entry.started, entry.pid))  # parents first: shells report killed children
            killed.update((entry.pid, entry.started) for entry in chosen)
            for entry in table.values():  # an exited process has no mark: its start time identifies it
                if entry.dead and self._is_orphan(entry) and (entry.pid, entry.started) in killed:
                    _wait(os.P_PID, entry.pid, 0)
            living = [entry for entry in chosen if not entry.dead and entry not in refused]
            others = [entry for entry in living if not removes_shared_memory(entry.pid)]
            if not others:
                break
            done = await asyncio.gather(*(self._kill(entry) for entry in others))
            refused.update(entry for entry, success in zip(others, done, strict=True) if not success)
        for entry in living:
            task = asyncio.create_task(self._end_cleanup(entry))
            self._cleanups.add(task)
            task.add_done_callback(self._cleanups.discard)
        await asyncio.gather(*(asyncio.shield(child.ended) for child in children))

    def _trees(self, table: Table, children: Sequence[Child], mark: str, *, only_sessions: bool) -> set[int]:
        sessions = {child.pid for child in children}
        roots = [entry.pid for entry in table.values() if entry.session in sessions]
        if only_sessions:
            return {*roots}
        orphans = [entry.pid for entry in table.values() if self._is_orphan(entry)]
        roots += [pid for pid in orphans if self.owns_process or has_mark(pid, mark)]
        return with_descendants(table, [*roots, *(child.pid for child in children if child.running)])

    def _is_orphan(self, entry: ProcessEntry) -> bool:
        unknown = entry.pid not in self._children and entry.session not in self._daemons
        return unknown and entry.parent == os.getpid()

    async def _end_cleanup(self, entry: ProcessEntry) -> None:
        await self._kill(entry, grace=CLEANUP_TIMEOUT)
        _wait(os.P_PID, entry.pid, 0)

    async def _kill(self, entry: ProcessEntry, grace: float = 0.0) -> bool:
        try:
            pidfd = os.pidfd_open(entry.pid)
        except ProcessLookupError:
            return True
        ended = asyncio.Event()
        try:
            now = read_process(entry.pid)
            if now is None or now.started != entry.started:
                return True
            self._loop.add_reader(pidfd, ended.set)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), grace)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            try:
                await asyncio.wait_for(ended.wait(), _KILL_TIMEOUT)
            except TimeoutError:
                logger.warning("Process %d still runs after SIGKILL: the kernel or a driver blocks it.", entry.pid)
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


def ignored_signals() -> frozenset[signal.Signals]:
    """Return the signals that this process and the processes that it starts ignore: SIGHUP under nohup, else none."""
    return frozenset({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ())


def spawn(argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
    """Start a process that leads its own session, with default signal handling (SIGHUP stays ignored); return its id.

    `descriptors` maps descriptors of the new process to those of this process. The standard input is empty by default.
    """
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("rb")).fileno()
        actions = []
        for target, source in {0: nothing, **descriptors}.items():
            # A copy with a high number, so that no descriptor is overwritten before it is copied.
            copy = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_DESCRIPTOR)
            stack.callback(os.close, copy)
            actions.append((os.POSIX_SPAWN_DUP2, copy, target))
        stack.enter_context(former_descriptor_limit())
        # A debugger replaces os.posix_spawn, to add itself to each new process. This one must stay as it is.
        return posix.posix_spawn(
            argv[0],
            [*argv],
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - ignored_signals(),
        )


def python_code(module: str, *, minimal: bool = False) -> list[str]:
    """Return the command that runs ``main()`` of a torchelastic module in this interpreter.

    If `minimal`, the command starts in a few milliseconds, without site-packages and PYTHON* variables.
    """
    start = f"from {module} import main; main()"
    if minimal:
        return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); {start}"]
    # With -c, the working directory comes first in sys.path: a file there must not replace a module.
    return [sys.executable, "-c", f"import sys; sys.flags.safe_path or sys.path.pop(0); {start}", TITLE_ROOM]


class Watchdog:
    """A small process that kills the workers' process trees when the agent exits: see :mod:`.linux`.

    It then removes `folders`, of which the first one is private.
    """

    def __init__(self, reaper: Reaper, mark: str, folders: Sequence[Path]) -> None:
        self._reaper = reaper
        self._arguments = [str(os.getpid()), mark, *map(str, folders)]
        self._sessions = folders[0] / SESSIONS

    def start(self) -> None:
        """Start the process, and restart it if it exits before the reaper closes."""
        command = python_code("torchelastic.agent.workers.process_tree", minimal=True)
        try:
            pid = spawn([*command, *self._arguments], {}, {1: 2, 2: 2})
        except OSError as error:
            low = error.errno in {errno.EINVAL, errno.EMFILE}
            why = "the limit of open files is too low; raise it (ulimit -n)" if low else error.strerror
            raise StartError(f"the watchdog of the workers cannot be started: {why}") from None
        ended = self._reaper.adopt(pid).ended
        ended.add_done_callback(lambda _: ended.get_loop().call_later(_RESTART_DELAY, self._restart))

    def watch(self, workers: Sequence[Child]) -> None:
        """Record the current workers, each of which leads its own session."""
        found = {worker.pid: entry.started for worker in workers if (entry := read_process(worker.pid)) is not None}
        with contextlib.suppress(OSError):  # the watchdog also finds them by the mark
            self._sessions.write_text(json.dumps(found))

    def _restart(self) -> None:
        if not self._reaper.closing:
            try:
                self.start()
            except StartError:  # no process can be started for now
                asyncio.get_running_loop().call_later(_RESTART_DELAY, self._restart)
