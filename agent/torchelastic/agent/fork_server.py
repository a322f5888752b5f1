"""The agent's side of the fork server: it is started early, asked for processes, and started anew when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent import messages
from torchelastic.agent.late_imports import Listener
from torchelastic.agent.memory_kills import OUT_OF_MEMORY
from torchelastic.agent.processes import python_code, spawn
from torchelastic.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torchelastic.agent.memory_kills import MemoryKills
    from torchelastic.agent.processes import Child, Reaper
    from torchelastic.settings import Program

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 2

_STEADY: Final = 10.0
"""Seconds after which a fork server that dies is started again at once; an earlier death is looked into at need."""

_CALM: Final = 3.0
"""Seconds after the start of workers before the store is filled again."""

_MANY_NAMES: Final = 1000
"""Names of variables of which no more are kept; no program sets as many."""


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A process that was forked and waits to be told what for.

    Attributes:
        child: the process.
        link: the socket to it, of this side. Closing it before it has a role ends the process.
    """

    child: Child
    link: socket.socket

    def begin(self, role: str, payload: Mapping[str, Any], output: tuple[int, int], extra: Sequence[int] = ()) -> None:
        """Let it begin.

        Args:
            role: what it is for.
            payload: what it has to know for that.
            output: what becomes its standard output and standard error.
            extra: more descriptors for its role.
        """
        memory = messages.in_memory(payload)
        try:
            messages.send(self.link, {"role": role}, [memory, *output, *extra])
        except OSError:
            return  # it is dead already, and its end is told like any other
        finally:
            os.close(memory)


