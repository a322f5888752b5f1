"""How much memory each worker takes, as ``/metrics`` shows it; read from /proc at a scrape.

It is what is resident, of the worker and all that it has started: to read that holds up no process, however large.
Pages that several processes have in common, such as what the fork server has imported, count in each of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from torchelastic.agent.process_table import Table, read_table
from torchelastic.metrics.platform_names import WORKER_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory(Collector):
    """The memory of this node's workers, as a collector of prometheus_client's.

    Args:
        running: process ids of the workers that run, by rank.
    """

    def __init__(self, running: Callable[[], Mapping[int, int]]) -> None:
        self._running = running

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The family with its present values; called by a registry at each scrape, from any thread."""
        workers = self._running()
        if not workers:
            return
        family = GaugeMetricFamily(WORKER_MEMORY.name, WORKER_MEMORY.help, labels=["rank"])
        trees = _trees(read_table(), workers.values())
        for rank, pid in workers.items():
            if resident := sum(map(_resident, trees[pid])):
                family.add_metric([str(rank)], resident)
        yield family


def _trees(table: Table, workers: Iterable[int]) -> dict[int, set[int]]:
    """Each worker's processes: those of its session, and all that descend from them."""
    children, sessions = defaultdict(list), defaultdict(list)
    for entry in table.values():
        children[entry.parent].append(entry.pid)
        sessions[entry.session].append(entry.pid)
    trees = {}
    for worker in workers:
        trees[worker] = found = set[int]()
        pending = [*sessions[worker]]
        while pending:
            if (pid := pending.pop()) not in found:
                found.add(pid)
                pending += children[pid]
    return trees


def _resident(pid: int) -> int:
    """Bytes; 0 where the process has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - many of them, at each scrape
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
