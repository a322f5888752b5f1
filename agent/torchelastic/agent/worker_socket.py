"""The agent's side of the workers' socket; :mod:`torchelastic.protocol.worker` defines the messages.

Each connection belongs to one process of a worker. A process that sends anything else than these messages is
disconnected. The socket is in a private folder, so other users cannot connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from torchelastic.errors import SettingsError
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.records import NodePhase, RoundReason
from torchelastic.protocol.worker import (
    LINE_LIMIT,
    Hello,
    NoticeMessage,
    RoundAnswer,
    WorkerMessage,
    WorldMessage,
    encode_lines,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchelastic.protocol.records import NoticeRecord, RoundRecord
    from torchelastic.rendezvous.node import RendezvousNode

_MAX_CHECK_SECONDS: Final = 60.0
_EXIT_TIME: Final = 0.1
"""Seconds from the end of a connection to a report of it: most often, its process exits, which is reported at once."""

_PLANNED: Final = (RoundReason.NODE_JOINED, RoundReason.NODE_LEFT, RoundReason.RESIZED)
_CAUSE_LIMIT: Final = 512
"""Maximum length of a cause in characters, so that a notice fits into a line of :data:`LINE_LIMIT` bytes."""


@dataclass(slots=True, eq=False)
class _Process:
    """A connected process of a worker.

    Attributes:
        rank: the worker's rank.
        seconds: the seconds of notice that it asks for.
        answered: the last notice that it answered.
        stays: whether it continues in the next round.
        has_state: whether it has the state of the training.
        waits: whether it has left its world, and waits for the next one.
        asked_at: when it was asked to leave its world, on the clock of the event loop; 0 if it has left it since.
    """

    rank: int
    writer: asyncio.StreamWriter
    seconds: float = 0.0
    answered: int = 0
    stays: bool = False
    has_state: bool = False
    waits: bool = False
    asked_at: float = 0.0

    def send(self, message: NoticeMessage | RoundAnswer | WorldMessage) -> None:
        if isinstance(message, WorldMessage) and not self.waits:
            self.asked_at = self.asked_at or asyncio.get_running_loop().time()
        if not self.writer.is_closing():
            self.writer.write(encode_lines(message))


@dataclass(eq=False)
class WorkerSocket:
    """Listens to the workers of the current round; an async context manager.

    Progress is written to the node's record at once, because the leader needs it before the next round. A leaving node
    gives notice to its own workers; the leader's notice of the same change is not passed on.

    Entering the context raises SettingsError if the socket cannot be created.

    Args:
        folder: a private folder.
        node: this node, whose record gets the requests for notice, the answers and the progress.
        limit: maximum number of seconds of a notice.
        changed: called when the workers' requests or answers have changed; the owner must then call :meth:`report`.
        stepped: called with the rank of a worker that has begun its first step.
        imported: called with each module that a worker imports, and the variables that the worker has changed.

    Attributes:
        path: the path of the socket.
        expected: the ranks in this round of the workers that stay, and have not left their last world.
    """

    folder: Path
    node: RendezvousNode
    _: KW_ONLY
    limit: float
    changed: Callable[[], None]
    stepped: Callable[[int], None]
    imported: Callable[[str, Mapping[str, int]], None]

    def __post_init__(self) -> None:
        self.path = str(self.folder / "channel")
        self._round = 0
        self._began = 0.0
        self._first_step = self._last_checkpoint = 0.0  # in seconds since the Unix epoch
        self._has_stepped = False
        self._first_steps: set[int] = set()
        self._processes: set[_Process] = set()
        self.expected: set[int] = set()
        self._reporting = {0}
        self._notice: NoticeMessage | None = None
        self._until = 0.0  # of the notice, on the clock of the event loop
        self._count = 0
        self._leaders_notice = 0
        self._leaving = False
        self._left = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.path)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=LINE_LIMIT)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"The socket for the workers cannot be created at {self.path}: {error.strerror or error}. "
                "Set TMPDIR to a writable folder with a short path."
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        Path(self.path).unlink(missing_ok=True)  # another agent may use the folder next
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def staying(self) -> set[int]:
        """The ranks of the workers that continue in the next round."""
        return {process.rank for process in self._processes if process.stays}

    @property
    def waiting(self) -> set[int]:
        """The ranks of the workers that have left their world, and wait for the next one."""
        return {process.rank for process in self._processes if process.waits}

    @property
    def has_state(self) -> bool:
        """Whether a worker that stays has the state of the training."""
        return any(process.stays and process.has_state for process in self._processes)

    def asked_at(self, rank: int) -> float:
        """Return when a worker was asked to leave its world, on the clock of the event loop; 0 if it has left it."""
        return max((process.asked_at for process in self._processes if process.rank == rank), default=0.0)

    def break_world(self) -> bool:
        """Tell the workers that stay that a worker of their world is lost or hangs; return whether any stays."""
        staying = [process for process in self._processes if process.stays]
        for process in staying:
            process.send(WorldMessage())
        return bool(staying)

    async def leave_world(self, seconds: float) -> None:
        """Tell the workers that stay to leave their world after a step; wait until they have, or for some seconds."""
        for process in self._processes:
            if process.stays:
                process.send(WorldMessage(planned=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(process.stays and not process.waits for process in self._processes):
                    self._left.clear()
                    await self._left.wait()

    def begin(self, round: RoundRecord, environments: Mapping[int, dict[str, str]]) -> None:
        """Start a round: disconnect the workers of the previous round, except those that stay.

        In a round without members, all that stay wait.

        Args:
            round: the round.
            environments: the variables in this round of the workers that stay, by their ranks in the previous round.
        """
        self._round = round.number
        self._began = time.time()
        self._first_step = self._last_checkpoint = 0.0
        self._has_stepped = False
        self._first_steps = set()
        self._leaders_notice = 0
        self._notice = None
        # If rank 0 starts, the lowest rank that stays trains meanwhile.
        self._reporting = {0, next((rank for rank in range(round.world_size) if rank not in round.starting), 0)}
        planned = round.reason in _PLANNED
        self.expected = {int(environment["RANK"]) for environment in environments.values()}
        for process in [*self._processes]:
            if process.stays and process.rank in environments:
                environment = environments[process.rank]
                process.rank, process.waits = int(environment["RANK"]), False
                process.send(WorldMessage(environment=environment, planned=planned))
            elif process.stays and not round.members:
                process.send(WorldMessage(planned=planned))
            else:
                process.writer.close()
                self._processes.discard(process)

    def forget(self, rank: int) -> None:
        """Remove an exited worker: its answer to a notice is no longer awaited."""
        for process in [process for process in self._processes if process.rank == rank]:
            process.writer.close()
            self._processes.discard(process)
        self.changed()

    # -- notices

    @property
    def pending(self) -> bool:
        """Whether the leader has given notice of a change, or a worker has not answered a notice."""
        return self._leaders_notice != 0 or not self._all_answered()

    def take_notice(self, record: NoticeRecord) -> None:
        """Pass the leader's notice, or its withdrawal, to the workers."""
        if record.round != self._round:
            return
        if record.seconds > 0:
            if not self._leaving and record.number != self._leaders_notice:
                self._give_notice(record.seconds, record.reason, record.cause)
            self._leaders_notice = record.number
        elif not self._leaving:
            self._leaders_notice = 0
            self._withdraw_notice()
        self.report()

    def leave(self, cause: str) -> None:
        """Give the workers notice that this node leaves."""
        self._leaving = True
        if (seconds := self._asked()) > 0:
            self._give_notice(seconds, RoundReason.NODE_LEFT, cause)

    def report(self) -> None:
        """Report to the leader how much notice the workers ask for, and whether all have answered."""
        seconds = self._asked()
        self.node.report(self._round, notice=seconds)
        if seconds > 0 and self._leaders_notice and self._all_answered():
            self.node.report(self._round, answered_notice=self._leaders_notice)

    def _give_notice(self, seconds: float, reason: str, cause: str) -> None:
        self._count += 1
        self._until = asyncio.get_running_loop().time() + seconds
        cause = shorten(cause, _CAUSE_LIMIT)
        self._notice = NoticeMessage(number=self._count, seconds=seconds, reason=reason, cause=cause)
        for process in self._asking():
            self._send_notice(process, self._notice)

    def _withdraw_notice(self) -> None:
        if self._notice is not None:
            for process in self._asking():
                process.send(NoticeMessage(number=self._notice.number, seconds=0))
            self._notice = None

    def _send_notice(self, process: _Process, notice: NoticeMessage) -> None:
        left = self._until - asyncio.get_running_loop().time()
        if left > 0:
            process.send(msgspec.structs.replace(notice, seconds=round(left, 3)))

    def _asking(self) -> list[_Process]:
        return [process for process in self._processes if process.seconds > 0]

    def _asked(self) -> float:
        """Return the maximum time that a worker asks for, within the limit; 0 without requests."""
        return min(max((process.seconds for process in self._processes), default=0.0), self.limit)

    def _all_answered(self) -> bool:
        notice = self._notice
        return notice is None or all(process.answered >= notice.number for process in self._asking())

    # -- messages

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process: _Process | None = None
        try:
            # A ValueError: the connection has ended, or a message is invalid or too long.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                sender = msgspec.json.decode(await reader.readline(), type=Hello)
                process = _Process(sender.rank, writer)
                current = sender.round == self._round
                if sender.check_timeout is not None:
                    timeout = min(sender.check_timeout, _MAX_CHECK_SECONDS)
                    is_current = current and await self.node.is_current(sender.round, timeout=timeout)
                    process.send(RoundAnswer(is_current=is_current))
                elif current:
                    self._processes.add(process)
                    while process in self._processes:
                        self._take(msgspec.json.decode(await reader.readline(), type=WorkerMessage), process)
        finally:
            writer.close()
            if process in self._processes:
                self._processes.discard(process)
                self._left.set()
                asyncio.get_running_loop().call_later(_EXIT_TIME, self.changed)

    def _take(self, message: WorkerMessage, process: _Process) -> None:
        if process not in self._processes:  # its round has ended
            return
        if message.requested_notice is not None:
            first = process.seconds == 0
            process.seconds = message.requested_notice
            if first and message.requested_notice > 0 and self._notice is not None:
                self._send_notice(process, self._notice)
        if message.answered_notice is not None:
            process.answered = message.answered_notice
        if message.requested_notice is not None or message.answered_notice is not None:
            self.changed()
        self._note_world(message, process)
        if message.imported:
            self.imported(message.imported, message.changed)
        if message.first_step_at >= self._began:
            self.stepped(process.rank)
            if message.step is not None and not process.stays:  # those that stay take the state of one of them
                self._first_steps.add(message.step)
                self.node.report(self._round, first_steps=(min(self._first_steps), max(self._first_steps)))
        if process.rank in self._reporting:
            self._report_progress(message)

    def _note_world(self, message: WorkerMessage, process: _Process) -> None:
        if message.stays is not None and message.stays is not process.stays:
            process.stays = message.stays
            self.changed()
            if not message.stays:  # its training has ended, so new nodes wait
                self.node.report(self._round, phase=NodePhase.FINISHING)
        if message.has_state and not process.has_state:
            process.has_state = True
            self.changed()
        if message.waits or message.left_for:
            process.asked_at = 0.0
        if message.waits:
            process.waits = True
            self._left.set()
        if message.left_for:
            process.waits = False
        if message.left_for == self._round:
            self.expected.discard(process.rank)
        elif message.left_for:  # it has to leave the next one, too
            process.asked_at = asyncio.get_running_loop().time()

    def _report_progress(self, message: WorkerMessage) -> None:
        """Report the first step and the last checkpoint; times before the start of the round are ignored."""
        now = time.time()
        if not self._first_step and message.first_step_at >= self._began:
            self._first_step = round(min(message.first_step_at, now), 3)
        if message.last_checkpoint_at >= self._began:
            self._last_checkpoint = round(max(self._last_checkpoint, min(message.last_checkpoint_at, now)), 3)
        self._has_stepped |= message.second_step_at >= self._began
        self.node.report(
            self._round,
            first_step_at=self._first_step,
            has_stepped=self._has_stepped,
            last_checkpoint_at=self._last_checkpoint,
        )
