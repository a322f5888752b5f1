"""The GPU metrics of this node, read from NVIDIA's driver at each scrape if ``pynvml`` is installed.

A driver may fail or hang. A separate thread reads it, for which a scrape waits a limited time; without an answer,
``/metrics`` has no GPU series.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from torchelastic.metrics.series import GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_UTILIZATION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

_log: Final = logging.getLogger(__name__)


class Gpus(Collector):
    """The visible GPUs of this machine or container, numbered as by ``nvidia-smi``.

    Args:
        patience: seconds that a scrape waits for the driver.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._families: list[GaugeMetricFamily] = []
        self._nvml: Any = None
        self._absent = False
        self._told = False

    def collect(self) -> Iterator[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        with self._lock:
            if self._absent:
                return
            if self._thread is None or not self._thread.is_alive():  # otherwise it still waits for the driver
                self._thread = threading.Thread(target=self._read, name="gpus", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(self._patience)
        if thread.is_alive():
            self._tell("the driver does not answer")
        else:
            yield from (family for family in self._families if family.samples)

    def _read(self) -> None:
        self._families = []
        try:
            if self._nvml is None:
                self._nvml = self._opened()
            if self._nvml is not None:
                self._families = self._readings(self._nvml)
        except Exception as error:  # noqa: BLE001 - a failing driver must not break /metrics
            self._tell(str(error))
            if self._nvml is not None:
                with suppress(self._nvml.NVMLError):
                    self._nvml.nvmlShutdown()
                self._nvml = None  # opened again at the next scrape

    def _opened(self) -> Any:  # noqa: ANN401 - a module without types
        try:
            import pynvml
        except ImportError:
            self._absent = True
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._absent = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
            if self._absent or error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return None
            raise
        return pynvml

    def _readings(self, nvml: Any) -> list[GaugeMetricFamily]:  # noqa: ANN401
        used, total, utilization = (
            GaugeMetricFamily(series.name, series.help, labels=["gpu"])
            for series in (GPU_MEMORY_USED, GPU_MEMORY_TOTAL, GPU_UTILIZATION)
        )

        def memory(gpu: str, handle: object) -> None:
            found = nvml.nvmlDeviceGetMemoryInfo(handle)
            used.add_metric([gpu], found.used)
            total.add_metric([gpu], found.total)

        def computing(gpu: str, handle: object) -> None:
            utilization.add_metric([gpu], nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

        for index in range(nvml.nvmlDeviceGetCount()):
            for read in (memory, computing):  # a GPU may support only one of them, or be lost
                try:
                    read(str(index), nvml.nvmlDeviceGetHandleByIndex(index))
                except nvml.NVMLError as error:
                    if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                        self._tell(str(error))
        return [used, total, utilization]

    def _tell(self, problem: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("Not all that is known of GPUs can be shown under /metrics: %s.", problem)
