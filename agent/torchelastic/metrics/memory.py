"""The memory in which a worker leaves its values for its agent, so that they survive it however it ends.

A file of fixed size, made by the agent with all its room. One process maps it and writes, and the agent only reads,
without a lock and without a word: a value is a double at an aligned place, which the processor writes in one piece and
the kernel copies in pieces of a word or more, so none is read half-written, and nothing that the one side does can hold
up the other.

In words of 8 bytes::

    0        the mark of this layout
    1        bytes of names that are there
    2 …      values that were not taken, by reason
    16 …     values: one word for a gauge or a counter; for a histogram one for each bucket (each value is counted in
             one of them), one for what lies above, and one for the sum
    16384 …  names, one after the other: length, checksum, and JSON; padded to whole words

A name is there once it is counted in word 1, which comes last, after its first value. Should its writer die before,
there is none; should a processor let another one see that word before the name, the length or the checksum says so, and
the reader looks again next time.
Whoever is in its place later (the next program of a worker that is a shell script) goes on where it ended.

The reader believes nothing: what is not as described here is passed over. It reads what it has made itself, by the
descriptor from then, whatever has that path by now. And it maps nothing: the program may truncate its file, and whoever
touches a mapping beyond a file's end is killed. So is the worker that goes on to measure there, and nobody else.
It has a path, and is no memory that is sealed against that, because the path alone reaches every program of a worker:
descriptors are lost on the way through a shell script's programs, and those of the agent below /proc are out of reach
for one that has changed its user namespace or given up capabilities.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
import sys
import threading
import weakref
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.intake import REASONS
from torchelastic.metrics.names import Form, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_WORD: Final = 8
_SIZE: Final = 512 << 10
_MARK: Final = b"TEmetr\0\1"
_LENGTH_OF_NAMES: Final = 1
_DROPPED: Final = 2
_VALUES: Final = 16
_NAMES: Final = 16384
_HEAD: Final = struct.Struct("=II")
_DROPPED_COUNTS: Final = struct.Struct(f"{len(REASONS)}d")
_LONGEST_TEXT: Final = 300


@dataclass(frozen=True, slots=True)
class Source:
    """What one series comes from.

    Attributes:
        names: the group, the name, and where that is no string the name of its type.
        form: what the values become.
    """

    names: tuple[str, ...]
    form: Form

    @property
    def words(self) -> int:
        """How many words its values take up."""
        return len(self.form.buckets) + 2 if self.form.kind is Kind.HISTOGRAM else 1

    @property
    def growing_words(self) -> int:
        """How many of them, from the first one on, never go down."""
        if self.form.kind is Kind.GAUGE:
            return 0
        return self.words - (self.form.kind is Kind.HISTOGRAM and self.form.buckets[0] < 0)


def make(path: Path) -> MemoryReader:
    """Make the file, with all its room: where that is not there, this fails, and no write to it later.

    Raises:
        OSError: there is no room, or no such folder, or something of that name.
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
    """The agent's view of a worker's memory. Nothing that is done to the file makes it raise.

    Args:
        descriptor: of the file, which may be removed meanwhile; closed when nobody has this object any more, so that
            no thread ever reads what has got its number since.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._lock = threading.Lock()
        # Each with its first word, and with the ends of its words and of those among them that only grow.
        self._known: list[tuple[Source, int, int, int]] = []
        self._names_end = 0
        self._values_end = _VALUES

    def values(self) -> dict[Source, tuple[float, ...]]:
        """What is there now: each source with its words, in the order in which they came; from any thread."""
        with self._lock:
            self._look()
            # Only now, since a name that is there has its first value. A read from the first word on keeps all words
            # aligned, which is what has each copied whole.
            beginning = self._beginning(self._values_end)
            if not beginning:
                return {}
            words = struct.unpack(f"{self._values_end}d", beginning)
            return {
                source: words[first:end]
                for source, first, end, counts_end in self._known
                # What only grows is a number of 0 or more, or it is none of ours.
                if first == counts_end or all(word >= 0 for word in words[first:counts_end])
            }

    def dropped(self) -> tuple[float, ...]:
        """How many values were not taken, by :data:`~torchelastic.metrics.intake.REASONS`."""
        beginning = self._beginning(_VALUES)
        counts = _DROPPED_COUNTS.unpack_from(beginning, _DROPPED * _WORD) if beginning else ()
        return counts if counts and all(count >= 0 for count in counts) else (0.0,) * len(REASONS)

    def _look(self) -> None:
        """Take in the names that have come."""
        beginning = self._beginning(_VALUES)
        length = int.from_bytes(beginning[_LENGTH_OF_NAMES * _WORD :][:_WORD], sys.byteorder)
        end = min(length, _SIZE - _NAMES * _WORD)
        if end > self._names_end:
            names = self._read(end - self._names_end, _NAMES * _WORD + self._names_end)
            sources, length = _sources(memoryview(names))
            self._known += [
                (source, first, first + source.words, first + source.growing_words) for source, first in sources
            ]
            self._names_end += length
            self._values_end = max(self._values_end, _values_end(sources))

    def _beginning(self, words: int) -> bytes:
        """The file's first words; nothing where they are not there or are not ours."""
        found = self._read(words * _WORD, 0)
        return found if found.startswith(_MARK) else b""

    def _read(self, size: int, begin: int) -> bytes:
        """Bytes of the file; nothing where not all of them are there."""
        try:
            found = os.pread(self._descriptor, size, begin)
        except OSError:
            return b""
        return found if len(found) == size else b""


