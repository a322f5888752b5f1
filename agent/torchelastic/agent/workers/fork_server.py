"""The agent's side of the fork server: start it early, keep spare processes ready, restart it if it exits.

Messages between the agent, the fork server and the forked processes are JSON. Each message is one packet of a
SOCK_SEQPACKET socket, and may carry descriptors. A memory file passes the arguments and the environment of a process,
because they can exceed the limit of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pkgutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent.failures import OUT_OF_MEMORY
from torchelastic.agent.workers.processes import python_code, spawn
from torchelastic.errors import StartError
from torchelastic.protocol.records import MAX_IMPORTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec

    from torchelastic.agent.workers.processes import Child, Reaper
    from torchelastic.config.settings import Program

logger = logging.getLogger(__name__)

REFILL_DELAY: Final = 3.0
"""Seconds from the start of workers until spare processes are forked again, so that the workers have the CPUs first.

A fork server that has exited is restarted after the same time, or as soon as there are too few spare processes."""

_IMPORT_TIMEOUT: Final = 60.0
"""Seconds after which an import that a worker has also begun is given up."""

_IMPORT_WAIT: Final = 5.0
"""Seconds for which a node or new workers wait for such imports, which the workers would otherwise do themselves."""

_REQUEST_TIMEOUT: Final = 0.5
"""Seconds for which the end of the agent waits for a request to the fork server."""

_ATTEMPTS: Final = 2

TORCH: Final = "torch."
_INSTALLED: Final = tuple(f"{path}{os.sep}" for path in sys.path if path.endswith(("site-packages", "dist-packages")))

CONTROL: Final = 3
"""The fork server's descriptor for its connection to the agent."""

MESSAGE_LIMIT: Final = 64 << 10
"""Maximum length of a message in bytes."""

DESCRIPTOR_LIMIT: Final = 250
"""Maximum number of descriptors in a message; the kernel's limit is 253."""


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))


