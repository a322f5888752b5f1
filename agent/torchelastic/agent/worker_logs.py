"""Where a worker's output goes: to files, to the agent's own streams with the rank before each line, or both.

Where only a file is wanted, the worker writes to it itself, and the agent has no part in it. Otherwise it writes to a
pipe that the agent reads: a line is passed on when it is complete, so none is torn.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
from typing import TYPE_CHECKING, Final

from torchelastic.errors import SettingsError
from torchelastic.settings import Streams

if TYPE_CHECKING:
    from pathlib import Path

    from torchelastic.agent.console import Console
    from torchelastic.settings import LogSettings

logger = logging.getLogger(__name__)

TAIL_LIMIT: Final = 16 << 10
"""Bytes of the end of a worker's output that may be looked at to say why it failed."""

_CHUNK: Final = 64 << 10
_LINE_LIMIT: Final = 1 << 20
"""Bytes of a line; longer ones are passed on in parts."""

_PIPE_LIMIT: Final = 1 << 20
"""Bytes that a pipe holds at most, unless an administrator has raised that."""


class LogPipe:
    """One stream of a worker, read by the agent.

    Args:
        prefix: what stands before each line that is passed on.
        console: to which lines are passed on.
        descriptor: the agent's own stream on which they are.
        file: to which all is written, too; raises OSError where that cannot be made.

    Attributes:
        writing: the worker's end; closed once the worker has it.
        over: done when all processes that could write to it are gone.
    """

    def __init__(self, *, prefix: bytes, console: Console, descriptor: int, file: Path | None) -> None:
        self._path = file
        self._file = None if file is None else open_log(file)
        self._loop = asyncio.get_running_loop()
        self._prefix = prefix
        self._console = console
        self._descriptor = descriptor
        self._rest = b""
        self._tail = b""
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._reading, self._read)

    @property
    def tail(self) -> bytes:
        """The end of what was written so far."""
        return self._tail

    def catch_up(self) -> None:
        """Take in what is there now, however much the console holds: a worker that has ended has left all of it."""
        left = _PIPE_LIMIT
        while left > 0 and (size := self._take_in()):
            left -= size

    def close(self) -> None:
        """Read no more than what is there; all of it is passed on."""
        self.catch_up()
        self._end()

    def _read(self) -> None:
        if self._take_in() and self._console.full:
            self._loop.remove_reader(self._reading)
            self._console.when_free(self._resume)

    def _take_in(self) -> int:
        """Take in what can be had at once, at most a chunk; returns how much it was."""
        if self.over.done():
            return 0
        try:
            data = os.read(self._reading, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        self._tail = (self._tail + data)[-TAIL_LIMIT:]
        self._write_to_file(data)
        lines, newline, rest = (self._rest + data).rpartition(b"\n")
        if len(rest) > _LINE_LIMIT:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._rest = rest
        self._pass_on(lines + newline)
        return len(data)

    def _end(self) -> None:
        if not self.over.done():
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            self._pass_on(self._rest + b"\n" if self._rest else b"")
            self._rest = b""
            if self._file is not None:
                os.close(self._file)
            self.over.set_result(None)

    def _write_to_file(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # a full disk is no reason to lose what can still be read
            logger.warning(
                "%s cannot be written: %s. What the worker prints from here on is on the console alone.",
                self._path,
                error.strerror,
            )
            os.close(self._file)
            self._file = None

    def _resume(self) -> None:
        if not self.over.done():
            self._loop.add_reader(self._reading, self._read)

    def _pass_on(self, lines: bytes) -> None:
        if lines:
            prefix = self._prefix
            self._console.write(self._descriptor, prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n")


class LogFile:
    """One file to which a worker writes itself; never overwritten, since a past run's output may stand in it.

    Attributes:
        writing: the worker's descriptor; closed once the worker has it.
        over: done from the start: there is nothing to wait for.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.writing = open_log(path)
        self._start = os.fstat(self.writing).st_size
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over.set_result(None)

    @property
    def tail(self) -> bytes:
        """The end of what was written so far."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, size - TAIL_LIMIT))
                return file.read(TAIL_LIMIT)
        except OSError:
            return b""

    def catch_up(self) -> None:
        """The worker has written it all itself."""

    def close(self) -> None:
        """Nothing is left to be done."""


class WorkerOutput:
    """The output of one worker.

    Args:
        out: its standard output.
        err: its standard error; the same where both go to one file.
        error_file: the file in which it tells of an exception.
    """

    def __init__(self, out: LogPipe | LogFile, err: LogPipe | LogFile, error_file: Path) -> None:
        self._out = out
        self._err = err
        self.error_file = error_file

    @property
    def descriptors(self) -> tuple[int, int]:
        """What becomes the worker's standard output and standard error."""
        return self._out.writing, self._err.writing

    def handed_over(self) -> None:
        """Close what the worker has now, so that the end of its output can be seen."""
        for descriptor in {*self.descriptors}:
            os.close(descriptor)

    async def drained(self, patience: float) -> None:
        """Wait until all that an ended worker wrote is read, for some seconds at most: a process may hold on to it."""
        self._out.catch_up()
        self._err.catch_up()
        await asyncio.wait([self._out.over, self._err.over], timeout=patience)

    def tail(self) -> str:
        """The end of what it wrote: of standard error, or where that is empty of standard output."""
        return (self._err.tail or self._out.tail).decode(errors="replace")

    def close(self) -> None:
        """Read no more."""
        self._out.close()
        self._err.close()


def open_output(
    settings: LogSettings, console: Console, scratch: Path, *, epoch: int, rank: int, local_rank: int, prefix: str
) -> WorkerOutput:
    """Make a worker's files and pipes.

    Args:
        settings: where output goes.
        console: the agent's own streams.
        scratch: a folder for what nobody wants to keep.
        epoch: the epoch in which the worker runs.
        rank: its rank.
        local_rank: its rank on this node.
        prefix: what stands before each line that is passed on.

    Raises:
        SettingsError: a file cannot be made.
    """
    folder = (settings.directory or scratch) / f"epoch_{epoch}" / f"rank_{rank}"
    redirected = settings.redirects.get(local_rank, Streams.NONE)
    teed = settings.tee.get(local_rank, Streams.NONE)

    def stream(which: Streams, name: str) -> LogPipe | LogFile:
        to_file = settings.directory is not None and which in redirected | teed
        if to_file and which not in teed:
            return LogFile(folder / name)
        file = folder / name if to_file else None
        return LogPipe(prefix=prefix.encode(), console=console, descriptor=which.value, file=file)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        error_file = _unused(folder, "error", ".json")
        if settings.directory is not None and not redirected | teed:
            both = LogFile(folder / "output.log")
            return WorkerOutput(both, both, error_file)
        out = stream(Streams.OUT, "stdout.log")
        return WorkerOutput(out, stream(Streams.ERR, "stderr.log"), error_file)
    except OSError as error:
        raise _unwritable(folder, error) from None


def make_folder(settings: LogSettings) -> None:
    """Make the folder in which workers' output goes, if one is named, before there are workers.

    Raises:
        SettingsError: it cannot be made.
    """
    if settings.directory is not None:
        try:
            settings.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(settings.directory, error) from None


def _unwritable(folder: Path, error: OSError) -> SettingsError:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return SettingsError("too many files are open for so many workers: raise the limit (ulimit -n), or have fewer.")
    why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
    return SettingsError(f"workers' output cannot be written below {folder}: {why}. Choose another --log-dir.")


def open_log(path: Path) -> int:
    """A descriptor that appends to a file, on a line of its own where the one that wrote there last has ended none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def _unused(folder: Path, stem: str, suffix: str) -> Path:
    for number in itertools.count(1):
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")
        if not path.exists():
            return path
    raise AssertionError
