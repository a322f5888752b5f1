"""The agent's side of its workers' metrics: the memory of each worker, and the series that are made of it at a scrape.

Nothing is done for a value that a worker measures: the memory is read when somebody asks. A worker that has died leaves
its counters and histograms to its successor, which is the worker of the same rank in this node's next round; where the
ranks have changed, one of those that are new. Its gauges end with it.

prometheus_client is imported at the first scrape, so that no worker's start waits for that.
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torchelastic.metrics import shared_memory as memory
from torchelastic.metrics.api import PLATFORM_GROUP
from torchelastic.metrics.series import DROPPED, Kind, NameRegistry, platform_series, user_series
from torchelastic.metrics.validation import REASONS, TOO_MANY_NAMES
from torchelastic.training.agent_socket import METRICS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from prometheus_client import Metric

    from torchelastic.metrics.series import Series
    from torchelastic.metrics.shared_memory import MemoryReader, Source

_log: Final = logging.getLogger(__name__)

MAX_INHERITED: Final = 2000
"""Counters and histograms that a worker gets from those before it; as many as it may have itself."""

_MAX_NAMED: Final = 10_000
"""Sources whose names are remembered over a round's end."""


class WorkerMemory:
    """What one worker measures.

    Args:
        rank: its global rank.
        reader: of its memory; None where there is none, and all that is there is inherited.
        inherited: counts of those before it.
        dropped: values that those before it could not put anywhere, by reason.
    """

    def __init__(
        self,
        rank: int,
        reader: MemoryReader | None,
        inherited: Mapping[Source, tuple[float, ...]],
        dropped: Sequence[float],
    ) -> None:
        self.rank = rank
        self._reader = reader
        self._inherited = inherited
        self._dropped = dropped
        self._ended = False

    def ended(self) -> None:
        """The worker has ended: its gauges say nothing any more."""
        self._ended = True

    def values(self, *, counts_only: bool = False) -> dict[Source, tuple[float, ...]]:
        """What is to be shown of it now, with what it has inherited."""
        found = dict(self._inherited)
        for source, words in ({} if self._reader is None else self._reader.values()).items():
            if source.form.kind is not Kind.GAUGE:
                before = found.get(source)
                found[source] = words if before is None else _sum(before, words)
            elif not (self._ended or counts_only):
                found[source] = words
        return found

    def dropped(self) -> tuple[float, ...]:
        """How many values were not taken, by reason; with those before it."""
        return _sum(self._dropped, (0.0,) * len(REASONS) if self._reader is None else self._reader.dropped())


