"""The agent's side of its workers' metrics: the memory of each worker, and its series at a scrape.

The counters and histograms of an exited worker continue in its successor: the worker of the same rank in this node's
next round, or a worker of a new rank if the ranks have changed. The gauges of an exited worker are removed.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.series import DROPPED, Kind, Series, SeriesNames, Source
from torchelastic.metrics.validation import MAX_NAMES, REASONS
from torchelastic.metrics.worker import MEMORY_SIZE, NAMES_AT, SharedMemory, places_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from prometheus_client import Metric

_log: Final = logging.getLogger(__name__)


class WorkerMemory:
    """The memory of one worker, as its agent reads it. It is allocated completely, so that no later write fails.

    Args:
        path: the path of the new file, which may be removed later.
        rank: the worker's global rank.
        before: the worker whose counters and histograms continue in this one; it has exited.

    Raises:
        OSError: there is no space, the folder does not exist, or the file exists.
    """

    def __init__(self, path: Path, rank: int, before: WorkerMemory | None = None) -> None:
        self.path = path
        self.rank = rank
        self._ended = False
        self._places: list[tuple[Source, int, int]] = []
        self._names_end = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, MEMORY_SIZE)
        except BaseException:
            path.unlink()
            raise
        if before is not None:
            before.ended()
            memory = SharedMemory(self._descriptor)
            memory.dropped[:] = before.dropped()
            for source, values in before.values()[:MAX_NAMES]:
                if (words := memory.words(source)) is not None:
                    words[:] = values

    def ended(self) -> None:
        """Note that the worker has exited: its gauges are no longer shown."""
        self._ended = True

    def values(self) -> list[tuple[Source, memoryview[float]]]:
        """Return the words of each source, in the order of their creation. Not thread-safe."""
        memory = self._read(NAMES_AT)
        missing = memory.cast("Q")[0] - self._names_end
        if 0 < missing <= MEMORY_SIZE:
            places, read = places_of(os.pread(self._descriptor, missing, 8 * NAMES_AT + self._names_end))
            self._places += [(source, first, first + source.form.size) for source, first in places.items()]
            self._names_end += read
        words = memory.cast("d")
        return [
            (source, words[first:end])
            for source, first, end in self._places
            if not self._ended or source.form.kind is not Kind.GAUGE
        ]

    def dropped(self) -> memoryview[float]:
        """Return how many values were dropped, by :data:`~torchelastic.metrics.validation.REASONS`."""
        return self._read(1 + len(REASONS)).cast("d")[1:]

    def remove(self) -> None:
        """Remove the file; the values stay readable."""
        with suppress(OSError):  # the program has replaced it
            self.path.unlink()

    def _read(self, words: int) -> memoryview:
        # Read and not mapped: if a worker truncates its file, the missing words are zeros.
        return memoryview(os.pread(self._descriptor, 8 * words, 0).ljust(8 * words, b"\0"))


class WorkerMetrics:
    """The series of this node's workers, as a prometheus_client collector.

    Args:
        folders: folders for the memory of workers, created when needed; the first folder with enough space is used.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._workers: Mapping[int, WorkerMemory] = {}
        self._lock = threading.Lock()
        self._names = SeriesNames()
        self._told = False

    def begin(self, round: int, ranks: Mapping[int, int]) -> Mapping[int, WorkerMemory]:
        """Return the memory of the workers of a round by local rank; the workers of the previous round have exited.

        A worker for which there is no space has no metrics.

        Args:
            round: the number of the round.
            ranks: global ranks by local rank.
        """
        before = {worker.rank: worker for worker in self._workers.values()}
        for worker in before.values():
            worker.remove()
        # Counters continue in the same rank, or in a rank that is new on this node, so no series decreases or is lost.
        left = sorted(before.keys() - set(ranks.values()))
        heirs = dict(zip(sorted(set(ranks.values()) - before.keys()), left, strict=False))
        with self._lock:
            made = {
                local_rank: self._made(f"{round}.{local_rank}", rank, before.get(heirs.get(rank, rank)))
                for local_rank, rank in ranks.items()
            }
            self._workers = {local_rank: memory for local_rank, memory in made.items() if memory is not None}
        return self._workers

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        from torchelastic.metrics.collectors import families_of  # at the first scrape: no worker's start waits for it

        shown: list[tuple[Series, dict[str, str], Sequence[float]]] = []
        with self._lock:
            for worker in self._workers.values():
                rank = {"rank": str(worker.rank)}
                for source, words in worker.values():
                    series = self._names.of(source)
                    shown.append((series, {**dict(series.labels), **rank}, words))
                for reason, count in zip(REASONS, worker.dropped(), strict=True):
                    if count:
                        shown.append((DROPPED, {"reason": reason, **rank}, (count,)))
        return families_of(shown)

    def _made(self, name: str, rank: int, before: WorkerMemory | None) -> WorkerMemory | None:
        problems = []
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                return WorkerMemory(folder / name, rank, before)
            except OSError as error:
                problems.append(f"below {folder}: {error.strerror}")
        if not self._told:
            self._told = True
            _log.warning(
                "What workers measure does not appear under /metrics: no memory can be had for it (%s).",
                "; ".join(problems),
            )
        return None
