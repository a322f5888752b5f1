"""The agent's side of what workers tell it and ask of it: see :mod:`torchelastic.worker` for theirs.

One connection is one process, of a worker that is said and checked at its beginning. It may ask for notices, and is
then told each of them and answers it; it may say how far it is; or it asks once whether its epoch stands. A process
that says anything else is hung up on, and the kernel keeps other users away: the socket lies in a folder of this user
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import msgspec

from torchelastic.agent.process_table import read_process
from torchelastic.contract import shorten
from torchelastic.errors import SettingsError
from torchelastic.worker import CHANNEL, LINE_LIMIT, short_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from torchelastic.agent.progress import Progress

_PATIENCE: Final = 10.0
"""Seconds within which a process that has connected says who it is, and a worker that is being started is known."""

_LONGEST_QUESTION: Final = 60.0
"""Seconds that the question whether an epoch stands takes at most."""

_CONNECTION_LIMIT: Final = 1024

_DEEPEST_DESCENT: Final = 64

_CAUSE_LIMIT: Final = 512
"""Characters; with all that JSON may make of them, the line stays within its limit."""

_CREDENTIALS: Final = struct.Struct("3i")

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class _Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: _Number
    local_rank: _Number
    stands: _Seconds | None = None


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ask: _Seconds | None = None
    saved: _Number | None = None
    stepped: _Time = 0.0
    kept: _Time = 0.0


class _NonsenseError(Exception):
    """What a process says is not what it may say."""


@dataclass(slots=True, eq=False)
class _Asker:
    """A process that may ask for notices.

    Attributes:
        local_rank: of the worker that it speaks for.
        writer: to it.
        seconds: what it asks for.
        answered: the number of the last notice that it has answered.
    """

    local_rank: int
    writer: asyncio.StreamWriter
    seconds: float = 0.0
    answered: int = 0


@dataclass(frozen=True, slots=True)
class _Told:
    """A notice that stands.

    Attributes:
        number: counts the notices of this agent.
        reason: in one word.
        cause: in a sentence.
        until: when it is over, by the loop's clock.
    """

    number: int
    reason: str
    cause: str
    until: float


class WorkerChannel:
    """Listens to the workers of the present epoch; an async context manager.

    Entering it raises SettingsError where no socket can be made.

    Args:
        folder: a folder of this user alone, for the socket.
        stands: says whether an epoch stands, within so many seconds.
        changed: called when what the workers ask for, or have answered, is not what it was.
        progress: is told what they say of how far they are.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stands: Callable[[int, float], Awaitable[bool]],
        changed: Callable[[], None],
        progress: Progress,
    ) -> None:
        self._path = str(folder / "channel")
        self._stands = stands
        self._changed = changed
        self._progress = progress
        self._epoch = 0
        self._workers: asyncio.Future[Mapping[int, int]] = asyncio.get_running_loop().create_future()
        self._askers: set[_Asker] = set()
        self._told: _Told | None = None
        self._count = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self._path) as path:
                listener.bind(path)
            server = await asyncio.start_unix_server(self._accept, sock=listener, limit=LINE_LIMIT)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"the workers cannot reach their agent: no socket can be made at {self._path}: {error.strerror}. Name "
                "another folder for temporary files in TMPDIR."
            ) from None
        self._stack.callback(server.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    @property
    def variables(self) -> Mapping[str, str]:
        """What workers have in their environment to find it."""
        return {CHANNEL: self._path}

    # -- what the agent does

    def expect(self, epoch: int) -> None:
        """An epoch begins, and its workers are about to be started; those of the one before are listened to no more."""
        self._epoch = epoch
        self._told = None
        self._workers.cancel()
        self._workers = asyncio.get_running_loop().create_future()
        for asker in self._askers:
            asker.writer.close()
        self._askers.clear()

    def began(self, workers: Mapping[int, int]) -> None:
        """The epoch's workers were started.

        Args:
            workers: their process ids by local rank.
        """
        if not self._workers.done():
            self._workers.set_result(workers)

    def forget(self, local_rank: int) -> None:
        """A worker has ended, so it is not waited for."""
        for asker in [asker for asker in self._askers if asker.local_rank == local_rank]:
            asker.writer.close()
            self._askers.discard(asker)
        self._changed()

    def tell(self, seconds: float, *, reason: str, cause: str) -> None:
        """Give notice to all workers that have asked for it or will, until it is answered, over or taken back."""
        self._count += 1
        self._told = _Told(self._count, reason, cause, asyncio.get_running_loop().time() + seconds)
        for asker in self._askers:
            self._give_notice(asker, self._told)

    def take_back(self) -> None:
        """The notice that stands is none any more: the epoch goes on."""
        if self._told is not None:
            for asker in self._askers:
                if asker.seconds > 0:
                    _send(asker.writer, {"notice": self._told.number, "seconds": 0})
            self._told = None

    @property
    def asked(self) -> float:
        """Seconds that the workers ask for: the most that any of them does; 0 where none does."""
        return max((asker.seconds for asker in self._askers), default=0.0)

    @property
    def answered(self) -> bool:
        """Whether nobody is left who has asked for notices and not answered the one that stands."""
        told = self._told
        return told is None or all(asker.answered >= told.number for asker in self._askers if asker.seconds > 0)

    # -- what the workers do

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) >= _CONNECTION_LIMIT:
            writer.close()
            return
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(_NonsenseError, OSError, TimeoutError):
                await self._listen(reader, writer)
        finally:
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_PATIENCE):
            who = await _received(reader, _Introduction)
            if who is None:
                return
            known = await self._knows(who, writer)
        if who.stands is not None:
            stands = known and await self._stands(who.epoch, min(who.stands, _LONGEST_QUESTION))
            _send(writer, {"stands": stands})
            await writer.drain()
        elif known:
            asker = _Asker(who.local_rank, writer)
            self._askers.add(asker)
            try:
                await self._hear(asker, reader)
            finally:
                if asker in self._askers:
                    self._askers.discard(asker)
                    if asker.seconds > 0:
                        self._changed()

    async def _hear(self, asker: _Asker, reader: asyncio.StreamReader) -> None:
        while (said := await _received(reader, _Said)) is not None:
            if asker not in self._askers:
                return
            if said.ask is not None:
                new = asker.seconds == 0
                asker.seconds = said.ask
                _send(asker.writer, {"heard": said.ask})
                await asker.writer.drain()  # who asks on and on without listening is heard no more
                if asker not in self._askers:
                    return
                if new and self._told is not None:
                    self._give_notice(asker, self._told)
            if said.saved is not None:
                asker.answered = said.saved
            if said.stepped or said.kept:
                self._progress.told(asker.local_rank, stepped=said.stepped, kept=said.kept)
            if said.ask is not None or said.saved is not None:
                self._changed()

    def _give_notice(self, asker: _Asker, told: _Told) -> None:
        left = told.until - asyncio.get_running_loop().time()
        if asker.seconds > 0 and left > 0:
            message = {"notice": told.number, "seconds": round(left, 3), "reason": told.reason}
            _send(asker.writer, message | {"cause": shorten(told.cause, _CAUSE_LIMIT)})

    async def _knows(self, who: _Introduction, writer: asyncio.StreamWriter) -> bool:
        """Whether it is a process of a worker of the present epoch."""
        if who.epoch != self._epoch:
            return False
        workers = await asyncio.shield(self._workers)
        worker = workers.get(who.local_rank)
        return worker is not None and _descends(_peer(writer), worker)


async def _received(reader: asyncio.StreamReader, kind: type[Any]) -> Any:  # noqa: ANN401 - of that kind
    """What is said next; None where nothing will be.

    Raises:
        _NonsenseError: it is something else, or too long.
    """
    try:
        line = await reader.readline()
        return msgspec.json.decode(line, type=kind) if line.endswith(b"\n") else None
    except (ValueError, RecursionError) as error:
        raise _NonsenseError from error


def _send(writer: asyncio.StreamWriter, message: Mapping[str, object]) -> None:
    """Say something; what a process does not take in is held, a line for each notice."""
    if not writer.is_closing():
        writer.write(msgspec.json.encode(message) + b"\n")


def _peer(writer: asyncio.StreamWriter) -> int:
    """The id of the process that has connected; 0 where it is none that can be seen from here."""
    connection = writer.get_extra_info("socket")
    pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def _descends(pid: int, ancestor: int) -> bool:
    """Whether a process is this one, or has been started by it as far as descent or session tell."""
    for _ in range(_DEEPEST_DESCENT):
        if pid == ancestor:
            return True
        entry = read_process(pid) if pid > 1 and pid != os.getpid() else None
        if entry is None or entry.session == ancestor:
            return entry is not None
        pid = entry.parent
    return False
