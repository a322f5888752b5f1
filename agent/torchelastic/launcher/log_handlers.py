"""Where the lines of a launch go: handlers of :mod:`logging` that select a host and a worker."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchelastic.agent.function_call import RECORD_MARK
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOG_DIRECTORY: Final = "TORCHRUNX_LOG_DIR"
"""The environment variable with the folder of the log files; ``./torchelastic_logs`` by default."""

_LEVELS: Final = {1: logging.INFO, 2: logging.ERROR}
"""The level of a line of standard output and standard error that is not a log record."""


LOG_LEVEL: Final = "TORCHRUNX_LOG_LEVEL"
"""The environment variable with the minimum level of the lines in the log files; all lines by default."""


def get_handler_filter(
    hostname: str, local_rank: int | None, log_level: int = logging.NOTSET
) -> Callable[[logging.LogRecord], bool]:
    """Return a filter for handlers, which takes only the lines of one worker, or of one agent.

    Args:
        hostname: the host, by the name in ``hostnames``.
        local_rank: the local rank of the worker; None for the agent.
        log_level: the minimum level; standard output has INFO, and standard error has ERROR.
    """

    def selects(record: logging.LogRecord) -> bool:
        own = getattr(record, "hostname", None), getattr(record, "local_rank", None)
        return own == (hostname, local_rank) and record.levelno >= log_level

    return selects


def add_filter_to_handler(
    handler: logging.Handler, hostname: str, local_rank: int | None, log_level: int = logging.NOTSET
) -> None:
    """Let a handler take only the lines of one worker, or of one agent: see :func:`get_handler_filter`."""
    handler.addFilter(get_handler_filter(hostname, local_rank, log_level))


class RedirectHandler(logging.Handler):
    """Passes lines to this program's loggers: ``torchrunx.HOST`` for an agent, ``torchrunx.HOST.RANK`` for a worker."""

    def emit(self, record: logging.LogRecord) -> None:
        """Let the logger handle the record if its level is enabled."""
        names = ["torchrunx", record.hostname, record.local_rank]  # type: ignore[attr-defined] # set by Lines
        logger = logging.getLogger(".".join(f"{name}" for name in names if name is not None))
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def stream_handler(hostname: str, local_rank: int | None, log_level: int = logging.NOTSET) -> logging.Handler:
    """Return a handler that writes the lines of a worker or an agent to standard output, with a prefix."""
    handler = logging.StreamHandler(sys.stdout)
    who = "agent" if local_rank is None else f"worker {local_rank}"
    handler.setFormatter(logging.Formatter(f"[{hostname} {who}] %(message)s"))
    add_filter_to_handler(handler, hostname, local_rank, log_level)
    return handler


