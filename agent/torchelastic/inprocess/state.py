"""The state of a training program that survives changes of the world: see :func:`torchelastic.train`."""

from __future__ import annotations

import abc
from typing import BinaryIO


class State(abc.ABC):
    """The state of a training program: model, optimizer, position in the data, and so on.

    A subclass defines :meth:`sync`. It need not call a base class's ``__init__``.
    """

    @abc.abstractmethod
    def sync(self, world_size: int, rank: int) -> None:
        """Make the state equal on all ranks, and adapt it to the world. All ranks call this after each change.

        Usually, the most advanced rank broadcasts its state, and each rank creates its data loader and its
        ``DistributedDataParallel`` again.

        Args:
            world_size: the number of ranks.
            rank: this process's rank.
        """

    def capture_snapshot(self) -> object:
        """Return a copy of the state, to which a step that fails is rolled back; None for no rollback (the default)."""
        return None

    def apply_snapshot(self, snapshot: object) -> None:
        """Restore the state from a snapshot; None has no effect.

        Raises:
            NotImplementedError: the subclass defines :meth:`capture_snapshot`, but not this method.
        """
        if snapshot is not None:
            raise NotImplementedError(f"{type(self).__name__} captures snapshots, so it must define apply_snapshot().")

    def save(self, stream: BinaryIO) -> None:
        """Write the state to a checkpoint. The default writes a snapshot with ``torch.save``."""
        import torch

        torch.save(self.capture_snapshot(), stream)

    def load(self, stream: BinaryIO) -> None:
        """Read the state from a checkpoint. The default reads what :meth:`save` writes by default.

        A snapshot may contain tensors, numbers, strings and collections of these; other objects are not loaded.
        """
        import torch

        self.apply_snapshot(torch.load(stream, weights_only=True))

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether to write a checkpoint after this step; all ranks must agree. By default, never."""
        return False
