"""The agent's side of its workers' metrics: the memory region of each worker, and its series at a scrape.

When a worker exits, its successor continues its counters and histograms. The successor is the worker of the same rank
in this node's next round. If that rank has left the node, the successor is a worker whose rank is new on this node. The
gauges of an exited worker are removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.series import Kind, SeriesNames
from torchelastic.metrics.series_handler import MAX_NAMES, MEMORY_SIZE, MetricMemory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from prometheus_client import Metric

    from torchelastic.metrics.series import MetricKey

logger: Final = logging.getLogger(__name__)


class WorkerMetricMemory(MetricMemory):
    """The memory region of one worker, as its agent reads it. The values outlive the worker.

    The region is a sealed memfd whose pages are allocated in advance, so that no later access fails.

    Args:
        rank: the worker's global rank.
        predecessor: the exited worker whose counters and histograms this one continues.

    Attributes:
        path: the path at which the worker opens the region.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, rank: int, predecessor: WorkerMetricMemory | None = None) -> None:
        descriptor = os.memfd_create("torchelastic-metrics", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        os.posix_fallocate(descriptor, 0, MEMORY_SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        super().__init__(descriptor)
        self.rank = rank
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._exited = False
        if predecessor is not None:
            predecessor.set_exited()
            self.dropped[:] = predecessor.dropped
            for key, inherited in [*predecessor.exposed().items()][:MAX_NAMES]:
                if (values := self.values(key)) is not None:
                    values[:] = inherited

    def set_exited(self) -> None:
        """Record that the worker has exited: its gauges are no longer exposed."""
        self._exited = True

    def exposed(self) -> dict[MetricKey, memoryview[float]]:
        """Return the values of the exposed metrics."""
        exited = self._exited
        return {
            key: values for key, values in self.values_by_key().items() if not (exited and key.type.kind is Kind.GAUGE)
        }


class WorkerCollector:
    """The series of this node's workers, as a prometheus_client collector."""

    def __init__(self) -> None:
        self._workers: Mapping[int, WorkerMetricMemory] = {}
        self._lock = threading.Lock()
        self._names = SeriesNames()
        self._logged_error = False

    def begin(self, ranks: Mapping[int, int], staying: Collection[int] = ()) -> Mapping[int, WorkerMetricMemory]:
        """Return the regions of the workers of a round by local rank; the other workers of the last round have exited.

        If the regions cannot be allocated, the workers have no metrics.

        Args:
            ranks: the global ranks by local rank.
            staying: the local ranks of the workers that continue; they keep their regions.
        """
        kept = {local_rank: self._workers[local_rank] for local_rank in staying if local_rank in self._workers}
        predecessors = {worker.rank: worker for worker in self._workers.values() if worker not in kept.values()}
        for local_rank, worker in kept.items():
            worker.rank = ranks[local_rank]
        ranks = {local_rank: rank for local_rank, rank in ranks.items() if local_rank not in staying}
        # A rank keeps its counters. A rank that is new on this node continues those of a rank that has left.
        left = sorted(predecessors.keys() - set(ranks.values()))
        successors = dict(zip(sorted(set(ranks.values()) - predecessors.keys()), left, strict=False))
        with self._lock:
            try:
                self._workers = kept | {
                    local_rank: WorkerMetricMemory(rank, predecessors.get(successors.get(rank, rank)))
                    for local_rank, rank in ranks.items()
                }
            except OSError as error:
                self._workers = kept
                if not self._logged_error:
                    self._logged_error = True
                    logger.warning("/metrics does not show the metrics of workers: no memory for them (%s).", error)
        return self._workers

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        from torchelastic.metrics.prometheus import exposed, families_of  # not needed to start a worker

        with self._lock:
            return families_of(
                each
                for worker in self._workers.values()
                for each in exposed(worker.exposed(), worker.dropped, self._names, rank=str(worker.rank))
            )
