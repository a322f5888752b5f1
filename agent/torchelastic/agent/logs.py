"""The standard streams of workers: the agent's own streams, files, or the console with the rank before each line.

By default, a worker inherits the agent's streams. If the output goes to a file only, the worker writes to the file
itself. Otherwise the worker writes to a pipe. The agent reads the pipe, and a thread writes whole lines to the console,
and unfinished lines after a moment. A slow reader of the console therefore blocks the workers, but not the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import queue
import re
import select
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.config.settings import Streams
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.config.settings import LogSettings

logger = logging.getLogger(__name__)

TAIL_LIMIT: Final = 16 << 10
"""Number of bytes at the end of a worker's output that are kept to explain a failure."""

_CHUNK: Final = 64 << 10
_PIPE_LIMIT: Final = 1 << 20
"""Maximum number of bytes in a pipe."""

_UNFINISHED_DELAY: Final = 0.05
"""Seconds after which an unfinished line is written to the console: a progress bar, for example, or a question."""

_LINE_START: Final = re.compile(rb"(?<=\n)(?=.)|(?<=\r)(?=[^\n])", re.DOTALL)
"""Matches the start of each line but the first; a carriage return also starts a line, which replaces the former."""

_PIECE: Final = re.compile(rb"(?s:.{0,%d})\n|[^\n]+\n?" % (select.PIPE_BUF - 1))
"""Matches as many whole lines as the kernel writes to a pipe atomically. A longer line is one match."""

_QUEUE_LIMIT: Final = 1 << 20
_RETRY_DELAY: Final = 0.01
"""Seconds until a pipe is read again if the console is full."""


class Console:
    """The agent's standard output and standard error; a thread writes to them.

    Args:
        carries_log: whether log messages to standard error use the same thread, so that no message interrupts a line.
    """

    def __init__(self, *, carries_log: bool = False) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes, bytes, object] | None] = queue.SimpleQueue()
        self._queued = 0  # bytes, counted without a lock: a few more or less do not matter
        self._written = 0
        self._writes = 0
        handlers = logging.getLogger().handlers if carries_log else []
        self._handlers = [handler for handler in handlers if getattr(handler, "stream", None) is sys.stderr]
        for handler in self._handlers:
            handler.setStream(_LogStream(self.write))  # type: ignore[attr-defined] # a StreamHandler
        self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
        self._thread.start()

    def write(self, descriptor: int, output: bytes, prefix: bytes = b"", source: object = None) -> None:
        """Write output to a descriptor, with a prefix before each line; only the same source continues a line."""
        self._queued += len(output)
        self._queue.put((descriptor, output, prefix, source))

    @property
    def full(self) -> bool:
        """Whether the queue is full, so that no more output should be read."""
        return self._queued - self._written > _QUEUE_LIMIT

    async def close(self, *, patience: float, limit: float) -> None:
        """Wait for all writes: at most `limit` seconds, and at most `patience` seconds without progress."""
        for handler in self._handlers:
            handler.setStream(sys.stderr)  # type: ignore[attr-defined] # a StreamHandler
        self._queue.put(None)
        deadline = time.monotonic() + limit
        seen = -1
        while self._thread.is_alive() and seen != self._writes and time.monotonic() < deadline:
            seen = self._writes
            await asyncio.to_thread(self._thread.join, patience)

    def _write_all(self) -> None:
        same = False
        with contextlib.suppress(OSError):  # one of the two is closed
            same = os.path.sameopenfile(1, 2)
        unfinished: dict[int, tuple[object, bytes]] = {}  # the source and the last byte of a line without end
        while (item := self._queue.get()) is not None:
            descriptor, output, prefix, source = item
            key = 1 if same else descriptor
            text = _LINE_START.sub(lambda _, prefix=prefix: prefix, output)  # type: ignore[misc]
            former, last = unfinished.pop(key, (source, b"\n"))
            if former is not source:
                text = b"\n" + prefix + text
            elif (last == b"\n" and output[:1] != b"\r") or (last == b"\r" and output[:1] != b"\n"):
                text = prefix + text
            if not output.endswith(b"\n"):
                unfinished[key] = source, output[-1:]
            self._write_pieces(descriptor, text)
            self._written += len(output)
        for key in unfinished:
            self._write_pieces(key, b"\n")

    def _write_pieces(self, descriptor: int, text: bytes) -> None:
        for piece in _PIECE.finditer(text):
            with contextlib.suppress(OSError):  # the reader has closed the stream: this output is dropped
                _write(descriptor, piece[0])
            self._writes += 1


