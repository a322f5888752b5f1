"""A stand-in for ``pynvml``, for machines without an NVIDIA GPU: the functions that NVIDIA documents and we call."""

# ruff: noqa: N802 - the names are those of the module

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import NoReturn


class NvmlError(Exception):
    """The stand-in for ``NVMLError``: an error with its number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class StandIn:
    """The stand-in for the module.

    Args:
        gpus: the number of GPUs.

    Attributes:
        wrong: errors by function, or by function and GPU.
        answers: cleared while the driver does not answer.
        opened: the number of initializations.
    """

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_UNKNOWN = 999

    def __init__(self, gpus: int = 0) -> None:
        self.wrong: dict[str | tuple[str, int], int] = {}
        self.answers = threading.Event()
        self.answers.set()
        self.opened = 0
        self._gpus = gpus

    def nvmlInit(self) -> None:
        self.opened += 1
        self._answer("nvmlInit")

    def nvmlShutdown(self) -> NoReturn:
        raise NvmlError(self.NVML_ERROR_UNKNOWN)

    def nvmlDeviceGetCount(self) -> int:
        self._answer("nvmlDeviceGetCount")
        return self._gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._answer("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._answer("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(total=80 << 30, free=(80 - handle) << 30, used=handle << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._answer("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=25 * handle, memory=5)

    def _answer(self, function: str, gpu: int = -1) -> None:
        self.answers.wait()
        for key in (function, (function, gpu)):
            if key in self.wrong:
                raise NvmlError(self.wrong[key])
