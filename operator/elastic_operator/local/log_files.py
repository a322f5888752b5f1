"""The log files of a run, and how they are read while they grow.

Workers write ``<pod>/round_E/rank_R/output.log`` (or ``stdout.log`` and ``stderr.log``), agents ``<pod>/agent.log``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.views.log_selector import LogSelector

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable
    from pathlib import Path

_WORKER_LOG: Final = re.compile(r"round_(\d+)/rank_(\d+)/[^/]+\.log")
_BLOCK: Final = 1 << 16
_POLL_MILLISECONDS: Final = 2000
"""Some file systems do not notify of changes."""


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """The output of one worker in one round, or of an agent, whose round is 0 and rank -1."""

    round: int
    rank: int
    pod: str
    path: Path

    def labelled(self, line: bytes) -> bytes:
        """Return a line with its rank or pod in front; most lines of an agent name their pod already."""
        label = (f"[{self.pod}] " if self.rank < 0 else f"[rank {self.rank}] ").encode()
        return (line if self.rank < 0 and label in line else label + line) + b"\n"


def log_files(logs: Path, wanted: LogSelector) -> list[LogFile]:
    """Return the log files that are wanted, by round and rank."""
    if wanted.agents:
        found = [LogFile(0, -1, path.parent.name, path) for path in logs.glob("*/agent.log")]
    else:
        found = []
        for path in logs.glob("*/round_*/rank_*/*.log"):
            pod, _, file = path.relative_to(logs).as_posix().partition("/")
            if match := _WORKER_LOG.fullmatch(file):
                found.append(LogFile(int(match[1]), int(match[2]), pod, path))
    return sorted(each for each in found if wanted.pod in (None, each.pod) and wanted.rank in (None, each.rank))


def latest_round(logs: Path) -> int:
    """Return the highest round in which a worker was started; 0 if there is none."""
    return max((file.round for file in log_files(logs, LogSelector())), default=0)


def tail_offset(path: Path, lines: int) -> int:
    """Return the offset at which the last lines of a file begin."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        start, block = end, b""
        while start > 0 and block.count(b"\n") <= lines:
            size = min(start, _BLOCK)
            start -= size
            file.seek(start)
            block = file.read(size) + block
    ended = block.endswith(b"\n")
    last = block[: len(block) - ended].split(b"\n")[-lines:]
    return end - len(b"\n".join(last)) - ended if lines else end


class LogReader:
    """Reads files as they grow, and writes what was added.

    Args:
        write: takes pieces of output.
        label: whether each line begins with its rank or pod.
        tail: read only so many last lines of a file that is there at first; None for all.
    """

    def __init__(self, write: Callable[[bytes], object], *, label: bool, tail: int | None = None) -> None:
        self._write = write
        self._label = label
        self._tail = tail
        self._offsets: dict[LogFile, int] = {}
        self._partial: dict[LogFile, bytes] = {}

    def read(self, files: Iterable[LogFile], *, new: bool = False) -> None:
        """Write what was added to these files; ``tail`` does not apply to files that are ``new``."""
        for file in files:
            if file not in self._offsets:
                self._offsets[file] = 0 if new or self._tail is None else tail_offset(file.path, self._tail)
            with file.path.open("rb") as content:
                content.seek(self._offsets[file])
                while piece := content.read(_BLOCK):
                    self._offsets[file] += len(piece)
                    self._emit(file, piece)

    def finish(self) -> None:
        """Write the last lines that do not end with a newline."""
        for file, rest in self._partial.items():
            if rest:
                self._write(file.labelled(rest))
        self._partial.clear()

    def _emit(self, file: LogFile, piece: bytes) -> None:
        if not self._label:
            self._write(piece)
            return
        *lines, self._partial[file] = (self._partial.get(file, b"") + piece).split(b"\n")
        if lines:
            self._write(b"".join(file.labelled(line) for line in lines))


def follow(
    logs: Path,
    wanted: LogSelector,
    reader: LogReader,
    *,
    ended: threading.Event,
    tell: Callable[[str], object],
    only: int | None = None,
) -> None:
    """Write logs as they grow, from round to round, until the job has ended.

    Args:
        logs: the directory of the run's logs.
        wanted: which of them.
        reader: reads and writes them.
        ended: set when the job has ended and no file grows any longer.
        tell: takes a sentence when another round begins.
        only: only this round; it is over when the next one has begun.
    """
    from watchfiles import watch

    at_first = log_files(logs, wanted)
    current = only if only is not None else max((file.round for file in at_first), default=0)
    announced = current if at_first else 0

    def read() -> bool:
        """Write what was added; return whether more can follow."""
        nonlocal announced
        over = ended.is_set()
        for file in log_files(logs, wanted):
            if file.round < current or only not in (None, file.round):
                continue
            if file.round > announced:
                if announced:
                    tell(f"round {file.round} begins")
                announced = file.round
            reader.read([file], new=file not in at_first)
        return not over and (only is None or latest_round(logs) <= only)

    if read():
        for _ in watch(
            logs,
            watch_filter=None,
            stop_event=ended,
            rust_timeout=_POLL_MILLISECONDS,
            yield_on_timeout=True,
            debounce=100,
            step=20,
        ):
            if not read():
                break
    read()
    reader.finish()