class MemoryWriter:
    """The view of the one process that writes, for as long as it lives.

    Args:
        path: the file.

    Attributes:
        values: all words, to be written to at the places that :meth:`place` gives.

    Raises:
        OSError: it cannot be opened, or another process writes to it.
        ValueError: it is not what it should be.
    """

    def __init__(self, path: str) -> None:
        # Kept open, since the lock is; it belongs to this process alone, and not to what it forks.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            memory = _mapped(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.values = memory.cast("d")
        self._numbers = memory.cast("Q")
        self._names = memory[_NAMES * _WORD :]
        known, self._names_end = _sources(self._names[: self._numbers[_LENGTH_OF_NAMES]])
        self._places = dict(known)
        self._free = _values_end(known)

    def place(self, names: tuple[str, ...], form: Form) -> int | None:
        """Where the words of a source begin; None where there is no room for it.

        A new one is read once :meth:`publish` is called, when its first value is there.
        """
        source = Source(tuple(map(_shortened, names)), form)
        if (place := self._places.get(source)) is not None:
            return place
        place = self._free
        body = json.dumps((source.names, form.kind, form.buckets, place)).encode()
        begin, end = self._names_end, self._names_end + _HEAD.size + _padded(len(body))
        if place + source.words > _NAMES or end > len(self._names):
            return None
        _HEAD.pack_into(self._names, begin, len(body), zlib.crc32(body))
        self._names[begin + _HEAD.size :][: len(body)] = body
        self._places[source] = place
        self._names_end, self._free = end, place + source.words
        return place

    def publish(self) -> None:
        """Let the reader see all names that were given a place."""
        self._numbers[_LENGTH_OF_NAMES] = self._names_end

    def count_dropped(self, reason: str) -> None:
        """Count a value that was not taken."""
        self.values[_DROPPED + REASONS.index(reason)] += 1


def _mapped(descriptor: int) -> memoryview:
    memory = memoryview(mmap.mmap(descriptor, _SIZE))
    if bytes(memory[: len(_MARK)]) != _MARK:
        raise ValueError("this is none of our files, or one of another version")
    return memory


def _sources(names: memoryview) -> tuple[list[tuple[Source, int]], int]:
    """The sources that are named there, with the places of their first words; and up to where that was read."""
    found, at = [], 0
    while at + _HEAD.size <= len(names):
        length, checksum = _HEAD.unpack_from(names, at)
        body = bytes(names[at + _HEAD.size :][:length])
        if not body or len(body) < length or zlib.crc32(body) != checksum:
            break  # it has not come yet; nothing at all would have the right checksum
        with suppress(ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
            found.append(_decoded(body))
        at += _HEAD.size + _padded(length)
    return found, at


def _values_end(sources: Iterable[tuple[Source, int]]) -> int:
    return max((first + source.words for source, first in sources), default=_VALUES)


def _decoded(body: bytes) -> tuple[Source, int]:
    names, kind, buckets, first = json.loads(body)
    source = Source(tuple(names), Form(Kind(kind), tuple(map(float, buckets))))
    texts = all(type(text) is str for text in source.names) and 2 <= len(source.names) <= 3
    if not texts or type(first) is not int or not _VALUES <= first <= _NAMES - source.words:
        raise ValueError("no name")
    return source, first


def _padded(length: int) -> int:
    return math.ceil(length / _WORD) * _WORD


def _shortened(text: str) -> str:
    """A text that is not too long, and another one for each."""
    if len(text) <= _LONGEST_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    return f"{text[:_LONGEST_TEXT]}_{digest}"
