"""The memory in which a worker leaves its values for its agent, so that they survive it however it ends.

A file of fixed size, made by the agent with all its room, and mapped by both. One process writes to it and the agent
only reads, without a lock and without a word: a value is a double at an aligned place, which the processor writes in
one piece, so there is no half-written one, and nothing that the one side does can hold up the other.

In words of 8 bytes::

    0        the mark of this layout
    1        bytes of names that are there
    2 …      values that were not taken, by reason
    16 …     values: one word for a gauge or a counter; for a histogram one for each bucket (each value is counted in
             one of them), one for what lies above, and one for the sum
    16384 …  names, one after the other: length, checksum, and JSON; padded to whole words

A name is there once it is counted in word 1, which comes last, after its first value. Should its writer die before,
there is none; should a processor let another one see that word before the name, the checksum says so, and the reader
looks again next time.
Whoever is in its place later (the next program of a worker that is a shell script) goes on where it ended.

The reader believes nothing: what is not as described here is passed over.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.intake import REASONS
from torchelastic.metrics.names import Form, Kind

if TYPE_CHECKING:
    from pathlib import Path

_WORD: Final = 8
_SIZE: Final = 512 << 10
_MARK: Final = b"TEmetr\0\1"
_LENGTH_OF_NAMES: Final = 1
_DROPPED: Final = 2
_VALUES: Final = 16
_NAMES: Final = 16384
_HEAD: Final = struct.Struct("=II")
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


def make(path: Path) -> None:
    """Make the file, with all its room: where that is not there, this fails, and no write to it later.

    Raises:
        OSError: there is no room, or no such folder.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)
        os.pwrite(descriptor, _MARK, 0)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


class _Memory:
    def __init__(self, descriptor: int, protection: int) -> None:
        self._bytes = memoryview(mmap.mmap(descriptor, _SIZE, prot=protection))
        self._numbers = self._bytes.cast("Q")
        self._names = self._bytes[_NAMES * _WORD :]
        self._known: list[tuple[Source, int]] = []
        self._read_up_to = 0
        if bytes(self._bytes[: len(_MARK)]) != _MARK:
            raise ValueError("this is none of our files, or one of another version")

    def _look(self) -> None:
        """Take in the names that have come."""
        end = min(self._numbers[_LENGTH_OF_NAMES], len(self._names))
        while self._read_up_to + _HEAD.size <= end:
            length, checksum = _HEAD.unpack_from(self._names, self._read_up_to)
            body = bytes(self._names[self._read_up_to + _HEAD.size :][:length])
            if len(body) < length or zlib.crc32(body) != checksum:
                return
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                self._known.append(_decoded(body))
            self._read_up_to += _HEAD.size + _padded(length)


class MemoryReader(_Memory):
    """The agent's view of a worker's memory.

    Args:
        path: the file, which may be removed afterwards.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not what it should be.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            super().__init__(descriptor, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._values = self._bytes.cast("d")
        self._lock = threading.Lock()

    def values(self) -> dict[Source, tuple[float, ...]]:
        """What is there now: each source with its words, in the order in which they came; from any thread."""
        with self._lock:
            self._look()
            return {source: tuple(self._values[first : first + source.words]) for source, first in self._known}

    def dropped(self) -> tuple[float, ...]:
        """How many values were not taken, by :data:`~torchelastic.metrics.intake.REASONS`."""
        return tuple(self._values[_DROPPED : _DROPPED + len(REASONS)])


class MemoryWriter(_Memory):
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
            super().__init__(self._descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.values = self._bytes.cast("d")
        self._look()
        self._places = dict(self._known)
        self._free = max((first + source.words for source, first in self._known), default=_VALUES)

    def place(self, names: tuple[str, ...], form: Form) -> int | None:
        """Where the words of a source begin; None where there is no room for it.

        A new one is read once :meth:`publish` is called, when its first value is there.
        """
        source = Source(tuple(map(_shortened, names)), form)
        if (place := self._places.get(source)) is not None:
            return place
        place = self._free
        body = json.dumps((source.names, form.kind, form.buckets, place)).encode()
        begin, end = self._read_up_to, self._read_up_to + _HEAD.size + _padded(len(body))
        if place + source.words > _NAMES or end > len(self._names):
            return None
        _HEAD.pack_into(self._names, begin, len(body), zlib.crc32(body))
        self._names[begin + _HEAD.size :][: len(body)] = body
        self._places[source] = place
        self._read_up_to, self._free = end, place + source.words
        return place

    def publish(self) -> None:
        """Let the reader see all names that were given a place."""
        self._numbers[_LENGTH_OF_NAMES] = self._read_up_to

    def count_dropped(self, reason: str) -> None:
        """Count a value that was not taken."""
        self.values[_DROPPED + REASONS.index(reason)] += 1


def _decoded(body: bytes) -> tuple[Source, int]:
    names, kind, buckets, first = json.loads(body)
    source = Source(tuple(names), Form(Kind(kind), tuple(buckets)))
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
