"""The resident memory of each worker with its process tree, read from /proc when ``/metrics`` is scraped.

Pages that several processes share, such as the modules imported by the fork server, count in each process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client.registry import Collector

from torchelastic.agent.workers.linux import read_table, with_descendants
from torchelastic.metrics.prometheus import families_of
from torchelastic.metrics.series import WORKER_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Metric

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class WorkerMemoryCollector(Collector):
    """Collects the memory of this node's workers.

    Args:
        running: returns the process ids of running workers by rank.
    """

    def __init__(self, running: Callable[[], Mapping[int, int]]) -> None:
        self._running = running

    def collect(self) -> Iterable[Metric]:
        """Return the current values; called at each scrape, in any thread."""
        workers = self._running()
        table = read_table() if workers else {}
        trees = {
            rank: with_descendants(table, [entry.pid for entry in table.values() if entry.session == worker])
            for rank, worker in workers.items()
        }
        memory = {rank: sum(map(_resident, tree)) for rank, tree in trees.items()}
        return families_of((WORKER_MEMORY, {"rank": str(rank)}, (size,)) for rank, size in memory.items() if size)


def _resident(pid: int) -> int:
    """Return the resident memory in bytes; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0
