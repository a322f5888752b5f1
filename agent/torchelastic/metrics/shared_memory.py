"""The memory in which a worker leaves its values for its agent, so that they survive however the worker ends.

A file of fixed size. One process maps it and writes; the agent only reads, without a lock. A value is a double at an
aligned place, which is written and copied in one piece. In words of 8 bytes::

    0        the mark of this layout
    1        bytes of names
    2 …      values that were dropped, by reason
    16 …     values: one word for a gauge or a counter; for a histogram one for each bucket (each value is counted in
             one of them), one for values above the last bound, and one for the sum
    16384 …  names, one line of JSON each

A name counts once word 1 covers it, which is written after its first value. The next program of the same worker (as in
a shell script) continues where the one before ended. The agent reads by its own descriptor and maps nothing, so a
worker that truncates its file harms itself only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.series import Form, Kind
from torchelastic.metrics.validation import REASONS

if TYPE_CHECKING:
    from pathlib import Path

_SIZE: Final = 512 << 10
_MARK: Final = b"TEmetr\0\2"
_LENGTH_OF_NAMES: Final = 1
_DROPPED: Final = 2
_VALUES: Final = 16
_NAMES: Final = 16384
_LONGEST_TEXT: Final = 300


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one series.

    Attributes:
        names: the group, the name, and if the name is not a string the name of its type.
        form: what the values become.
    """

    names: tuple[str, ...]
    form: Form

    @property
    def words(self) -> int:
        """How many words its values take up."""
        return len(self.form.buckets) + 2 if self.form.kind is Kind.HISTOGRAM else 1


def make(path: Path) -> MemoryReader:
    """Make the file with all its room, so that no later write to it fails.

    Raises:
        OSError: there is no room, no such folder, or a file of that name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)
        os.pwrite(descriptor, _MARK, 0)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return MemoryReader(descriptor)


class MemoryReader:
    """The agent's view of a worker's memory.

    Args:
        descriptor: of the file, which may be removed meanwhile; closed along with this object.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._lock = threading.Lock()
        self._places: dict[Source, int] = {}
        self._names_end = 0

    def values(self) -> dict[Source, tuple[float, ...]]:
        """Return each source with its words, in the order in which they came; may be called in any thread."""
        with self._lock:
            length = min(int.from_bytes(self._read(1, _LENGTH_OF_NAMES), "little"), _SIZE - 8 * _NAMES)
            if length > self._names_end:
                names = os.pread(self._descriptor, length - self._names_end, 8 * _NAMES + self._names_end)
                places, read = _places(names)
                self._places |= places
                self._names_end += read
            end = max((first + source.words for source, first in self._places.items()), default=0)
            words = struct.unpack(f"{end}d", self._read(end, 0))
            return {source: words[first : first + source.words] for source, first in self._places.items()}

    def dropped(self) -> tuple[float, ...]:
        """Return how many values were dropped, by :data:`~torchelastic.metrics.validation.REASONS`."""
        return struct.unpack(f"{len(REASONS)}d", self._read(len(REASONS), _DROPPED))

    def _read(self, words: int, first: int) -> bytes:
        """Return words of the file; zeros in place of those that are missing."""
        return os.pread(self._descriptor, 8 * words, 8 * first).ljust(8 * words, b"\0")


class MemoryWriter:
    """The view of the one process that writes.

    Args:
        path: the file.

    Attributes:
        values: all words, to be written to at the places that :meth:`place` returns.

    Raises:
        OSError: it cannot be opened, or another process writes to it.
        ValueError: it is another kind of file.
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
        if bytes(memory[: len(_MARK)]) != _MARK:
            raise ValueError("this file is not a worker's metrics, or one of another version")
        self.values = memory.cast("d")
        self._numbers = memory.cast("Q")
        self._names = memory[8 * _NAMES :]
        self._places, self._names_end = _places(bytes(self._names[: self._numbers[_LENGTH_OF_NAMES]]))
        self._free = max((first + source.words for source, first in self._places.items()), default=_VALUES)

    def place(self, names: tuple[str, ...], form: Form) -> int | None:
        """Return the first word of a source; None if there is no room for it.

        A new source is read once :meth:`publish` is called, after its first value.
        """
        source = Source(tuple(map(_shortened, names)), form)
        if (place := self._places.get(source)) is not None:
            return place
        place = self._free
        line = json.dumps((source.names, form.kind, form.buckets, place)).encode() + b"\n"
        end = self._names_end + len(line)
        if place + source.words > _NAMES or end > len(self._names):
            return None
        self._names[self._names_end : end] = line
        self._places[source] = place
        self._names_end, self._free = end, place + source.words
        return place

    def publish(self) -> None:
        """Let the reader see all names that were given a place."""
        self._numbers[_LENGTH_OF_NAMES] = self._names_end

    def count_dropped(self, reason: str) -> None:
        """Count a value that was dropped."""
        self.values[_DROPPED + REASONS.index(reason)] += 1


def _places(names: bytes) -> tuple[dict[Source, int], int]:
    """Return the sources that are named there with their places, and how many bytes of names are complete."""
    found: dict[Source, int] = {}
    read = 0
    for line in names.splitlines(keepends=True):
        try:
            texts, kind, buckets, first = json.loads(line)
            source = Source(tuple(texts), Form(Kind(kind), tuple(buckets)))
        except (ValueError, TypeError):
            break  # not all of it is visible yet
        if _VALUES <= first <= _NAMES - source.words:
            found[source] = first
        read += len(line)
    return found, read


def _shortened(text: str) -> str:
    """Return a text of limited length that differs from those of all other texts."""
    if len(text) <= _LONGEST_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    return f"{text[:_LONGEST_TEXT]}_{digest}"
