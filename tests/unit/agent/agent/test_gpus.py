"""GPU metrics of an agent, with a fake pynvml that has the documented functions."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from torchelastic.agent.machine_metrics import Gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class NvmlError(Exception):
    """The fake ``NVMLError``, which has the number of an error."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """A fake ``pynvml`` for machines without a GPU, with the documented functions that the agent calls.

    Args:
        gpus: the number of GPUs.

    Attributes:
        errors: the numbers of the errors to raise, by function, or by function and GPU.
        responding: an event that is cleared while the driver does not answer.
        opened: the number of initializations.
    """

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_UNKNOWN = 999

    def __init__(self, gpus: int) -> None:
        self.errors: dict[str | tuple[str, int], int] = {"nvmlShutdown": self.NVML_ERROR_UNKNOWN}
        self.responding = threading.Event()
        self.responding.set()
        self.opened = 0
        self._gpus = gpus

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(gpu: int = -1) -> Any:
            self.opened += function == "nvmlInit"
            self.responding.wait()
            for key in (function, (function, gpu)):
                if key in self.errors:
                    raise NvmlError(self.errors[key])
            return {
                "nvmlDeviceGetCount": self._gpus,
                "nvmlDeviceGetHandleByIndex": gpu,
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=max(gpu, 0) << 30),
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=25 * gpu),
            }.get(function)

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml(gpus=3)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake
    fake.responding.set()


def shown(gpus: Gpus) -> dict[tuple[str, str], float]:
    """Return the values by metric name (without its prefix) and GPU."""
    return {
        (sample.name.removeprefix("torchelastic_gpu_"), sample.labels["gpu"]): sample.value
        for family in gpus.collect()
        for sample in family.samples
    }


GIB = 1 << 30


def test_each_gpu_has_its_memory_and_utilization(nvml: FakeNvml) -> None:
    gpus = Gpus()
    for _ in range(2):
        assert shown(gpus) == {
            ("memory_used_bytes", "0"): 0,
            ("memory_used_bytes", "1"): GIB,
            ("memory_used_bytes", "2"): 2 * GIB,
            **{("memory_total_bytes", gpu): 80 * GIB for gpu in "012"},
            **{("utilization_ratio", gpu): int(gpu) / 4 for gpu in "012"},
        }
    assert nvml.opened == 1


def test_readings_that_a_gpu_does_not_support_are_left_out(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.errors["nvmlDeviceGetUtilizationRates", 1] = nvml.NVML_ERROR_NOT_SUPPORTED  # a MIG instance
    found = shown(Gpus())
    assert ("utilization_ratio", "1") not in found
    assert len(found) == 8
    assert not caplog.records


def test_a_lost_gpu_is_left_out_and_logged_once(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.errors["nvmlDeviceGetHandleByIndex", 1] = nvml.NVML_ERROR_GPU_IS_LOST
    gpus = Gpus()
    for _ in range(2):
        assert {gpu for _, gpu in shown(gpus)} == {"0", "2"}
    assert [record.message for record in caplog.records] == [
        "/metrics does not show all metrics of the GPUs: error 15."
    ]


def test_a_failed_driver_is_opened_again_at_the_next_scrape(nvml: FakeNvml) -> None:
    gpus = Gpus()
    nvml.errors["nvmlDeviceGetCount"] = nvml.NVML_ERROR_UNKNOWN
    assert shown(gpus) == {}
    del nvml.errors["nvmlDeviceGetCount"]
    assert len(shown(gpus)) == 9
    assert nvml.opened == 2


def test_a_driver_that_hangs_is_called_once_and_logged_once(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    gpus = Gpus(timeout=0.01)
    nvml.responding.clear()
    for _ in range(3):
        assert shown(gpus) == {}
    assert nvml.opened == 1
    assert [record.message for record in caplog.records] == [
        "/metrics does not show all metrics of the GPUs: the driver does not answer."
    ]
    nvml.responding.set()
    assert len(shown(Gpus())) == 9


@pytest.mark.parametrize("number", [FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, None])
def test_without_a_driver_or_pynvml_there_are_no_metrics_and_no_logs(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int | None
) -> None:
    if number is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        nvml.errors["nvmlInit"] = number
    assert shown(Gpus()) == {}
    assert not caplog.records