def python_command(
    kind: str, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the command and environment of a script or module in a new interpreter, with unbuffered output."""
    module = ["-m"] if kind == "module" else []
    return [sys.executable, *module, *argv], {"PYTHONUNBUFFERED": "1", **environment}


def search_path(kind: str, name: str) -> str:
    """Return the folder or archive in which a script or module (`kind`) first looks for modules; empty for none."""
    if kind == "module":
        return "" if sys.flags.safe_path else str(Path.cwd())
    if is_container(name):
        return absolute(name)
    return "" if sys.flags.safe_path else str(Path(name).resolve().parent)


def is_installed(module: str, spec: ModuleSpec | None) -> bool:
    """Return whether a module with this specification belongs to torch, or is in site-packages."""
    return spec is not None and (f"{module}.".startswith(TORCH) or (spec.origin or "").startswith(_INSTALLED))


def is_container(name: str) -> bool:
    """Return whether this path is a folder or an archive, whose ``__main__`` module Python runs."""
    return pkgutil.get_importer(name) is not None


def absolute(name: str) -> str:
    """Return the absolute path as the interpreter computes it, with ``.`` and ``..`` unchanged."""
    return str(Path.cwd()) if name == "." else os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A forked process that waits for its task. If its connection is closed before that, the process exits."""

    child: Child
    connection: socket.socket

    def begin(
        self, task: str, content: Mapping[str, Any], streams: Mapping[int, int], extra: Sequence[int] = ()
    ) -> None:
        """Send the process its task ("worker", "command" or "tcp_store"), arguments, streams and more descriptors."""
        self.child.begin()
        with open(os.memfd_create("content"), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(json.dumps(content).encode())
            file.flush()
            with contextlib.suppress(OSError):  # the process has exited; its exit is reported
                message = {"task": task, "streams": [*streams]}
                send(self.connection, message, [file.fileno(), *streams.values(), *extra])


class ForkServer:
    """A process that imports torch and forks other processes, of which `spares` are kept ready.

    `filled` is called each time when all of them are ready.
    """

    def __init__(
        self,
        reaper: Reaper,
        environment: Mapping[str, str],
        program: Program,
        *,
        spares: int,
        filled: Callable[[], object] = lambda: None,
    ) -> None:
        self._reaper = reaper
        self._environment = environment
        self._program = program
        self._wanted = spares
        self._filled = filled
        self._spares: list[ForkedProcess] = []
        self._import_error: str | None = None
        self._learned: dict[str, Mapping[str, int] | None] = {}  # None: given up
        self._expected: set[str] = set()
        self._complete_until = 0.0
        self._missing: list[str] = []
        self._complete = asyncio.Event()
        self._complete.set()
        self._incomplete = asyncio.Event()
        self._refill = asyncio.Event()
        self._lock = asyncio.Lock()
        self._process: Child | None = None
        self._connection: socket.socket
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the process, which then imports torch and the modules to preload.

        Raises:
            StartError: the process cannot be started.
        """
        if self._process is not None:
            self._connection.close()
            end = f"was {OUT_OF_MEMORY}" if self._process.out_of_memory else "died"
            logger.warning("The fork server %s and is restarted. Running workers are not affected.", end)
        try:
            pid, self._connection = _spawn(self._environment)
        except OSError as error:
            raise StartError(f"the fork server cannot be started: {error.strerror}") from None
        self._process = self._reaper.adopt(pid)
        program = self._program
        order = {"preload": program.preload, "search_path": search_path(program.kind.value, program.argv[0])}
        with contextlib.suppress(OSError):  # the process has exited, which the next request detects
            send(self._connection, order)
        self._import_error = None
        self._missing.clear()
        self._miss(*(module for module, changed in self._learned.items() if changed is not None))
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep_filled()), asyncio.create_task(self._keep_complete())]

    async def close(self) -> None:
        """Stop restarting the fork server; the reaper then kills it and the spare processes."""
        if self._tasks:
            # A request that is canceled would leave processes that the reaper does not know.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    await self._lock.acquire()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            self._connection.close()
        for spare in self._spares:
            spare.connection.close()

    async def ready(self) -> None:
        """Wait until everything is imported, with a limit for learned modules; a fork server that exits is restarted.

        Raises:
            StartError: torch or a module of ``--preload`` cannot be imported, or the process cannot be started.
        """
        async with self._lock:
            await self._fork_now(0)
        self._complete_until = asyncio.get_running_loop().time() + _IMPORT_WAIT
        await self._until_complete()

    async def fork(self, count: int, *, complete: bool = True) -> list[ForkedProcess]:
        """Return processes that wait for their task: spare processes, and new ones if there are too few.

        Args:
            count: the number of processes.
            complete: whether the processes need the modules that workers import.

        Raises:
            StartError: no process can be forked.
        """
        if complete:
            await self._until_complete()
        taken = self._take_spares(count)
        try:
            if len(taken) < count:
                async with self._lock:
                    taken += await self._fork_now(count - len(taken))
        except BaseException:
            for process in taken:
                process.connection.close()
            raise
        self.refill()
        return taken

    def take_spare(self) -> ForkedProcess | None:
        """Return a spare process, which another one replaces after a while; None if there is none."""
        self.refill()
        return next(iter(self._take_spares(1)), None)

    def refill(self) -> None:
        """Begin to make all spare processes ready again, after a while."""
        self._refill.set()

    @property
    def learned(self) -> tuple[str, ...]:
        """The learned modules that were imported in the agent's environment, so that other nodes can import them."""
        return tuple(module for module, changed in self._learned.items() if changed == {})

    def expect(self, modules: Sequence[str]) -> None:
        """Import modules that workers will probably import first, in this order; see :meth:`learn`.

        If one of them is refused, the later ones are not imported until a worker imports them.
        """
        self._expected.update(modules)
        for module in modules:
            self.learn(module, {})

    def learn(self, module: str, changed: Mapping[str, int]) -> None:
        """Import a module that a worker imports, for the workers of later rounds, unless workers could not be forked.

        `changed` has hashes of the variables that the worker had changed; the fork server must have the same values.
        """
        if self._program.learns and module not in self._learned and len(self._learned) < MAX_IMPORTS:
            self._learned[module] = changed
            self._miss(module)

    async def _until_complete(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._complete_until):
                await self._complete.wait()

    def _take_spares(self, count: int) -> list[ForkedProcess]:
        taken: list[ForkedProcess] = []
        while self._spares and len(taken) < count:
            spare = self._spares.pop(0)
            if spare.child.running:
                taken.append(spare)
            else:
                spare.connection.close()
        return taken

    # -- the process

    async def _keep_filled(self) -> None:
        """Keep spare processes ready."""
        while True:
            with contextlib.suppress(EOFError, ConnectionError, StartError):  # reported when a process is needed
                async with self._lock:
                    self._start_if_dead()
                    self._spares = self._take_spares(len(self._spares))  # drops exited processes
                    self._spares += await self._fork_now(self._wanted - len(self._spares))
                self._filled()
            await self._refill.wait()
            self._refill.clear()
            await asyncio.sleep(REFILL_DELAY)

    def _miss(self, *modules: str) -> None:
        self._missing += modules
        if self._missing:
            self._complete.clear()
            self._incomplete.set()
        if modules:
            self._complete_until = asyncio.get_running_loop().time() + _IMPORT_WAIT

    async def _keep_complete(self) -> None:
        """Import what workers import: each time in a copy of the fork server, which then replaces it."""
        while True:
            await self._incomplete.wait()
            self._incomplete.clear()
            try:
                async with self._lock:
                    [copy] = await self._fork_now(1)
                if await self._import_missing(copy):
                    async with self._lock:
                        self._connection.close()
                        self._connection, self._process, self._import_error = copy.connection, copy.child, ""
                        for spare in self._take_spares(len(self._spares)):
                            spare.connection.close()
                    self._refill.set()
                else:
                    copy.child.signal(signal.SIGKILL)
                    copy.connection.close()
            except (EOFError, OSError, StartError):  # reported when a process is needed
                self._missing.clear()
            self._miss()
            if not self._missing:
                self._complete.set()

    async def _import_missing(self, copy: ForkedProcess) -> bool:
        """Import missing modules; give up one with a problem, and return False: no process may be forked from there."""
        copy.connection.setblocking(False)
        copy.begin("fork server", {}, {})
        done: list[str] = []
        while self._missing:
            module = self._missing.pop(0)
            problem = "the import ends the process, or takes too long"
            with contextlib.suppress(EOFError, ConnectionError, TimeoutError):
                async with asyncio.timeout(_IMPORT_TIMEOUT):
                    silent = module not in self._expected  # a worker has printed what the module prints
                    send(copy.connection, {"import": module, "changed": self._learned[module], "silent": silent})
                    problem = (await _receive(copy.connection))["problem"]
            if problem:
                logger.debug("workers import %s themselves: %s", module, problem)
                self._learned[module] = None
                if module in self._expected:
                    for later in self._expected.intersection(self._missing):
                        del self._learned[later]
                        self._missing.remove(later)
                self._missing[:0] = done
                return False
            done.append(module)
        return True

    # -- requests; the lock is held

    def _start_if_dead(self) -> None:
        if self._process is None or not self._process.running:
            self.start()

    async def _fork_now(self, count: int) -> list[ForkedProcess]:
        """Request forked processes, from a new server if necessary."""
        for _ in range(_ATTEMPTS):
            self._start_if_dead()
            try:
                return await self._request(count)
            except (EOFError, ConnectionError):
                if self._process is not None:
                    await asyncio.shield(self._process.ended)
        modules = ", ".join(("torch", *self._program.preload))
        dies = f"the fork server dies repeatedly while it imports {modules} or forks"
        if self._process is not None and self._process.out_of_memory:
            raise StartError(f"{dies}, {OUT_OF_MEMORY}; raise the memory limit")
        raise StartError(f"{dies}; try `{sys.executable} -c 'import {modules}'`")

    async def _request(self, count: int) -> list[ForkedProcess]:
        connection = self._connection
        if self._import_error is None:
            self._import_error = str((await _receive(connection))["error"])
        if self._import_error:
            raise StartError(self._import_error)
        forked: list[ForkedProcess] = []
        while len(forked) < count:
            forked += await self._exchange(connection, min(count - len(forked), DESCRIPTOR_LIMIT))
        return forked

    async def _exchange(self, connection: socket.socket, count: int) -> list[ForkedProcess]:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            links, other_ends = [], []
            for _ in range(count):
                link, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                links.append(ours.enter_context(link))
                other_ends.append(theirs.enter_context(other_end).fileno())
            with self._reaper.adopting():
                send(connection, {"fork": count}, other_ends)
                try:
                    answer = await _receive(connection)
                except asyncio.CancelledError:  # the next request must not receive this answer
                    with contextlib.suppress(OSError):  # the connection is closed
                        connection.shutdown(socket.SHUT_RDWR)
                    raise
                children = [self._reaper.adopt(pid) for pid in answer.get("pids", ())]
            if "error" in answer:
                raise StartError(answer["error"])
            ours.pop_all()
        return [ForkedProcess(child, link) for child, link in zip(children, links, strict=True)]


def _spawn(environment: Mapping[str, str]) -> tuple[int, socket.socket]:
    """Start a fork server; return its process id and the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack, theirs:
        stack.enter_context(ours)
        # Output of modules during import goes to the agent's standard error.
        descriptors = {1: 2, 2: 2, CONTROL: theirs.fileno()}
        pid = spawn(python_code("torchelastic.agent.workers.fork_server_main"), environment, descriptors)
        ours.setblocking(False)
        stack.pop_all()
    return pid, ours


async def _receive(connection: socket.socket) -> dict[str, Any]:
    data = await asyncio.get_running_loop().sock_recv(connection, MESSAGE_LIMIT)
    if not data:
        raise EOFError
    message: dict[str, Any] = json.loads(data)
    return message
