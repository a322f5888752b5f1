"""The shared memory of a worker's metrics. The values survive any exit of the worker.

The memory is a file of fixed size. One process maps and writes it; the agent only reads it, without a lock. A value is
an aligned double. Layout, in words of 8 bytes::

    0        number of complete bytes of names
    1 …      dropped values, by reason
    16 …     values: one word for a gauge or a counter; for a histogram one word per bucket (each value is counted in
             one bucket), one for values above the last bound, and one for the sum
    16384 …  names, one line of JSON each

The next program of the same worker (for example in a shell script) continues with the values of its predecessor.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.series import Form, Kind
from torchelastic.metrics.validation import REASONS

if TYPE_CHECKING:
    from pathlib import Path

_SIZE: Final = 512 << 10
_DROPPED: Final = 1
_VALUES: Final = 16
_NAMES: Final = 16384


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one series: a name of a group in a worker."""

    group: str
    name: str
    form: Form

    @property
    def words(self) -> int:
        """The number of words of its values."""
        return len(self.form.buckets) + 2 if self.form.kind is Kind.HISTOGRAM else 1


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
        self._places: dict[Source, int] = {}
        self._names_end = 0

    def values(self) -> dict[Source, tuple[float, ...]]:
        """Return the words of each source, in the order of their creation. Not thread-safe."""
        # Read and not mapped: if a worker truncates its file, the missing words are zeros.
        words = os.pread(self._descriptor, 8 * _NAMES, 0).ljust(8 * _NAMES, b"\0")
        missing = int.from_bytes(words[:8], "little") - self._names_end
        if 0 < missing <= _SIZE:
            places, read = _places(os.pread(self._descriptor, missing, 8 * _NAMES + self._names_end))
            self._places |= places
            self._names_end += read
        return {
            source: struct.unpack_from(f"{source.words}d", words, 8 * first) for source, first in self._places.items()
        }

    def dropped(self) -> tuple[float, ...]:
        """Return how many values were dropped, by :data:`~torchelastic.metrics.validation.REASONS`."""
        size = 8 * len(REASONS)
        return struct.unpack(f"{len(REASONS)}d", os.pread(self._descriptor, size, 8 * _DROPPED).ljust(size, b"\0"))


class MemoryWriter:
    """The view of the writing process.

    Args:
        path: the path of the file.

    Attributes:
        values: all words; write to the indices that :meth:`place` returns.

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
        self.values = memory.cast("d")
        self._numbers = memory.cast("Q")
        self._names = memory[8 * _NAMES :]
        self._places, self._names_end = _places(bytes(self._names[: self._numbers[0]]))
        self._free = max((first + source.words for source, first in self._places.items()), default=_VALUES)

    def place(self, source: Source) -> int | None:
        """Return the index of the first word of a source; None if there is no space for it."""
        if (place := self._places.get(source)) is not None:
            return place
        place, form = self._free, source.form
        line = json.dumps((source.group, source.name, form.kind, form.buckets, place)).encode() + b"\n"
        end = self._names_end + len(line)
        if place + source.words > _NAMES or end > len(self._names):
            return None
        self._names[self._names_end : end] = line
        self._places[source] = place
        self._numbers[0] = self._names_end = end
        self._free = place + source.words
        return place

    def count_dropped(self, reason: str) -> None:
        """Count a dropped value."""
        self.values[_DROPPED + REASONS.index(reason)] += 1


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
        if _VALUES <= first <= _NAMES - source.words:
            found[source] = first
        read += len(line)
    return found, read
