"""The worker's side of its metrics: values also go to the agent, in addition to the configured handlers.

The import of this package in a worker opens the memory that an environment variable names. Only one process writes to
it at a time: the worker. Values of its forked and :mod:`multiprocessing` children do not reach the agent. The next
program of the same worker (for example in a shell script) continues with the values of its predecessor.

The memory is a file of fixed size. The worker maps and writes it; the agent only reads it, without a lock. A value is
an aligned double. Layout, in words of 8 bytes::

    0        number of complete bytes of names
    1 …      dropped values, by reason
    16 …     the words of each series, see :class:`~torchelastic.metrics.validation.SeriesHandler`
    16384 …  names, one line of JSON each
"""

from __future__ import annotations

import fcntl
import functools
import json
import mmap
import os
from typing import TYPE_CHECKING, Final

from torchelastic.agent_socket import METRICS_FILE, is_worker
from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series import Form, Kind, Source, series_of
from torchelastic.metrics.validation import REASONS, SeriesHandler

if TYPE_CHECKING:
    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.validation import Sink

MEMORY_SIZE: Final = 512 << 10
"""The size of a worker's memory in bytes."""
_VALUES: Final = 16
NAMES_AT: Final = 16384
"""The index of the word at which the names begin."""


class SharedMemory:
    """The memory as mapped by the only process that writes to it.

    Args:
        descriptor: of the file, which may be closed later.

    Attributes:
        dropped: the words that count dropped values, by reason.
    """

    def __init__(self, descriptor: int) -> None:
        memory = memoryview(mmap.mmap(descriptor, MEMORY_SIZE))
        self._words = memory.cast("d")
        self._numbers = memory.cast("Q")
        self._names = memory[8 * NAMES_AT :]
        self.dropped = self._words[1 : 1 + len(REASONS)]
        self._places, self._names_end = places_of(bytes(self._names[: self._numbers[0]]))
        self._free = max((first + source.form.size for source, first in self._places.items()), default=_VALUES)

    def words(self, source: Source) -> memoryview[float] | None:
        """Return the words of a source, which may be new; None if there is no space for it."""
        if (first := self._places.get(source)) is None:
            first, size = self._free, source.form.size
            line = json.dumps((source.group, source.name, *source.form, first)).encode() + b"\n"
            end = self._names_end + len(line)
            if first + size > NAMES_AT or end > len(self._names):
                return None
            self._names[self._names_end : end] = line
            self._places[source] = first
            self._numbers[0] = self._names_end = end
            self._free = first + size
        return self._words[first : first + source.form.size]


def places_of(names: bytes) -> tuple[dict[Source, int], int]:
    """Return the indices by source, and the number of complete bytes of names."""
    found: dict[Source, int] = {}
    read = 0
    for line in names.splitlines(keepends=True):
        try:
            group, name, kind, buckets, first = json.loads(line)
            source = Source(group, name, Form(Kind(kind), tuple(buckets)))
        except (ValueError, TypeError):  # the line is not complete yet
            break
        if _VALUES <= first <= NAMES_AT - source.form.size:
            found[source] = first
        read += len(line)
    return found, read


class WorkerMetricHandler(SeriesHandler):
    """Writes values to the memory that the agent reads.

    Args:
        path: the path of the worker's memory.
        registry: has the declared names.

    Raises:
        OSError: the file cannot be opened, or another process writes to it.
        ValueError: the file is too short.
    """

    def __init__(self, path: str, registry: MetricRegistry = REGISTRY) -> None:
        # Stays open for its lock, which children do not inherit.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._memory = SharedMemory(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._registry = registry
        super().__init__(self._memory.dropped)

    def _open(self, group: str, name: str) -> Sink | None:
        source = Source(group, name, self._registry.form(group, name))
        words = self._memory.words(source)
        return None if words is None else self._sink_of(series_of(source), words)


def attach() -> None:
    """Send the values of this process also to its agent; without an agent, do nothing."""
    path = os.environ.get(METRICS_FILE)
    if not path or not is_worker() or any(isinstance(handler, WorkerMetricHandler) for handler in REGISTRY.attached):
        return
    try:
        handler = WorkerMetricHandler(path)
    except (OSError, ValueError):  # another process of this worker writes to it, or the file is gone
        return
    REGISTRY.attach(handler)
    os.register_at_fork(after_in_child=functools.partial(REGISTRY.detach, handler))