class _LogStream:
    """A stream for :mod:`logging` that never blocks."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        self._write = write

    def write(self, text: str) -> None:
        self._write(2, text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        pass


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made the descriptor non-blocking
            select.select([], [descriptor], [])


class LogPipe:
    """A pipe for one stream of a worker. The agent copies it to its own `descriptor`, and to `file` unless it is None.

    The worker writes to `write_fd`. `tail` is the end of its output. `ended` is done when the pipe is no longer read.
    """

    def __init__(self, *, prefix: bytes, console: Console, descriptor: int, file: Path | None) -> None:
        self._path = file
        self._file = None if file is None else _open_log(file)
        self._loop = asyncio.get_running_loop()
        self._prefix = prefix
        self._console = console
        self._descriptor = descriptor
        self._rest = b""
        self._unfinished: asyncio.TimerHandle | None = None
        self.tail = b""
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._read_fd, self._read)

    def catch_up(self) -> None:
        """Read the remaining output of an exited worker, even if the console is full."""
        left = _PIPE_LIMIT
        while left > 0 and (size := self._read_chunk()):
            left -= size

    def close(self) -> None:
        """Read the remaining output, and stop reading."""
        self.catch_up()
        self._end()

    def _read(self) -> None:
        if self._read_chunk() and self._console.full:
            self._loop.remove_reader(self._read_fd)
            self._loop.call_later(_RETRY_DELAY, self._resume)

    def _read_chunk(self) -> int:
        if self.ended.done():
            return 0
        try:
            data = os.read(self._read_fd, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        self.tail = (self.tail + data)[-TAIL_LIMIT:]
        self._write_to_file(data)
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        self._forward(lines + newline)
        if self._rest and self._unfinished is None:
            self._unfinished = self._loop.call_later(_UNFINISHED_DELAY, self._forward_rest)
        return len(data)

    def _end(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._forward(self._rest + b"\n" if self._rest else b"")
            self._rest = b""
            if self._unfinished is not None:
                self._unfinished.cancel()
            if self._file is not None:
                os.close(self._file)
            self.ended.set_result(None)

    def _write_to_file(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            logger.warning(
                "%s cannot be written: %s. Further output of the worker is on the console only.",
                self._path,
                error.strerror,
            )
            os.close(self._file)
            self._file = None

    def _resume(self) -> None:
        if self.ended.done():
            return
        if self._console.full:
            self._loop.call_later(_RETRY_DELAY, self._resume)
        else:
            self._loop.add_reader(self._read_fd, self._read)

    def _forward_rest(self) -> None:
        self._unfinished = None
        self._forward(self._rest)
        self._rest = b""

    def _forward(self, output: bytes) -> None:
        if output:
            self._console.write(self._descriptor, output, self._prefix, self)


class InheritedStream:
    """One of the agent's own streams, which the worker inherits."""

    tail: Final = b""

    def __init__(self, descriptor: int) -> None:
        self.write_fd = os.dup(descriptor)


class LogFile:
    """A file to which a worker writes through the descriptor `write_fd`; earlier content of the file is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.write_fd = _open_log(path)
        self._start = os.fstat(self.write_fd).st_size

    @property
    def tail(self) -> bytes:
        """The end of the output so far."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, size - TAIL_LIMIT))
                return file.read(TAIL_LIMIT)
        except OSError:
            return b""


WorkerStream = LogPipe | LogFile | InheritedStream