def file_handler(
    hostname: str, local_rank: int | None, path: str | os.PathLike[str], log_level: int = logging.NOTSET
) -> logging.Handler:
    """Return a handler that writes the lines of a worker or an agent to a file."""
    handler = logging.FileHandler(path, delay=True, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(message)s"))
    add_filter_to_handler(handler, hostname, local_rank, log_level)
    return handler


class _Files(logging.Handler):
    """Writes the lines of each worker and agent to a file of its own in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._began = time.strftime("%Y-%m-%dT%H-%M-%S") + f".{time.time_ns() % 1_000_000_000 // 1_000_000:03}"
        self._files: dict[tuple[str, int | None], Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key = record.hostname, record.local_rank  # type: ignore[attr-defined] # set by Lines
        try:
            if key not in self._files:
                host, rank = re.sub(r"[^\w.-]", "_", key[0]), "agent" if key[1] is None else key[1]
                path = self._folder / f"{self._began}-{host}-{rank}.log"
                self._files[key] = path.open("a", encoding="utf-8", errors="replace")
            self._files[key].write(record.getMessage() + "\n")
        except OSError:  # a full disk does not end the launch
            self.handleError(record)

    def flush(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # likewise
                file.flush()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()
        super().close()


def file_handlers(
    hostnames: Sequence[str],
    workers_per_host: Sequence[int] | None = None,
    log_dir: str | os.PathLike[str] = "torchelastic_logs",
    log_level: int = logging.NOTSET,
) -> list[logging.Handler]:
    """Return handlers that write the lines of each worker and agent to a file of its own in a folder.

    Args:
        hostnames: the hosts.
        workers_per_host: the number of workers of each host; None for all workers.
        log_dir: the folder, which is created.
        log_level: the minimum level.

    Raises:
        OSError: the folder cannot be created.
    """
    (folder := Path(log_dir)).mkdir(parents=True, exist_ok=True)
    counts = dict(zip(hostnames, workers_per_host, strict=True)) if workers_per_host is not None else None

    def selects(record: Any) -> bool:  # noqa: ANN401 - a record with the attributes that Lines sets
        return counts is None or (record.local_rank or 0) < counts.get(record.hostname, 0)

    handler = _Files(folder)
    handler.addFilter(selects)
    handler.setLevel(log_level)
    return [handler]


def default_handlers(hostnames: Sequence[str], workers_per_host: Sequence[int] | None = None) -> list[logging.Handler]:
    """Return handlers for all lines: one file for each worker and agent; the first worker also on standard output.

    The folder is ``$TORCHRUNX_LOG_DIR``, or ``./torchelastic_logs``; ``$TORCHRUNX_LOG_LEVEL`` limits its lines.

    Raises:
        SettingsError: the folder cannot be created, or the level does not exist.
    """
    folder = Path(os.environ.get(LOG_DIRECTORY) or "torchelastic_logs")
    name = os.environ.get(LOG_LEVEL) or "NOTSET"
    level = int(name) if name.isdecimal() else logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise SettingsError(f"{LOG_LEVEL} is {name!r}: it must be a level of logging, such as INFO, or a number.")
    try:
        files = file_handlers(hostnames, workers_per_host, folder, level)
    except OSError as error:
        raise SettingsError(
            f"The folder {folder} for the logs cannot be created: {error.strerror}. Set {LOG_DIRECTORY} to another "
            "folder, or pass log_handlers."
        ) from None
    return [*files, stream_handler(hostnames[0], 0), stream_handler(hostnames[0], None, logging.WARNING)]


@dataclass
class Lines:
    """Turns the output of workers and agents into log records, and passes them to handlers."""

    handlers: Sequence[logging.Handler]
    _rest: dict[tuple[str, int | None, int], bytes] = field(default_factory=dict)

    def write(self, host: str, local_rank: int | None, stream: int, output: bytes) -> None:
        """Handle the lines that end in this part of a stream."""
        key = host, local_rank, stream
        *lines, rest = (self._rest.pop(key, b"") + output).split(b"\n")
        if rest:
            self._rest[key] = rest
        for line in lines:
            self._handle(key, line.decode(errors="replace"))

    def flush(self) -> None:
        """Handle unfinished lines, and flush the handlers."""
        for key, rest in [*self._rest.items()]:
            self._handle(key, rest.decode(errors="replace"))
        self._rest.clear()
        for handler in self.handlers:
            handler.flush()

    def _handle(self, key: tuple[str, int | None, int], line: str) -> None:
        host, local_rank, stream = key
        level, name, message = _LEVELS[stream], "torchelastic.launcher", line
        if line.startswith(RECORD_MARK):
            with contextlib.suppress(msgspec.DecodeError):  # the program has written the mark itself
                level, name, message = msgspec.json.decode(line[1:], type=tuple[int, str, str])
        elif local_rank is None:
            level = _level_of_agent(line)
        record = logging.LogRecord(name, level, "", 0, message.rstrip("\r"), None, None)
        record.hostname, record.local_rank = host, local_rank
        for handler in self.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def _level_of_agent(line: str) -> int:
    return logging.getLevelNamesMapping().get(line.partition(" ")[0], logging.INFO)


def check_handlers(handlers: object) -> list[logging.Handler]:
    """Return the handlers; raise SettingsError if one is not a handler of logging."""
    chosen: list[Any] = [*handlers] if isinstance(handlers, Iterable) else [handlers]
    if not all(isinstance(each, logging.Handler) for each in chosen):
        raise SettingsError('log_handlers must be "auto", None or a list of logging.Handler objects.')
    return chosen
