"""How the ranks of :func:`torchelastic.train` find each other: the interface of a coordinator."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from torchelastic.metrics.api import profile
from torchelastic.training.errors import NonRetryableException

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # not listed in its __all__

    from torchelastic.inprocess.state import State
    from torchelastic.inprocess.worker_stats import WorkerStats

__all__ = ["Coordinator", "NonRetryableException", "StopException"]


class StopException(Exception):  # noqa: N818 - the established name
    """Raised by :meth:`Coordinator.rendezvous_barrier` if the run has ended without this process."""


class Coordinator(abc.ABC):
    """Forms the world of a training program: its ranks and their process group."""

    @abc.abstractmethod
    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        """Leave the current world, and wait for the next one.

        Returns:
            The store of the world, this process's rank, and the number of ranks.

        Raises:
            StopException: the run has ended.
            NonRetryableException: this process cannot join the run.
        """

    @abc.abstractmethod
    def init_process_group(self) -> None:
        """Create torch's default process group for the world."""

    @abc.abstractmethod
    def should_rendezvous(self, state: State) -> bool:
        """Return whether the world is about to change. All ranks call this after each step, and get the same answer."""

    @abc.abstractmethod
    def should_stop_training(self) -> bool:
        """Return whether the run has ended."""

    @abc.abstractmethod
    def signal_training_done(self) -> None:
        """Report that this rank has trained to the end, and leave the run."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this method."""

    def any_rank(self, value: bool) -> bool:
        """Return whether a rank passes True. All ranks call this. By default, return the value of this rank."""
        return value

    @profile()
    def should_save_checkpoint(self) -> bool:
        """Return whether to write a checkpoint after this step, regardless of the state; all ranks must agree."""
        return False

    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: B027 - optional
        """Look at the statistics of a step."""

    def report_progress(self, state: State) -> None:  # noqa: B027 - optional
        """Report that a step is complete."""

    def on_error(self, error: Exception) -> None:  # noqa: B027 - optional
        """Report an error of a step, or of the change to another world."""