class WorkerOutput:
    """The output of one worker, and its error file, to which the worker may write an exception."""

    def __init__(self, out: WorkerStream, err: WorkerStream, error_file: Path) -> None:
        self._out = out
        self._err = err
        self._pipes = [stream for stream in (out, err) if isinstance(stream, LogPipe)]
        self.error_file = error_file

    @property
    def streams(self) -> dict[int, int]:
        """The descriptors of the worker's standard streams; the agent's standard input is one of them if it is open."""
        streams = {1: self._out.write_fd, 2: self._err.write_fd}
        with contextlib.suppress(OSError):
            os.fstat(0)
            streams = {0: 0, **streams}
        return streams

    def close_descriptors(self) -> None:
        """Close the descriptors after the worker has inherited them."""
        for descriptor in {self._out.write_fd, self._err.write_fd}:
            os.close(descriptor)

    async def drain(self, seconds: float) -> None:
        """Read the remaining output of an exited worker; wait up to `seconds` for other writers of its pipe."""
        for pipe in self._pipes:
            pipe.catch_up()
        if self._pipes:
            await asyncio.wait([pipe.ended for pipe in self._pipes], timeout=seconds)

    def tail(self) -> str:
        """Return the end of standard error, or of standard output if that is empty."""
        return (self._err.tail or self._out.tail).decode(errors="replace")

    def close(self) -> None:
        """Read the remaining output, and stop reading."""
        for pipe in self._pipes:
            pipe.close()


def open_output(
    settings: LogSettings, console: Console, scratch: Path, *, round: int, rank: int, local_rank: int, prefix: str
) -> WorkerOutput:
    """Open a worker's files and pipes; raise SettingsError if that is not possible."""
    folder = (settings.directory or scratch) / f"round_{round}" / f"rank_{rank}"
    redirected = settings.redirects.get(local_rank, Streams.NONE)
    teed = settings.tee.get(local_rank, Streams.NONE)

    hidden = settings.shown is not None and local_rank not in settings.shown

    def stream(which: Streams, name: str) -> WorkerStream:
        to_file = settings.directory is not None and which in redirected | teed
        if to_file and (which not in teed or hidden):
            return LogFile(folder / name)
        if hidden:
            return LogFile(Path(os.devnull))
        if not settings.prefix and which not in teed:
            return InheritedStream(which.value)
        file = folder / name if to_file else None
        return LogPipe(prefix=prefix.encode(), console=console, descriptor=which.value, file=file)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = (f"error-{number}.json" if number > 1 else "error.json" for number in itertools.count(1))
        error_file = next(path for path in map(folder.joinpath, names) if not path.exists())
        if settings.directory is not None and not settings.is_temporary and not redirected | teed:
            both = LogFile(folder / "output.log")
            return WorkerOutput(both, both, error_file)
        out = stream(Streams.OUT, "stdout.log")
        return WorkerOutput(out, stream(Streams.ERR, "stderr.log"), error_file)
    except OSError as error:
        raise _unwritable(folder, error) from None


def make_folder(settings: LogSettings) -> LogSettings:
    """Create the folder for the workers' files, and return the settings with this folder.

    Raises:
        SettingsError: the folder cannot be created.
    """
    if settings.directory is None and settings.redirects:
        settings = dataclasses.replace(settings, directory=temporary_folder(), is_temporary=True)
        logger.info("the redirected output of the workers is in %s", settings.directory)
    if settings.directory is not None:
        try:
            settings.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(settings.directory, error) from None
    return settings


def temporary_folder() -> Path:
    """Create a private folder for temporary files; raise SettingsError if that is not possible."""
    try:
        return Path(tempfile.mkdtemp(prefix="torchelastic-"))
    except OSError as error:
        raise SettingsError(
            f"there is no folder for temporary files: {error.strerror}. Mount a writable folder at /tmp, or set TMPDIR."
        ) from None


def _unwritable(folder: Path, error: OSError) -> SettingsError:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return SettingsError("too many files are open: raise the limit (ulimit -n), or start fewer workers.")
    why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
    return SettingsError(f"workers' output cannot be written to {folder}: {why}. Choose another --log-dir.")


def _open_log(path: Path) -> int:
    """Return a descriptor that appends to a file, after a line break if the last line is incomplete."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
