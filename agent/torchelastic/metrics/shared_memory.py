"""The memory in which a worker leaves its values for its agent, so that they survive however the worker ends.

A file of fixed size. One process maps it and writes; the agent only reads, without a lock. A value is a double at an
aligned place. In words of 8 bytes::

    0        bytes of names that are complete
    1 …      values that were dropped, by reason
    16 …     values: one word for a gauge or a counter; for a histogram one for each bucket (each value is counted in
             one of them), one for values above the last bound, and one for the sum
    16384 …  names, one line of JSON each

The next program of the same worker (as in a shell script) continues where the one before ended.
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
    """The source of one series: what a worker measures under a name of a group."""

    group: str
    name: str
    form: Form

    @property
    def words(self) -> int:
        """How many words its values take up."""
        return len(self.form.buckets) + 2 if self.form.kind is Kind.HISTOGRAM else 1


class MemoryReader:
    """The agent's view of a worker's memory. The file is made with all its room, so that no later write to it fails.

    Args:
        path: of the file, which may be removed meanwhile.

    Raises:
        OSError: there is no room, no such folder, or a file of that name.
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
        """Return each source with its words, in the order in which they came; called by one thread at a time."""
        # Read and not mapped: a worker may truncate its file, and then its words are zeros.
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
    """The view of the one process that writes.

    Args:
        path: the file.

    Attributes:
        values: all words, to be written to at the places that :meth:`place` returns.

    Raises:
        OSError: it cannot be opened, or another process writes to it.
    """

    def __init__(self, path: str) -> None:
        # Kept open for its lock, which belongs to this process and not to its children.
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
        """Return the first word of a source; None if there is no room for it."""
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
        """Count a value that was dropped."""
        self.values[_DROPPED + REASONS.index(reason)] += 1


def _places(names: bytes) -> tuple[dict[Source, int], int]:
    """Return the sources that are named there with their places, and how many bytes of names are complete."""
    found: dict[Source, int] = {}
    read = 0
    for line in names.splitlines(keepends=True):
        try:
            group, name, kind, buckets, first = json.loads(line)
            source = Source(group, name, Form(Kind(kind), tuple(buckets)))
        except (ValueError, TypeError):  # not all of it is visible yet
            break
        if _VALUES <= first <= _NAMES - source.words:
            found[source] = first
        read += len(line)
    return found, read
