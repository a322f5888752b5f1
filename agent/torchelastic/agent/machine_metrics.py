"""The metrics of this node that are read when ``/metrics`` is scraped: the memory of workers, and GPUs.

The values of GPUs come from NVIDIA's driver if ``pynvml`` is installed. A driver may fail or hang, so a separate thread
reads it. A scrape waits for this thread for a limited time; without an answer, ``/metrics`` has no GPU series.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.registry import Collector

from torchelastic.agent.workers.process_tree import read_table, with_descendants
from torchelastic.metrics.prometheus import families_of
from torchelastic.metrics.series import GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_UTILIZATION, WORKER_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Metric

    from torchelastic.metrics.series import MetricFamily

logger: Final = logging.getLogger(__name__)

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

_FIELDS: Final = {
    "nvmlDeviceGetMemoryInfo": {"used": GPU_MEMORY_USED, "total": GPU_MEMORY_TOTAL},
    "nvmlDeviceGetUtilizationRates": {"gpu": GPU_UTILIZATION},
}
"""The series, by the driver's function and the field of its result."""


class WorkerMemory(Collector):
    """Collects the resident memory of each worker with its process tree; `running` returns process ids by rank.

    Pages that several processes share, such as the modules imported by the fork server, count in each process.
    """

    def __init__(self, running: Callable[[], Mapping[int, int]]) -> None:
        self._running = running

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        workers = self._running()
        table = read_table() if workers else {}
        trees = {
            rank: with_descendants(table, [entry.pid for entry in table.values() if entry.session == worker])
            for rank, worker in workers.items()
        }
        memory = {rank: sum(map(_resident, tree)) for rank, tree in trees.items()}
        return families_of((WORKER_MEMORY, {"rank": str(rank)}, (size,)) for rank, size in memory.items() if size)


def _resident(pid: int) -> int:
    """Return the resident memory in bytes; 0 if the process has exited."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0


class Gpus(Collector):
    """The visible GPUs of this machine or container, numbered as by ``nvidia-smi``.

    A scrape waits at most `timeout` seconds for the driver.
    """

    def __init__(self, timeout: float = 1.0) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._found: list[tuple[MetricFamily, dict[str, str], tuple[float]]] = []
        self._open = False
        self._warned = False

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a live thread still waits for the driver
                self._thread = threading.Thread(target=self._read, name="gpus", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(self._timeout)
        if thread.is_alive():
            self._warn_once("the driver does not answer")
            return []
        return families_of(self._found)

    def _read(self) -> None:
        self._found = []
        try:
            import pynvml as nvml
        except ImportError:
            return
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            self._found = self._readings(nvml)
        except Exception as error:  # noqa: BLE001 - errors of pynvml, too: logged once, without a traceback
            if self._open:  # the next scrape opens it again
                self._open = False
                with suppress(nvml.NVMLError):
                    nvml.nvmlShutdown()
            absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if getattr(error, "value", None) not in absent:
                self._warn_once(str(error))

    def _readings(self, nvml: Any) -> list[tuple[MetricFamily, dict[str, str], tuple[float]]]:  # noqa: ANN401
        readings = []
        for index in range(nvml.nvmlDeviceGetCount()):
            for function, fields in _FIELDS.items():  # a GPU may support only one function, or may have failed
                try:
                    found = getattr(nvml, function)(nvml.nvmlDeviceGetHandleByIndex(index))
                except nvml.NVMLError as error:
                    if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                        self._warn_once(str(error))
                else:
                    gpu = {"gpu": str(index)}
                    readings += [(one, gpu, (getattr(found, name) / one.divisor,)) for name, one in fields.items()]
        return readings

    def _warn_once(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("/metrics does not show all metrics of the GPUs: %s.", problem)
