"""The agent's end of the socket of its workers: see :mod:`torchelastic.training`.

One connection belongs to one process of a worker. The process may ask for notices and answer them, report progress, or
ask once whether its round is still current. A process that sends anything else is disconnected. The socket is in a
private folder, so other users cannot connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, Self

import msgspec

from torchelastic.agent_socket import CHANNEL, LINE_LIMIT, short_path
from torchelastic.errors import SettingsError
from torchelastic.protocol import RoundReason, shorten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from torchelastic.protocol import NoticeRecord, RoundRecord

REPORT_INTERVAL: Final = 1.0
"""Minimum number of seconds between two reports of progress."""

_REGISTRATION_TIMEOUT: Final = 10.0
_MAX_ROUND_CHECK: Final = 60.0
_CAUSE_LIMIT: Final = 512
"""Maximum number of characters; encoded as JSON, the line stays within its limit."""

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class _Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    round: _Number
    local_rank: _Number
    stands: _Seconds | None = None


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ask: _Seconds | None = None
    saved: _Number | None = None
    stepped: _Time = 0.0
    kept: _Time = 0.0


class _InvalidError(Exception):
    """A process has sent an invalid message."""


class Node(Protocol):
    """This node in the rendezvous."""

    node: str

    def report(self, round: int, **changes: Any) -> None:  # noqa: ANN401 - fields of its record
        """Change this node's record."""


class Progress:
    """The progress of the program in the current round, reported by its worker of rank 0.

    It is written to the node's record at once, even while workers are stopped, because the leader needs it before the
    next round. Frequent reports are written once per second.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._round = 0
        self._reporter: int | None = None
        self._began = 0.0
        self.stepped = self.kept = 0.0  # the first step, and the last checkpoint, in seconds since the Unix epoch
        self._reported = 0.0, 0.0
        self._due = 0.0
        self._later: asyncio.TimerHandle | None = None

    def begin(self, round: RoundRecord) -> None:
        """Start a round."""
        first = next((member.node for member in round.members if member.workers), None)
        self._round = round.number
        self._reporter = 0 if first == self._node.node else None  # the local rank of the worker with rank 0
        self._began = time.time()
        self._reported = 0.0, 0.0
        self.stepped = self.kept = 0.0
        self._cancel_later()

    def update(self, local_rank: int, *, stepped: float = 0.0, kept: float = 0.0) -> None:
        """Note the times of a worker's first step and last checkpoint; impossible times are ignored."""
        if local_rank != self._reporter:
            return
        now = time.time()
        if not self.stepped and stepped >= self._began:
            self.stepped = min(stepped, now)
        if kept >= self._began:
            self.kept = max(self.kept, min(kept, now))
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            self.report()
        elif self._later is None:
            self._later = loop.call_at(self._due, self.report)

    def report(self) -> None:
        """Report the progress now, because the round may be about to end."""
        self._cancel_later()
        if self._reported != (self.stepped, self.kept):
            self._reported = self.stepped, self.kept
            self._due = asyncio.get_running_loop().time() + REPORT_INTERVAL
            self._node.report(self._round, first_step_at=round(self.stepped, 3), last_checkpoint_at=round(self.kept, 3))

    def _cancel_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None


@dataclass(slots=True, eq=False)
class _Asker:
    """A process that may ask for notices, the seconds it asks for, and the last notice that it has answered."""

    local_rank: int
    writer: asyncio.StreamWriter
    seconds: float = 0.0
    answered: int = 0


@dataclass(frozen=True, slots=True)
class _Notice:
    """The current notice; `until` is on the clock of the event loop."""

    number: int
    reason: str
    cause: str
    until: float


