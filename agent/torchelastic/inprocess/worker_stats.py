"""What a step reports about its speed: the second value that a ``train_step`` returns."""

from __future__ import annotations

import abc
from dataclasses import dataclass


class WorkerStats(abc.ABC):
    """Statistics of this rank."""

    @abc.abstractmethod
    def get_progress_rate(self) -> float | None:
        """Return the speed in any unit that all ranks share, such as samples per second; None if it is unknown."""


@dataclass
class SimpleWorkerStats(WorkerStats):
    """Statistics with a known speed."""

    progress_rate: float | None = None

    def get_progress_rate(self) -> float | None:
        """Return the speed."""
        return self.progress_rate
