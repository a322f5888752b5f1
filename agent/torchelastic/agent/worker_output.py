"""The standard streams of workers: the agent's own streams, files, or the console with the rank before each line.

By default, a worker inherits the agent's streams. If the output goes to a file only, the worker writes to the file
itself. Otherwise the worker writes to a pipe. The agent reads the pipe, and a thread writes whole lines to the console,
and unfinished lines after a moment. A slow reader of the console therefore blocks the workers, but not the agent.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import itertools
import locale
import logging
import os
import queue
import re
import select
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, Protocol

from torchelastic.config.settings import Streams
from torchelastic.errors import SettingsError
from torchelastic.protocol.log_format import rank_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

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

_ENCODING: Final = locale.getpreferredencoding(do_setlocale=False)

_RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"

_QUEUE_LIMIT: Final = 1 << 20
_RETRY_DELAY: Final = 0.01
"""Seconds until a pipe is read again if the console is full."""


class OutputConsumer(Protocol):
    """Takes the output of workers."""

    def write(self, descriptor: int, output: bytes, prefix: bytes = b"", source: object = None) -> None:
        """Take output of a stream, 1 or 2; only the same `source` continues a line."""

    @property
    def full(self) -> bool:
        """Whether no more output should be read for now."""

    async def close(self, *, idle_timeout: float, timeout: float) -> None:  # noqa: ASYNC109 - bounds the wait
        """Pass on the remaining output: see :meth:`Console.close`."""


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
        stream = SimpleNamespace(write=lambda text: self.write(2, text.encode(errors="backslashreplace")), flush=int)
        for handler in self._handlers:
            handler.setStream(stream)  # type: ignore[attr-defined] # a StreamHandler
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

    async def close(self, *, idle_timeout: float, timeout: float) -> None:  # noqa: ASYNC109 - bounds the wait
        """Wait for all writes: at most `timeout` seconds, and at most `idle_timeout` seconds without progress."""
        for handler in self._handlers:
            handler.setStream(sys.stderr)  # type: ignore[attr-defined] # a StreamHandler
        self._queue.put(None)
        deadline = time.monotonic() + timeout
        seen = -1
        while self._thread.is_alive() and seen != self._writes and time.monotonic() < deadline:
            seen = self._writes
            await asyncio.to_thread(self._thread.join, idle_timeout)

    def _write_all(self) -> None:
        same = False
        with contextlib.suppress(OSError):  # one of the two is closed
            same = os.path.sameopenfile(1, 2)
        unfinished: dict[int, tuple[object, bytes]] = {}  # the source and the last byte of a line without end
        while (item := self._queue.get()) is not None:
            descriptor, output, prefix, source = item
            key = 1 if same else descriptor
            if b"\r" in output:
                text = _LINE_START.sub(lambda _, prefix=prefix: prefix, output)  # type: ignore[misc]
            else:  # much faster
                text = output[:-1].replace(b"\n", b"\n" + prefix) + output[-1:]
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


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made the descriptor non-blocking
            select.select([], [descriptor], [])


class LineFilter:
    """Copies the lines of one stream that contain one of some texts to a file that several streams share."""

    def __init__(self, path: Path, prefix: bytes, texts: Sequence[str]) -> None:
        self._file = _open_log(path)
        self._prefix = prefix
        self._texts = [text.encode() for text in texts]
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Copy the lines that end in this part of the stream."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_CHUNK:]
        for line in lines:
            if any(text in line for text in self._texts):
                with contextlib.suppress(OSError):  # a full disk; the line is on the console
                    os.write(self._file, self._prefix + line + b"\n")

    def close(self) -> None:
        """Copy the last line, and close the file."""
        if self._rest:
            self.write(b"\n")
        os.close(self._file)


class LogPipe:
    """A pipe for one stream of a worker. The agent copies it to its own `descriptor`, to `file`, and through `lines`.

    The worker writes to `write_fd`. `tail` is the end of its output. `ended` is done when the pipe is no longer read.
    """

    def __init__(
        self,
        *,
        prefix: bytes,
        console: OutputConsumer,
        descriptor: int,
        file: Path | None,
        lines: LineFilter | None = None,
    ) -> None:
        self._path = file
        self._file = None if file is None else _open_log(file)
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._prefix = prefix
        self._decoder = codecs.getincrementaldecoder(_ENCODING)("replace")
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
        if self._lines is not None:
            self._lines.write(data)
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        self._forward(lines + newline)
        if self._rest and self._unfinished is None:
            self._unfinished = self._loop.call_later(_UNFINISHED_DELAY, self._forward_rest)
        return len(data)

    def _end(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._forward(self._rest + b"\n" if self._rest else b"", final=True)
            self._rest = b""
            if self._unfinished is not None:
                self._unfinished.cancel()
            if self._file is not None:
                os.close(self._file)
            if self._lines is not None:
                self._lines.close()
            self.ended.set_result(None)

    def _write_to_file(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            _write(self._file, data)
        except OSError as error:
            text = "%s cannot be written: %s. Further output of the worker is on the console only."
            logger.warning(text, self._path, error.strerror)
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

    def _forward(self, output: bytes, *, final: bool = False) -> None:
        if self._prefix:  # as torchrun does, show what is not text as replacement characters
            output = self._decoder.decode(output, final).encode(_ENCODING, "replace")
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


@dataclass
class LogPaths:
    """The files of the workers on this node by local rank, with the attributes of torch's ``LogsDest``.

    An empty path in ``stdouts`` or ``stderrs`` is the console. The content of ``tee_stdouts`` and ``tee_stderrs`` also
    goes to the console, and their lines that contain one of the filters also go to the filtered files.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class Logs:
    """Opens the output of the workers of each round, in the `scratch` folder if the settings name no folder.

    `reads_stderr` means that no worker inherits standard error, so that the agent can read it. SettingsError is raised
    if the folder cannot be created.
    """

    def __init__(
        self, settings: LogSettings, console: OutputConsumer, scratch: Path, role: str, *, reads_stderr: bool
    ) -> None:
        self._settings = settings
        self._console = console
        self._role = role
        self._reads_stderr = reads_stderr
        self._folder = settings.directory or scratch
        if settings.directory is None and (settings.redirects or settings.tee):
            self._folder = temporary_folder()
            logger.info("the files with the workers' output are in %s", self._folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def open(
        self, round: int, environments: Sequence[dict[str, str]], local_ranks: Iterable[int]
    ) -> Iterator[WorkerOutput]:
        """Open the files and pipes of the workers with these local ranks, in their order.

        The user's ``LogsSpecs`` may change `environments`, which are those of all local ranks.

        Raises:
            SettingsError: a file or pipe cannot be opened.
        """
        folder = self._folder / f"round_{round}"
        try:
            files: LogPaths | LogsDest = self._files(folder, [int(each["RANK"]) for each in environments])
            if self._settings.specs is not None:
                files = _reify(self._settings.specs, round, environments, files.error_files)
            for local_rank in local_ranks:
                yield self._output(files, local_rank, environments[local_rank]["RANK"])
        except OSError as error:
            raise _unwritable(Path(error.filename or folder), error) from None

    def _files(self, folder: Path, ranks: Sequence[int]) -> LogPaths:
        settings, files = self._settings, LogPaths()
        for local_rank, rank in enumerate(ranks):
            own = folder / f"rank_{rank}"
            own.mkdir(parents=True, exist_ok=True)
            teed = settings.tee.get(local_rank, Streams.NONE)
            saved = teed | settings.redirects.get(local_rank, Streams.NONE)
            hidden = settings.local_ranks_filter is not None and local_rank not in settings.local_ranks_filter
            for which, name, paths, tee_paths in (
                (Streams.OUT, "stdout.log", files.stdouts, files.tee_stdouts),
                (Streams.ERR, "stderr.log", files.stderrs, files.tee_stderrs),
            ):
                paths[local_rank] = str(own / name) if which in saved else os.devnull if hidden else ""
                if settings.combined and not saved:
                    paths[local_rank] = str(own / "output.log")
                if which in teed and not hidden:
                    tee_paths[local_rank] = paths[local_rank]
            names = (f"error-{number}.json" if number > 1 else "error.json" for number in itertools.count(1))
            files.error_files[local_rank] = next(str(path) for path in map(own.joinpath, names) if not path.exists())
        files.filtered_stdout, files.filtered_stderr = (
            str(folder / f"filtered_std{name}.log") for name in ("out", "err")
        )
        return files

    def _output(self, files: LogPaths | LogsDest, local_rank: int, rank: str) -> WorkerOutput:
        settings = self._settings
        default = f"[{rank_label(self._role)} $rank] " if settings.prefix else "[${role_name}${local_rank}]:"
        prefix = Template(settings.log_line_prefix_template or default).safe_substitute(
            role_name=self._role, local_rank=local_rank, rank=rank, hostname=socket.gethostname()
        )

        def stream(
            which: Streams,
            paths: Mapping[int, str],
            tee_paths: Mapping[int, str],
            filters: Sequence[str],
            filtered: str,
        ) -> WorkerStream:
            path = paths.get(local_rank, "")
            teed = bool(path) and local_rank in tee_paths
            if path and not teed:
                return LogFile(Path(path))
            if not teed and not settings.prefix and not (self._reads_stderr and which is Streams.ERR):
                return InheritedStream(which.value)
            before = prefix.encode() if teed or settings.prefix else b""
            return LogPipe(
                prefix=before,
                console=self._console,
                descriptor=which.value,
                file=Path(path) if teed else None,
                lines=LineFilter(Path(filtered), before, filters) if teed and filters else None,
            )

        out = (files.stdouts, files.tee_stdouts, settings.duplicate_stdout_filters, files.filtered_stdout)
        err = (files.stderrs, files.tee_stderrs, settings.duplicate_stderr_filters, files.filtered_stderr)
        error_file = Path(files.error_files[local_rank])
        return WorkerOutput(stream(Streams.OUT, *out), stream(Streams.ERR, *err), error_file)


def _reify(
    specs: LogsSpecs, round: int, environments: Sequence[dict[str, str]], error_files: Mapping[int, str]
) -> LogsDest:
    """Return the files that the user's object chooses; `error_files` are for workers for which it chooses none."""
    # torch's class deletes the files of an earlier attempt with the same number, and not every round is a restart.
    attempt = {_RESTART_COUNT: str(round - 1)}
    changed = {local_rank: environment | attempt for local_rank, environment in enumerate(environments)}
    try:
        files = specs.reify(changed)
    except Exception as error:
        raise SettingsError(f"{type(specs).__name__}.reify() failed: {type(error).__name__}: {error}") from error
    for local_rank, environment in enumerate(environments):
        environment.update({name: value for name, value in changed[local_rank].items() if name != _RESTART_COUNT})
        if files.error_files.get(local_rank) in {None, "", os.devnull}:
            files.error_files[local_rank] = error_files[local_rank]
        Path(files.error_files[local_rank]).unlink(missing_ok=True)
    return files


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
    return SettingsError(f"workers' output cannot be written to {folder}: {why}. Choose another folder.")


def _open_log(path: Path) -> int:
    """Return a descriptor that appends to a file, after a line break if the last line is incomplete."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
