"""What the GPUs of this node do, as NVIDIA's driver says it: read at a scrape, by ``pynvml`` where that is installed.

A driver can be in trouble of its own, and then fails, or does not answer at all. It is asked in a thread of its own,
for which a scrape waits a moment and no longer; without an answer there are no such series on that page.
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

    from torchelastic.metrics.series import Series

    Readings = dict[tuple[Series, str], float]
    """Values by series and GPU."""

_log: Final = logging.getLogger(__name__)

PATIENCE: Final = 1.0
"""Seconds for which a scrape waits for the driver."""


class Gpus(Collector):
    """The GPUs that this machine shows, or this container, under the numbers that ``nvidia-smi`` gives them.

    Args:
        patience: seconds for which a scrape waits for the driver.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._question = _Question(None)
        self._told = False

    def collect(self) -> Iterator[Metric]:
        """The families with their present values; called by a registry at each scrape, from any thread."""
        readings = self._readings()
        families: dict[Series, GaugeMetricFamily] = {}
        for (series, gpu), value in readings.items():
            if series not in families:
                families[series] = GaugeMetricFamily(series.name, series.help, labels=["gpu"])
            families[series].add_metric([gpu], value)
        yield from families.values()

    def _readings(self) -> Readings:
        with self._lock:
            if self._question.absent:
                return {}
            if not self._question.is_alive():  # else the driver has not answered an earlier scrape yet
                self._question = _Question(self._question.nvml)
                self._question.start()
            question = self._question
        question.join(self._patience)
        if question.is_alive():
            self._tell("the driver does not answer")
            return {}
        if question.problem is not None:
            self._tell(str(question.problem))
        return question.readings

    def _tell(self, problem: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("Not all that is known of GPUs can be shown under /metrics: %s.", problem)


class _Question(threading.Thread):
    """What the driver is asked once.

    Args:
        nvml: the module, open; None where it is not.

    Attributes:
        absent: there is nothing to ask here, and will not be.
        readings: what it has answered.
        problem: why that is not all; None where it is.
    """

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 - a module without types
        super().__init__(name="gpus", daemon=True)  # its end is not waited for
        self.nvml = nvml
        self.absent = False
        self.readings: Readings = {}
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            if self.nvml is None:
                self.nvml = self._opened()
            if self.nvml is not None:
                for index in range(self.nvml.nvmlDeviceGetCount()):
                    self._ask(index)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a driver, the page is shown
            self.problem = error
            if self.nvml is not None:
                with suppress(self.nvml.NVMLError):
                    self.nvml.nvmlShutdown()
                self.nvml = None  # to be opened anew

    def _opened(self) -> Any:  # noqa: ANN401 - a module without types
        try:
            import pynvml
        except ImportError:
            self.absent = True
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.absent = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
            if self.absent or error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return None
            raise
        return pynvml

    def _ask(self, index: int) -> None:
        """Take what one GPU answers; it may know the one thing and not the other, or be lost altogether."""
        nvml, gpu = self.nvml, str(index)
        for reading in (_memory, _utilization):
            try:
                found = reading(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                    self.problem = error
            else:
                self.readings |= {(series, gpu): value for series, value in found.items()}


def _memory(nvml: Any, handle: object) -> dict[Series, float]:  # noqa: ANN401 - a module without types
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {GPU_MEMORY_USED: memory.used, GPU_MEMORY_TOTAL: memory.total}


def _utilization(nvml: Any, handle: object) -> dict[Series, float]:  # noqa: ANN401
    return {GPU_UTILIZATION: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}