class WorkerMetrics:
    """The series of this node's workers, as a collector of prometheus_client's.

    Args:
        folders: for the memory of workers, made when they are needed; the first one with room for it is taken.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._workers: tuple[WorkerMemory, ...] = ()
        self._paths: list[Path] = []
        self._lock = threading.Lock()
        self._series: dict[Source, Series] = {}
        self._platform: dict[tuple[object, ...], Source] = {}
        self._taken = NameRegistry()
        self._told = False

    def begin(
        self, round: int, ranks: Mapping[int, int]
    ) -> tuple[Mapping[int, Mapping[str, str]], Sequence[WorkerMemory]]:
        """Make memory for the workers of a round; those of the one before have ended.

        Where that cannot be had, a worker goes without: training does not fail for it.

        Args:
            round: its number.
            ranks: their global ranks by local rank.

        Returns:
            What is to be in the environment of each, by local rank; and their memory, in the order of the ranks given.
        """
        for path in self._paths:
            with suppress(OSError):  # what a program has put there instead, it may keep
                path.unlink()
        self._paths = []
        before = {worker.rank: worker for worker in self._workers}
        heirs = _heirs(before, tuple(ranks.values()))
        workers: list[WorkerMemory] = []
        variables: dict[int, Mapping[str, str]] = {}
        for local_rank, rank in ranks.items():
            reader, variables[local_rank] = self._made(f"{round}.{local_rank}")
            workers.append(_successor(rank, reader, heirs.get(rank)))
        self._workers = tuple(workers)
        if len(self._series) > _MAX_NAMED:
            with self._lock:
                self._series, self._platform, self._taken = {}, {}, NameRegistry()
        return variables, workers

    def collect(self) -> Iterator[Metric]:
        """The families with their present values; called by a registry at each scrape, from any thread."""
        from prometheus_client import Metric

        families: dict[str, Metric] = {}
        with self._lock:
            for worker in self._workers:
                rank = str(worker.rank)
                for source, words in worker.values().items():
                    series = self._series.get(source) or self._named(source)
                    if (family := families.get(series.name)) is None:
                        families[series.name] = family = Metric(series.name, series.help, series.kind)
                    _add_samples(family, series, {**dict(series.labels), "rank": rank}, words)
                for reason, count in zip(REASONS, worker.dropped(), strict=True):
                    if count:
                        family = families.setdefault(DROPPED.name, Metric(DROPPED.name, DROPPED.help, DROPPED.kind))
                        _add_samples(family, DROPPED, {"reason": reason, "rank": rank}, (count,))
        yield from families.values()

    def _named(self, source: Source) -> Series:
        group, name = source.names[:2]
        series = platform_series(name) if group == PLATFORM_GROUP and len(source.names) == 2 else None
        if series is not None and (
            (series.kind, series.buckets) != (source.form.kind, source.form.buckets)
            or self._platform.setdefault((series.name, series.labels), source) != source
        ):
            series = None  # what only looks like it, since a sample that is there twice would cost the whole page
        if series is None:
            series = self._taken.take(user_series(group, name, source.form), (*source.names, str(source.form)))
        self._series[source] = series
        return series

    def _made(self, name: str) -> tuple[MemoryReader | None, Mapping[str, str]]:
        problems = []
        for folder in self._folders:
            path = folder / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
                reader = memory.make(path)
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


def _heirs(before: Mapping[int, WorkerMemory], ranks: Sequence[int]) -> dict[int, WorkerMemory]:
    """Whose counts go on in which rank: in the same one where that is still here, else in one that is new here.

    So no series ever goes back, and nothing is lost, as long as a node has the same number of workers.
    """
    left = [before[rank] for rank in sorted(before.keys() - set(ranks))]
    new = sorted(set(ranks) - before.keys())
    return {rank: worker for rank, worker in before.items() if rank in ranks} | dict(zip(new, left, strict=False))


def _successor(rank: int, reader: MemoryReader | None, before: WorkerMemory | None) -> WorkerMemory:
    if before is None:
        return WorkerMemory(rank, reader, {}, (0.0,) * len(REASONS))
    counts, dropped = list(before.values(counts_only=True).items()), list(before.dropped())
    # Programs that make new names each time they start would otherwise have them grow for ever.
    dropped[REASONS.index(TOO_MANY_NAMES)] += len(counts[MAX_INHERITED:])
    return WorkerMemory(rank, reader, dict(counts[:MAX_INHERITED]), dropped)


def _text(bound: float) -> str:
    from prometheus_client.utils import floatToGoString

    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def _sum(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _add_samples(family: Metric, series: Series, labels: dict[str, str], words: Sequence[float]) -> None:
    match series.kind:
        case Kind.GAUGE:
            family.add_sample(series.name, labels, words[0])
        case Kind.COUNTER:
            family.add_sample(f"{series.name}_total", labels, words[0])
        case Kind.HISTOGRAM:
            count = 0.0
            for bound, number in zip((*series.buckets, math.inf), words, strict=False):
                count += number
                family.add_sample(f"{series.name}_bucket", {**labels, "le": _text(bound)}, count)
            family.add_sample(f"{series.name}_count", labels, count)
            if series.buckets[0] >= 0:  # a sum that can go down is none
                family.add_sample(f"{series.name}_sum", labels, words[-1])