class WorkerSocket:
    """Listens to the workers of the current round; an async context manager.

    Entering it raises SettingsError if the socket cannot be created.

    Args:
        folder: a private folder.
        stands: returns whether a round is current, within a number of seconds.
        changed: called when the workers ask for something else, or have answered.
        progress: gets what the workers report.
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
        self._round = 0
        self._askers: set[_Asker] = set()
        self._notice: _Notice | None = None
        self._count = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self._path) as path:
                listener.bind(path)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=LINE_LIMIT)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"no socket for the workers can be made at {self._path}: {error.strerror}. Name another folder for "
                "temporary files in TMPDIR."
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables with which workers find the socket."""
        return {CHANNEL: self._path}

    def expect(self, round: int) -> None:
        """Start a round: disconnect the workers of the previous round."""
        self._round = round
        self._notice = None
        for asker in self._askers:
            asker.writer.close()
        self._askers.clear()

    def forget(self, local_rank: int) -> None:
        """Remove an exited worker, so that its answer is not awaited."""
        for asker in [asker for asker in self._askers if asker.local_rank == local_rank]:
            asker.writer.close()
            self._askers.discard(asker)
        self._changed()

    def give_notice(self, seconds: float, *, reason: str, cause: str) -> None:
        """Give notice to all workers that ask for it, until it ends or is withdrawn."""
        self._count += 1
        self._notice = _Notice(self._count, reason, cause, asyncio.get_running_loop().time() + seconds)
        for asker in self._askers:
            self._send_notice(asker, self._notice)

    def withdraw(self) -> None:
        """Withdraw the current notice: the round continues."""
        if self._notice is not None:
            for asker in self._askers:
                if asker.seconds > 0:
                    _send(asker.writer, {"notice": self._notice.number, "seconds": 0})
            self._notice = None

    @property
    def asked(self) -> float:
        """The maximum number of seconds that a worker asks for; 0 without requests."""
        return max((asker.seconds for asker in self._askers), default=0.0)

    @property
    def answered(self) -> bool:
        """Whether every worker that asks for notices has answered the current one."""
        notice = self._notice
        return notice is None or all(asker.answered >= notice.number for asker in self._askers if asker.seconds > 0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(_InvalidError, OSError, TimeoutError):
                async with asyncio.timeout(_REGISTRATION_TIMEOUT):
                    sender = await _receive(reader, _Registration)
                if sender is not None and sender.stands is not None:
                    current = sender.round == self._round
                    stands = current and await self._stands(sender.round, min(sender.stands, _MAX_ROUND_CHECK))
                    _send(writer, {"stands": stands})
                    await writer.drain()
                elif sender is not None and sender.round == self._round:
                    await self._listen(_Asker(sender.local_rank, writer), reader)
        finally:
            writer.close()

    async def _listen(self, asker: _Asker, reader: asyncio.StreamReader) -> None:
        self._askers.add(asker)
        try:
            while (message := await _receive(reader, _Message)) is not None and asker in self._askers:
                await self._take(message, asker)
        finally:
            if asker in self._askers:
                self._askers.discard(asker)
                if asker.seconds > 0:
                    self._changed()

    async def _take(self, message: _Message, asker: _Asker) -> None:
        if message.ask is not None:
            first = asker.seconds == 0
            asker.seconds = message.ask
            _send(asker.writer, {"heard": message.ask})
            await asker.writer.drain()  # a process that does not read is not read from
            if asker not in self._askers:
                return
            if first and self._notice is not None:
                self._send_notice(asker, self._notice)
        if message.saved is not None:
            asker.answered = message.saved
        if message.stepped or message.kept:
            self._progress.update(asker.local_rank, stepped=message.stepped, kept=message.kept)
        if message.ask is not None or message.saved is not None:
            self._changed()

    def _send_notice(self, asker: _Asker, notice: _Notice) -> None:
        left = notice.until - asyncio.get_running_loop().time()
        if asker.seconds > 0 and left > 0:
            message = {"notice": notice.number, "seconds": round(left, 3), "reason": notice.reason}
            _send(asker.writer, message | {"cause": shorten(notice.cause, _CAUSE_LIMIT)})


async def _receive(reader: asyncio.StreamReader, kind: type[Any]) -> Any:  # noqa: ANN401 - of that kind
    """Return the next message, or None at the end; raise _InvalidError if it is invalid or too long."""
    try:
        line = await reader.readline()
        return msgspec.json.decode(line, type=kind) if line.endswith(b"\n") else None
    except (ValueError, RecursionError) as error:
        raise _InvalidError from error


def _send(writer: asyncio.StreamWriter, message: Mapping[str, object]) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(message) + b"\n")


class Notices:
    """The notices of the current round: passes workers' requests to the leader, and its notices to the workers.

    A leaving node gives notice to its own workers; the leader's notice of the same change is not a new one. Workers
    get at most `limit` seconds.
    """

    def __init__(self, workers: WorkerSocket, node: Node, *, limit: float) -> None:
        self._workers = workers
        self._node = node
        self._limit = limit
        self._round = 0
        self._serial = 0
        self._leaving = False

    def begin(self, round: int) -> None:
        """Start a round."""
        self._round = round
        self._serial = 0
        self._workers.expect(round)

    @property
    def pending(self) -> bool:
        """Whether the leader has given notice of a change, or a worker has not answered one."""
        return self._serial != 0 or not self._workers.answered

    def take(self, record: NoticeRecord) -> None:
        """Take in a notice of the leader, or its withdrawal."""
        if record.round != self._round:
            return
        if record.seconds > 0:
            if not self._leaving and record.serial != self._serial:
                self._workers.give_notice(record.seconds, reason=record.reason, cause=record.cause)
            self._serial = record.serial
        elif not self._leaving:
            self._serial = 0
            self._workers.withdraw()
        self.report()

    def leave(self, cause: str) -> None:
        """Give the workers notice that this node leaves."""
        self._leaving = True
        if (seconds := self._asked()) > 0:
            self._workers.give_notice(seconds, reason=RoundReason.NODE_LEFT, cause=cause)

    def report(self) -> None:
        """Tell the leader what the workers ask for, and whether all have answered."""
        seconds = self._asked()
        self._node.report(self._round, notice=seconds)
        if seconds > 0 and self._serial and self._workers.answered:
            self._node.report(self._round, saved=self._serial)

    def _asked(self) -> float:
        return min(self._workers.asked, self._limit)
