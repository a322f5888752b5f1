"""A sampler whose batches are the same for any number of ranks, and which continues in the middle of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized


class ElasticSampler(Sampler[list[int]]):
    """Distribute global batches to any number of ranks: the ``batch_sampler`` of a ``DataLoader`` on each rank.

    The samples of an epoch have one order, that of torch's ``DistributedSampler`` with the same seed and epoch. A
    global batch is the next ``batch_size`` samples in this order; of these, rank r of R takes the samples r, r + R,
    r + 2 R, and so on. A rank for which no sample is left takes the first one, which :meth:`mean` leaves out, so that
    each rank takes part in each step.

    The sampler has a position, which only :meth:`advance` and :meth:`load_state_dict` change. Iteration begins at the
    position, ends with the epoch, and does not move the position, because the processes of a ``DataLoader`` read ahead.
    After a failure or a change of the world, iterate again: training continues after the last batch that is done.

    There is no ``set_epoch``, because the epoch is part of the position: a program that sets it would begin the epoch
    again, and repeat samples.

    Args:
        dataset: the dataset, or the number of its samples.
        batch_size: the number of samples in each step, of all ranks together; in the last step of an epoch, it may be
            smaller. To change it, also within an epoch, load the state into a sampler with another size.
        shuffle: whether each epoch has another order; otherwise, the order is that of the dataset.
        seed: determines the order, together with the epoch.
        drop_last: whether to leave out the last batch of an epoch if it is smaller.

    Raises:
        TypeError: the dataset has no length.
        ValueError: an argument is invalid, or an epoch would have no batch; the message says what to change.
    """

    def __init__(
        self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if not isinstance(dataset, int):
            try:
                dataset = len(dataset)
            except TypeError:
                raise TypeError("The dataset has no length; pass the number of its samples instead.") from None
        if dataset < 1:
            raise ValueError(f"The dataset has {dataset} samples; at least one is needed.")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of samples, at least 1, not {batch_size!r}.")
        if drop_last and batch_size > dataset:
            raise ValueError(
                f"With drop_last=True, batch_size={batch_size} leaves out all {dataset} samples; choose a smaller one."
            )
        self._length, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._position = 0

    @property
    def epoch(self) -> int:
        """The number of epochs that are done."""
        return self._epoch

    @property
    def position(self) -> int:
        """The number of samples of this epoch that are done."""
        return self._position

    def __len__(self) -> int:
        """Return the number of batches that are left in this epoch; at least one."""
        left = self._length - self._position
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's part of each batch that is left in this epoch, as indices of samples."""
        rank, world_size = _rank_and_world_size()
        with torch.device("cpu"):  # the program's default may be another
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._length, generator=generator) if self._shuffle else torch.arange(self._length)
        starts = range(self._position, self._position + len(self) * self._batch_size, self._batch_size)
        batches = (order[start : start + self._batch_size] for start in starts)
        return ((batch[rank::world_size] if rank < len(batch) else batch[:1]).tolist() for batch in batches)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Return a scalar whose mean over the ranks is the mean loss of the global batch.

        ``DistributedDataParallel`` takes the mean of the gradients over the ranks, so the gradient is that of the
        global batch, even if some ranks have fewer samples than others. Call this method before :meth:`advance`.

        Args:
            losses: the loss of each of this rank's samples in the current batch. If there are more dimensions, the
                first is that of the samples, and the mean is taken over the others.

        Raises:
            ValueError: the number of losses is not the number of this rank's samples.
        """
        rank, world_size = _rank_and_world_size()
        batch = min(self._batch_size, self._length - self._position)
        share = len(range(rank, batch, world_size))
        if losses.shape[:1] != (max(share, 1),):
            raise ValueError(
                f"mean() needs the losses of this rank's {max(share, 1)} samples, not the shape {tuple(losses.shape)}: "
                'use reduction="none", call mean() before advance(), and iterate again after a change of the world.'
            )
        return losses.mean() * (share * world_size / batch)

    def advance(self) -> None:
        """Record that a global batch is done; call this method after each step, on all ranks.

        At the end of an epoch, the position becomes the beginning of the next epoch.
        """
        self._move(self._epoch, self._position + self._batch_size)

    def state_dict(self) -> dict[str, int]:
        """Return the position, and what determines the order of the samples."""
        order = {"samples": self._length, "seed": self._seed, "shuffle": self._shuffle}
        return {"epoch": self._epoch, "position": self._position, **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state; the batch size of the sampler that it comes from may be another.

        Raises:
            ValueError: the state is that of a sampler with another number of samples, seed or shuffle.
        """
        own = self.state_dict()
        if missing := own.keys() - state.keys():
            raise ValueError(f"This is not the state of an ElasticSampler, because it has no {min(missing)!r}.")
        for name in ("samples", "seed", "shuffle"):
            if state[name] != own[name]:
                raise ValueError(
                    f"The state has {name}={state[name]}, but this sampler has {name}={own[name]}: create the sampler "
                    "with the dataset, seed and shuffle of the state, or do not load the state."
                )
        self._move(state["epoch"], state["position"])

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        if len(self) == 0:
            self._epoch, self._position = epoch + 1, 0


def _rank_and_world_size() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
