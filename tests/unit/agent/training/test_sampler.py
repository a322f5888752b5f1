"""Batches that are the same for any number of ranks."""

from __future__ import annotations

from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from torchelastic import ElasticSampler

torch.set_num_threads(1)  # other tests run at the same time


def rank_of(rank: int, world_size: int) -> Any:
    """Return a context in which torch says that this process is a rank of a process group."""
    answers = {"get_rank": lambda: rank, "get_world_size": lambda: world_size}
    return patch.multiple("torch.distributed", is_initialized=lambda: True, **answers)


def sampler_at(state: dict[str, int] | None, dataset: Any, batch_size: int, **options: Any) -> ElasticSampler:
    sampler = ElasticSampler(dataset, batch_size, **options)
    sampler.load_state_dict(state or sampler.state_dict())
    return sampler


def train(samplers: list[ElasticSampler], losses: torch.Tensor, steps: int, lost: int = 0) -> list[torch.Tensor]:
    """Train with one sampler for each rank, up to the end of the epoch, and return each step's mean over the ranks.

    The ranks read ``lost`` batches more than they train. The losses are those of all samples of the dataset.
    """
    read, means = [], []
    for rank, sampler in enumerate(samplers):
        with rank_of(rank, len(samplers)):
            read.append(list(islice(sampler, steps + lost)))
    for parts in islice(zip(*read, strict=True), steps):
        total = torch.zeros(())
        for rank, (sampler, part) in enumerate(zip(samplers, parts, strict=True)):
            with rank_of(rank, len(samplers)):
                total = total + sampler.mean(losses[part])
            sampler.advance()
        means.append(total / len(samplers))
    return means


WORLDS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 12), st.integers(0, 3)), max_size=12)
"""The number of ranks, the batch size, the number of steps, and the number of steps that are lost at the end."""


@given(length=st.integers(1, 30), shuffle=st.booleans(), seed=st.integers(0, 2**40), worlds=WORLDS)
def test_each_sample_counts_once_in_each_epoch_in_the_batches_of_a_single_rank(
    length: int, shuffle: bool, seed: int, worlds: list[tuple[int, int, int, int]]
) -> None:
    losses, state = torch.ones(length, requires_grad=True), None
    counts = torch.zeros(len(worlds), length)
    for world_size, batch_size, steps, lost in worlds:
        samplers = [sampler_at(state, length, batch_size, shuffle=shuffle, seed=seed) for _ in range(world_size)]
        epoch, batches = samplers[0].epoch, list(samplers[0])
        for mean, batch in zip(train(samplers, losses, steps, lost), batches, strict=False):
            (weights,) = torch.autograd.grad(mean, losses)
            torch.testing.assert_close(weights[batch], torch.full([len(batch)], 1 / len(batch)))
            counts[epoch] += weights * len(batch)
        state = samplers[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
        torch.testing.assert_close(counts[: state["epoch"]], torch.ones(state["epoch"], length))
        assert counts.sum().item() == pytest.approx(state["epoch"] * length + state["position"])


def test_an_epoch_with_four_then_two_then_three_ranks_adds_up_to_the_sum_of_the_data() -> None:
    data, state, means = torch.arange(11.0, 31.0), None, []
    for world_size, steps in ((4, 1), (2, 1), (3, 2)):
        samplers = [sampler_at(state, data, 6) for _ in range(world_size)]
        means += train(samplers, data, steps, lost=2)
        state = samplers[0].state_dict()
    assert sum(float(mean) * size for mean, size in zip(means, (6, 6, 6, 2), strict=True)) == pytest.approx(410)


def test_a_rank_takes_every_nth_sample_and_without_one_the_first() -> None:
    sampler, read = ElasticSampler(7, 5, shuffle=False), []
    for rank in range(3):
        with rank_of(rank, 3):
            read.append(list(sampler))
    assert read == [[[0, 3], [5]], [[1, 4], [6]], [[2], [5]]]


def test_the_order_is_that_of_torchs_sampler_with_the_same_seed_and_epoch_on_any_device() -> None:
    torchs = DistributedSampler(range(50), num_replicas=1, rank=0, seed=3)
    for epoch in range(2):
        torchs.set_epoch(epoch)
        sampler = sampler_at(ElasticSampler(50, 50, seed=3).state_dict() | {"epoch": epoch}, 50, 50, seed=3)
        with torch.device("meta"):  # the program's default
            read = list(sampler)
        assert read == [list(torchs)] != [sorted(torchs)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:.* multi-threaded, use of fork:DeprecationWarning")
def test_a_data_loader_that_was_broken_off_while_it_read_ahead_continues_after_the_last_step(persistent: bool) -> None:
    sampler, read = ElasticSampler(20, 3), []
    loader = DataLoader(range(20), batch_sampler=sampler, num_workers=2, persistent_workers=persistent)
    while sampler.epoch < 2:
        for samples in islice(loader, 3):
            read += samples.tolist()
            sampler.advance()
    assert sorted(read[:20]) == sorted(read[20:]) == list(range(20))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_small_batch_may_be_dropped(drop_last: bool, sizes: list[int]) -> None:
    sampler = ElasticSampler(10, 4, drop_last=drop_last)
    for at in range(len(sizes)):
        assert (len(sampler), [len(batch) for batch in sampler]) == (len(sizes) - at, sizes[at:])
        sampler.advance()
    assert (sampler.epoch, sampler.position) == (1, 0)
    # After 4 of 10 samples, too few are left for a whole batch of 8.
    larger = sampler_at(sampler.state_dict() | {"position": 4}, 10, 8, drop_last=drop_last)
    assert (larger.epoch, larger.position, len(larger)) == ((2, 0, 1) if drop_last else (1, 4, 1))


def test_the_mean_is_over_all_dimensions_and_a_wrong_number_of_losses_is_refused() -> None:
    sampler = ElasticSampler(10, 4)
    assert sampler.mean(torch.tensor([[1.0, 3], [3, 5], [5, 7], [7, 9]])).item() == 5
    for losses in (torch.ones(3), torch.tensor(1.0), torch.ones(1, 4)):
        with pytest.raises(ValueError, match=r"losses of this rank's 4 samples, not the shape \(.*\): use reduction"):
            sampler.mean(losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of samples, at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of samples, at least 1, not 2.5"),
        ({"dataset": []}, "The dataset has 0 samples; at least one is needed"),
        ({"dataset": iter([])}, "The dataset has no length; pass the number of its samples instead"),
        ({"batch_size": 11, "drop_last": True}, "batch_size=11 leaves out all 10 samples; choose a smaller one"),
        ({"dataset": 9}, "samples=10, but this sampler has samples=9: create the sampler with the dataset"),
        ({"seed": 1}, "seed=0, but this sampler has seed=1:"),
        ({"shuffle": False}, "shuffle=True, but this sampler has shuffle=False:"),
        ({"state": {"step": 1}}, "not the state of an ElasticSampler, because it has no 'epoch'"),
    ],
)
def test_an_invalid_argument_and_a_state_with_another_order_are_refused(options: Any, message: str) -> None:
    good = {"state": ElasticSampler(10, 4).state_dict(), "dataset": 10, "batch_size": 4}
    with pytest.raises((TypeError, ValueError), match=message):
        sampler_at(**good | options)
