"""The shared memory of a worker's metrics. The values survive any exit of the worker.

The memory is a file of fixed size. One process maps and writes it; the agent only reads it, without a lock. A value is
an aligned double. Layout, in words of 8 bytes::

    0        number of complete bytes of names
    1 …      dropped values, by reason
    16 …     the words of each series, see :class:`~torchelastic.metrics.validation.SeriesHandler`
    16384 …  names, one line of JSON each

The next program of the same worker (for example in a shell script) continues with the values of its predecessor.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

from torchelastic.metrics.series import Form, Kind
from torchelastic.metrics.validation import DROPPED_AT, REASONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SIZE: Final = 512 << 10
_VALUES: Final = 16
_NAMES: Final = 16384


class Source(NamedTuple):
    """The source of one series: a name of a group in a worker."""

    group: str
    name: str
    form: Form


class MemoryReader:
    """The agent's view of a worker's memory. The file is allocated completely, so that no later write fails.

    Args:
        path: the path of the file, which may be removed later.

    Raises:
        OSError: there is no space, the folder does not exist, or the file exists.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, _SIZE)
        except BaseException:
            path.unlink()
            raise
        self._places: list[tuple[Source, int, int]] = []
        self._names_end = 0

    def values(self) -> list[tuple[Source, Sequence[float]]]:
        """Return the words of each source, in the order of their creation. Not thread-safe."""
        memory = self._read(_NAMES)
        missing = memory.cast("Q")[0] - self._names_end
        if 0 < missing <= _SIZE:
            places, read = _places(os.pread(self._descriptor, missing, 8 * _NAMES + self._names_end))
            self._places += [(source, first, first + source.form.size) for source, first in places.items()]
            self._names_end += read
        words = memory.cast("d")
        return [(source, words[first:end]) for source, first, end in self._places]

    def dropped(self) -> Sequence[float]:
        """Return how many values were dropped, by :data:`~torchelastic.metrics.validation.REASONS`."""
        return self._read(DROPPED_AT + len(REASONS)).cast("d")[DROPPED_AT:]

    def _read(self, words: int) -> memoryview:
        # Read and not mapped: if a worker truncates its file, the missing words are zeros.
        return memoryview(os.pread(self._descriptor, 8 * words, 0).ljust(8 * words, b"\0"))


class MemoryWriter:
    """The view of the writing process.

    Args:
        path: the path of the file.

    Attributes:
        words: all words; write to the indices that :meth:`place` returns.

    Raises:
        OSError: the file cannot be opened, or another process writes to it.
    """

    def __init__(self, path: str) -> None:
        # Stays open for its lock, which children do not inherit.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            memory = memoryview(mmap.mmap(self._descriptor, _SIZE))
        except BaseException:
            os.close(self._descriptor)
            raise
        self.words = memory.cast("d")
        self._numbers = memory.cast("Q")
        self._names = memory[8 * _NAMES :]
        self._places, self._names_end = _places(bytes(self._names[: self._numbers[0]]))
        self._free = max((first + source.form.size for source, first in self._places.items()), default=_VALUES)

    def place(self, source: Source) -> int | None:
        """Return the index of the first word of a source; None if there is no space for it."""
        if (place := self._places.get(source)) is not None:
            return place
        place, form = self._free, source.form
        line = json.dumps((source.group, source.name, form.kind, form.buckets, place)).encode() + b"\n"
        end = self._names_end + len(line)
        if place + source.form.size > _NAMES or end > len(self._names):
            return None
        self._names[self._names_end : end] = line
        self._places[source] = place
        self._numbers[0] = self._names_end = end
        self._free = place + source.form.size
        return place


def _places(names: bytes) -> tuple[dict[Source, int], int]:
    """Return the indices by source, and the number of complete bytes of names."""
    found: dict[Source, int] = {}
    read = 0
    for line in names.splitlines(keepends=True):
        try:
            group, name, kind, buckets, first = json.loads(line)
            source = Source(group, name, Form(Kind(kind), tuple(buckets)))
        except (ValueError, TypeError):  # the line is not complete yet
            break
        if _VALUES <= first <= _NAMES - source.form.size:
            found[source] = first
        read += len(line)
    return found, read