class ForkServer:
    """A fork server, running or to be started again at the next need.

    Processes are kept in store, so that a need is met at once; they are replaced while nothing else goes on.

    Args:
        reaper: which gets to know the server itself and all that it forks.
        environment: the server's environment: what libraries read when they are imported is in it.
        program: what workers run. The modules that it wants to be there are imported beside torch.
        memory_kills: counts processes that were killed for memory.
        spare: how many processes are kept in store.
    """

    def __init__(
        self,
        reaper: Reaper,
        environment: Mapping[str, str],
        program: Program,
        *,
        memory_kills: MemoryKills,
        spare: int = 0,
    ) -> None:
        self._import_error: str | None = None
        """Why not all that workers need can be imported there, in a sentence; empty where it can be."""
        self._environment = environment
        self._program = program
        self._reaper = reaper
        self._memory_kills = memory_kills
        self._killed_before = 0
        """How many processes had been killed for memory before the present server was started."""
        self._wanted = spare
        self._late_imports: set[str] = set()
        self._set_before: set[str] = set()
        """Variables that programs have set before they came to such an import."""
        self._imported: set[str] = set()
        self._unfit: set[str] = set()
        self._listener: Listener | None = None
        self._spares: list[ForkedProcess] = []
        self._needed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._process: Child | None = None
        self._started = 0.0
        self._connection: socket.socket | None = None
        self._tending: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None and self._process.running else None

    def start(self) -> None:
        """Start the process; it imports torch and the modules to be preloaded meanwhile.

        Raises:
            StartError: the machine does not allow it.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._killed_before = self._memory_kills.count()
        try:
            pid, ours = _spawned(self._environment)
        except OSError as error:
            raise StartError(f"the fork server cannot be started: {error.strerror}") from None
        if self._listener is None:
            self._listener = Listener(self._wanted_late)
        order = {"preload": self._program.preload, "kind": self._program.kind, "program": self._program.argv[0]}
        with contextlib.suppress(OSError):  # it is dead already, which is told like any later death
            messages.send(ours, {**order, "tell": self._listener.address})
        self._process = process = self._reaper.adopt(pid)
        process.ended.add_done_callback(lambda _: self._died(process))
        self._started = asyncio.get_running_loop().time()
        self._connection = ours
        self._imported = set()
        self._import_error = None
        if self._tending is not None:
            self._tending.cancel()
        self._tending = asyncio.create_task(self._tend(ours))

    async def close(self) -> None:
        """End the server and what it has in store. What it was asked for goes on."""
        self._closed = True
        ending = [spare.child for spare in self._spares]
        if self._process is not None:
            ending.append(self._process)
        for child in ending:
            child.signal(signal.SIGKILL)
        await asyncio.gather(*(asyncio.shield(child.ended) for child in ending))
        for task in (self._replacing, self._tending):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for spare in self._spares:
            spare.link.close()
        if self._connection is not None:
            self._connection.close()
        if self._listener is not None:
            self._listener.close()

    async def ready(self) -> None:
        """Wait until all that workers need is imported; a server that dies meanwhile is started again.

        Raises:
            StartError: something cannot be imported.
        """
        async with self._lock:
            await self._ask_anew(0)

    def _died(self, process: Child) -> None:
        if process is not self._process or self._closed:
            return
        if asyncio.get_running_loop().time() - self._started > _STEADY:
            self._replacing = asyncio.create_task(self._replace(process))

    async def _replace(self, process: Child) -> None:
        # Who waits for its answer hears of the death by the connection, which is to stay as long.
        async with self._lock:
            if process is self._process:
                end = f"was {OUT_OF_MEMORY}" if self._out_of_memory(process) else "died"
                logger.warning("The fork server %s; it is started again. Workers are not concerned.", end)
                with contextlib.suppress(StartError):  # told where there is a need
                    self.start()

    async def fork(self, count: int) -> list[ForkedProcess]:
        """Processes that wait to be told what for.

        Raises:
            StartError: there are none to be had.
        """
        taken = self._take(count)
        try:
            if len(taken) < count:
                async with self._lock:
                    taken += self._take(count - len(taken))
                    if len(taken) < count:
                        taken += await self._ask_anew(count - len(taken))
        except BaseException:
            for process in taken:
                process.link.close()
            raise
        self._needed.set()
        return taken

    def _take(self, count: int) -> list[ForkedProcess]:
        """Processes from the store, as far as there are any."""
        taken: list[ForkedProcess] = []
        while self._spares and len(taken) < count:
            spare = self._spares.pop(0)
            if spare.child.running:
                taken.append(spare)
            else:
                spare.link.close()
        return taken

    async def _ask_anew(self, count: int) -> list[ForkedProcess]:
        """Ask the server for processes, or a new one if need be; the lock is held."""
        for _ in range(_ATTEMPTS):
            if self._closed:
                raise StartError("the agent is ending")
            if self.pid is None:
                self.start()
            try:
                return await self._ask(count)
            except (EOFError, ConnectionError):
                if self._process is not None:
                    await asyncio.shield(self._process.ended)
        modules = ", ".join(("torch", *self._program.preload))
        dies = f"the fork server dies again and again while it imports {modules} or forks"
        if self._process is not None and self._out_of_memory(self._process):
            raise StartError(f"{dies}, {OUT_OF_MEMORY}; raise the memory limit")
        raise StartError(f"{dies}; try what comes of `{sys.executable} -c 'import {modules}'`")

    def _out_of_memory(self, process: Child) -> bool:
        """Whether the present server's process, which has ended, was killed for memory."""
        return self._memory_kills.explains(process.ended.result(), since=self._killed_before)

    async def _tend(self, connection: socket.socket) -> None:
        """Keep the store filled, as long as the server lives."""
        with contextlib.suppress(EOFError, ConnectionError, StartError):  # told where there is a need
            async with self._lock:
                if not self._needed.is_set():
                    await self._fill()
                if self._late_imports:
                    self._needed.set()
            while True:
                await self._needed.wait()
                self._needed.clear()
                await asyncio.sleep(_CALM)  # while workers start, the processors are theirs
                async with self._lock:
                    await self._fill()
                    if modules := self._late_imports - self._imported:
                        await self._extend(connection, modules)

    async def _fill(self) -> None:
        self._spares = [spare for spare in self._spares if spare.child.running]
        missing = self._wanted - len(self._spares)
        if missing > 0:
            self._spares += await self._ask(missing)

    def _wanted_late(self, module: str, names: Sequence[str]) -> None:
        if module not in self._unfit:
            self._late_imports.add(module)
            if len(self._set_before) < _MANY_NAMES:
                self._set_before.update(names)
            self._needed.set()

    async def _extend(self, connection: socket.socket, modules: set[str]) -> None:
        """Import more, and replace what was forked before."""
        self._imported |= modules
        messages.send(connection, {"import": sorted(modules)})
        answer = await _receive(connection)
        if problem := answer["error"] or _about_settings(self._set_before.intersection(answer["read"])):
            logger.warning("A fork server with %s in it is of no use: %s.", " and ".join(sorted(modules)), problem)
            self._late_imports -= modules
            self._unfit |= modules
            unfit = self._process
            self.start()
            if unfit is not None:
                unfit.signal(signal.SIGKILL)
            return
        fresh = await self._ask(self._wanted)
        for spare in self._spares:
            spare.link.close()  # which tells it to end
        self._spares = fresh

    async def _ask(self, count: int) -> list[ForkedProcess]:
        """Ask the server for processes; the lock is held."""
        connection = self._connection
        if connection is None:
            raise EOFError
        if self._import_error is None:
            self._import_error = str((await _receive(connection))["error"])
        if self._import_error:
            raise StartError(self._import_error)
        forked: list[ForkedProcess] = []
        while len(forked) < count:
            part = min(count - len(forked), messages.DESCRIPTOR_LIMIT)
            # Once it is asked, the answer is waited for, come what may: the next question must not get it.
            asking = asyncio.create_task(self._exchange(connection, part))
            try:
                forked += await asyncio.shield(asking)
            except BaseException:
                await asyncio.wait([asking])
                if asking.exception() is None:
                    forked += asking.result()
                for process in forked:
                    process.link.close()
                raise
        return forked

    async def _exchange(self, connection: socket.socket, count: int) -> list[ForkedProcess]:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            links, other_ends = [], []
            for _ in range(count):
                link, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                links.append(ours.enter_context(link))
                other_ends.append(theirs.enter_context(other_end).fileno())
            killed_before = self._memory_kills.count()
            with self._reaper.adopting():
                messages.send(connection, {"fork": count}, other_ends)
                answer = await _receive(connection)
                children = [self._reaper.adopt(pid) for pid in answer.get("pids", ())]
            if "error" in answer:
                memory = self._memory_kills.count() > killed_before
                raise StartError(f"{answer['error']}, {OUT_OF_MEMORY}" if memory else answer["error"])
            ours.pop_all()
        return [ForkedProcess(child, link) for child, link in zip(children, links, strict=True)]


def _spawned(environment: Mapping[str, str]) -> tuple[int, socket.socket]:
    """The id of a new fork server, and the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack, theirs, Path(os.devnull).open("rb") as nothing:
        stack.enter_context(ours)
        pid = spawn(
            python_code("torchelastic.agent.fork_server_main"),
            environment,
            # What is printed there is about an import: it goes to the agent's standard error.
            {0: nothing.fileno(), 1: 2, 2: 2, messages.CONTROL: theirs.fileno()},
        )
        ours.setblocking(False)
        stack.pop_all()
    return pid, ours


def _about_settings(names: AbstractSet[str]) -> str:
    said = " and ".join(sorted(names))
    return f"the program sets {said} before it imports that itself, and no worker would heed it" if names else ""


async def _receive(connection: socket.socket) -> dict[str, Any]:
    data = await asyncio.get_running_loop().sock_recv(connection, messages.MESSAGE_LIMIT)
    if not data:
        raise EOFError
    return messages.decode(data)
