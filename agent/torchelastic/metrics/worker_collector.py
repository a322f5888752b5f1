"""The agent's side of its workers' metrics: the memory of each worker, and its series at a scrape.

The counters and histograms of an exited worker continue in its successor: the worker of the same rank in this node's
next round, or a worker of a new rank if the ranks have changed. The gauges of an exited worker are removed.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torchelastic.agent_socket import METRICS_FILE
from torchelastic.metrics.series import (
    DROPPED,
    PLATFORM_GROUP,
    PLATFORM_SERIES,
    Form,
    Kind,
    NameRegistry,
    Series,
    user_series,
)
from torchelastic.metrics.shared_memory import MemoryReader
from torchelastic.metrics.validation import REASONS, TOO_MANY_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from prometheus_client import Metric

    from torchelastic.metrics.shared_memory import Source

_log: Final = logging.getLogger(__name__)

MAX_INHERITED: Final = 2000
"""Maximum number of counters and histograms that a worker inherits from its predecessors."""


class WorkerMemory:
    """The metrics of one worker.

    Args:
        rank: its global rank.
        reader: reads its memory; None if it has no memory.
        before: the worker whose counters continue in this one.
    """

    def __init__(self, rank: int, reader: MemoryReader | None, before: WorkerMemory | None) -> None:
        self.rank = rank
        self._reader = reader
        self._ended = False
        self._inherited: dict[Source, tuple[float, ...]] = {}
        self._dropped: tuple[float, ...] = (0.0,) * len(REASONS)
        if before is not None:
            before.ended()
            counts = [(source, tuple(words)) for source, words in before.values()]
            dropped = list(before.dropped())
            # Without the limit, a program that uses new names after each start would let them grow without end.
            dropped[REASONS.index(TOO_MANY_NAMES)] += len(counts[MAX_INHERITED:])
            self._inherited, self._dropped = dict(counts[:MAX_INHERITED]), tuple(dropped)

    def ended(self) -> None:
        """Note that the worker has exited: its gauges are no longer shown."""
        self._ended = True

    def values(self) -> Iterable[tuple[Source, Sequence[float]]]:
        """Return the current values, including the inherited ones."""
        read = [] if self._reader is None else self._reader.values()
        if self._ended:
            read = [(source, words) for source, words in read if source.form.kind is not Kind.GAUGE]
        if not self._inherited:
            return read
        found: dict[Source, Sequence[float]] = dict(self._inherited)
        for source, words in read:
            found[source] = _sum(found[source], words) if source in found else words
        return found.items()

    def dropped(self) -> tuple[float, ...]:
        """Return how many values were dropped, by reason, including those of its predecessors."""
        return self._dropped if self._reader is None else _sum(self._dropped, self._reader.dropped())


class WorkerMetrics:
    """The series of this node's workers, as a prometheus_client collector.

    Args:
        folders: folders for the memory of workers, created when needed; the first folder with enough space is used.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._workers: tuple[WorkerMemory, ...] = ()
        self._paths: list[Path] = []
        self._lock = threading.Lock()
        self._series: dict[Source, Series] = {}
        self._taken = NameRegistry()
        self._told = False

    def begin(
        self, round: int, ranks: Mapping[int, int]
    ) -> tuple[Mapping[int, Mapping[str, str]], Sequence[WorkerMemory]]:
        """Create memory for the workers of a round; the workers of the previous round have exited.

        A worker for which there is no space has no metrics.

        Args:
            round: the number of the round.
            ranks: global ranks by local rank.

        Returns:
            The environment variables of each worker by local rank, and the memory of the workers in the given order.
        """
        for path in self._paths:
            with suppress(OSError):  # the program has replaced it
                path.unlink()
        self._paths = []
        before = {worker.rank: worker for worker in self._workers}
        # Counters continue in the same rank, or in a rank that is new on this node, so no series decreases or is lost.
        left = sorted(before.keys() - set(ranks.values()))
        heirs = dict(zip(sorted(set(ranks.values()) - before.keys()), left, strict=False))
        workers: list[WorkerMemory] = []
        variables: dict[int, Mapping[str, str]] = {}
        with self._lock:
            for local_rank, rank in ranks.items():
                reader, variables[local_rank] = self._made(f"{round}.{local_rank}")
                workers.append(WorkerMemory(rank, reader, before.get(heirs.get(rank, rank))))
            self._workers = tuple(workers)
        return variables, workers

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        from torchelastic.metrics.collectors import families_of  # at the first scrape: no worker's start waits for it

        shown: list[tuple[Series, dict[str, str], Sequence[float]]] = []
        with self._lock:
            for worker in self._workers:
                rank = {"rank": str(worker.rank)}
                for source, words in worker.values():
                    series = self._series.get(source) or self._named(source)
                    shown.append((series, {**dict(series.labels), **rank}, words))
                for reason, count in zip(REASONS, worker.dropped(), strict=True):
                    if count:
                        shown.append((DROPPED, {"reason": reason, **rank}, (count,)))
        return families_of(shown)

    def _named(self, source: Source) -> Series:
        series = PLATFORM_SERIES.get(source.name) if source.group == PLATFORM_GROUP else None
        if series is None or Form(series.kind, series.buckets) != source.form:
            plain = user_series(source.group, source.name, source.form)
            series = self._taken.take(plain, (source.group, source.name, str(source.form)))
        self._series[source] = series
        return series

    def _made(self, name: str) -> tuple[MemoryReader | None, Mapping[str, str]]:
        problems = []
        for folder in self._folders:
            path = folder / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
                reader = MemoryReader(path)
            except OSError as error:
                problems.append(f"below {folder}: {error.strerror}")
            else:
                self._paths.append(path)
                return reader, {METRICS_FILE: str(path)}
        if not self._told:
            self._told = True
            _log.warning(
                "What workers measure does not appear under /metrics: no memory can be had for it (%s).",
                "; ".join(problems),
            )
        return None, {}


def _sum(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
