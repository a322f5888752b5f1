"""The logs of a run: which there are, and how they are read while they grow.

Workers write ``<pod>/epoch_E/rank_R/output.log`` (or ``stdout.log`` and ``stderr.log``), agents ``<pod>/agent.log``.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.showing.wanted_logs import Wanted

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable
    from pathlib import Path

_EPOCH: Final = re.compile(r"epoch_(\d+)")
_RANK: Final = re.compile(r"rank_(\d+)")
_BLOCK: Final = 1 << 16
_LOOK_AGAIN: Final = 2000
"""Milliseconds. The kernel tells of changes; on file systems that tell nothing, this is when to look again."""


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """The output of one worker in one epoch, or of an agent.

    Attributes:
        epoch: 0 for an agent's.
        rank: -1 for an agent's.
        pod: whose folder it is in.
        path: the file.
    """

    epoch: int
    rank: int
    pod: str
    path: Path

    def labelled(self, line: bytes) -> bytes:
        """A whole line of output with whose it is in front; agents say most of the time who they are."""
        label = (f"[{self.pod}] " if self.rank < 0 else f"[rank {self.rank}] ").encode()
        return (line if self.rank < 0 and label in line else label + line) + b"\n"


def log_files(logs: Path, wanted: Wanted) -> list[LogFile]:
    """The logs that are there and asked for, by epoch and rank."""
    found: list[LogFile] = []
    for pod in _folders(logs):
        if wanted.pod not in (None, pod.name):
            continue
        if wanted.agents:
            found += [LogFile(0, -1, pod.name, path) for path in pod.glob("agent.log")]
            continue
        for path in pod.glob("epoch_*/rank_*/*.log"):
            epoch, rank = _EPOCH.fullmatch(path.parent.parent.name), _RANK.fullmatch(path.parent.name)
            if epoch and rank and wanted.rank in (None, int(rank[1])):
                found.append(LogFile(int(epoch[1]), int(rank[1]), pod.name, path))
    return sorted(found)


def _folders(logs: Path) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(path for path in logs.iterdir() if path.is_dir())


def tail_offset(path: Path, lines: int) -> int:
    """Where the last so many lines of a file begin, in bytes."""
    with path.open("rb") as file:
        at = end = file.seek(0, 2)
        if lines == 0:
            return end
        missing = lines
        while at > 0:
            start = max(0, at - _BLOCK)
            file.seek(start)
            block = file.read(at - start)
            # The newline at the very end ends the last line and begins none.
            stop = len(block) - 1 if at == end and block.endswith(b"\n") else len(block)
            while (newline := block.rfind(b"\n", 0, stop)) >= 0:
                missing -= 1
                if missing == 0:
                    return start + newline + 1
                stop = newline
            at = start
    return 0


class LogReader:
    """Reads files as they grow, in the order of epochs and ranks, and writes what is new.

    Args:
        write: gets whole pieces of output.
        label: whether each line says whose it is.
        tail: of a file that is there from the beginning, only so many of its last lines; None for all.
    """

    def __init__(self, write: Callable[[bytes], object], *, label: bool, tail: int | None = None) -> None:
        self._write = write
        self._label = label
        self._tail = tail
        self._at: dict[LogFile, int] = {}
        self._begun: dict[LogFile, bytes] = {}

    def read(self, files: Iterable[LogFile], *, new: bool = False) -> None:
        """Write what these files have to say that was not written yet.

        Args:
            files: in the order in which to write them.
            new: files that were never read before have come while the reader was there: ``tail`` is not for them.
        """
        for file in files:
            if file not in self._at:
                self._at[file] = 0 if new or self._tail is None else tail_offset(file.path, self._tail)
            with file.path.open("rb") as content:
                content.seek(self._at[file])
                while piece := content.read(_BLOCK):
                    self._at[file] += len(piece)
                    self._emit(file, piece)

    def finish(self) -> None:
        """Write the last lines that were never ended."""
        for file, rest in self._begun.items():
            if rest:
                self._write(file.labelled(rest))
        self._begun.clear()

    def _emit(self, file: LogFile, piece: bytes) -> None:
        if not self._label:
            self._write(piece)
            return
        *lines, rest = (self._begun.get(file, b"") + piece).split(b"\n")
        self._begun[file] = rest
        if lines:
            self._write(b"".join(file.labelled(line) for line in lines))


def follow(
    logs: Path,
    wanted: Wanted,
    reader: LogReader,
    *,
    ended: threading.Event,
    tell: Callable[[str], object],
    only: int | None = None,
) -> None:
    """Write logs as they grow, over all epochs that come, until the job has ended.

    Args:
        logs: the folder of the run's logs.
        wanted: which of them.
        reader: reads and writes them.
        ended: set when the job has ended and no file grows any more.
        tell: gets a sentence when another epoch begins.
        only: this epoch alone: it is over when the next one has begun.
    """
    from watchfiles import watch

    at_first = log_files(logs, wanted)
    current = only if only is not None else max((file.epoch for file in at_first), default=0)
    told = current if at_first else 0

    def read() -> bool:
        """Write what is new; whether there is more to come."""
        nonlocal told
        over = ended.is_set()
        for file in log_files(logs, wanted):
            if file.epoch < current or only not in (None, file.epoch):
                continue
            if file.epoch > told:
                if told:
                    tell(f"epoch {file.epoch} begins")
                told = file.epoch
            reader.read([file], new=file not in at_first)
        return not over and (only is None or latest_epoch(logs) <= only)

    if read():
        for _ in watch(
            logs,
            watch_filter=None,
            stop_event=ended,
            rust_timeout=_LOOK_AGAIN,
            yield_on_timeout=True,
            debounce=100,
            step=20,
        ):
            if not read():
                break
    read()
    reader.finish()


def latest_epoch(logs: Path) -> int:
    """The highest epoch in which a worker was started; 0 where none was."""
    return max((file.epoch for file in log_files(logs, Wanted())), default=0)
