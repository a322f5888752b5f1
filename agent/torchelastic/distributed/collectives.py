"""Collectives for :meth:`torchelastic.State.sync`: which rank is the most advanced, and its values on all ranks.

All ranks of the default process group call the same function. With the backend "nccl", tensors of these functions are
on the current CUDA device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "all_gather_return_max_long",
    "broadcast_binary",
    "broadcast_bool",
    "broadcast_float_list",
    "broadcast_long",
    "broadcast_model",
]


def all_gather_return_max_long(value: int) -> tuple[int, int]:
    """Return the lowest rank with the maximum of the ranks' values, and the maximum."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=_device())
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    found = values.tolist()
    return found.index(max(found)), max(found)


def broadcast_long(value: int, src_rank: int) -> int:
    """Return the value of this rank."""
    return int(_broadcast(torch.tensor([value], dtype=torch.int64), src_rank).item())


def broadcast_bool(value: bool, src_rank: int) -> bool:
    """Return the value of this rank."""
    return bool(broadcast_long(int(value), src_rank))


def broadcast_float_list(values: Sequence[float], src_rank: int) -> list[float]:
    """Return the values of this rank, in double precision; the other ranks may pass any number of values."""
    count = broadcast_long(len(values), src_rank)
    own = list(values) if dist.get_rank() == src_rank else [0.0] * count
    return _broadcast(torch.tensor(own, dtype=torch.float64), src_rank).tolist()


def broadcast_binary(data: bytes | bytearray | None, src_rank: int) -> bytes:
    """Return the data of this rank; the other ranks may pass None."""
    count = broadcast_long(len(data or b""), src_rank)
    own = bytearray(data or b"") if dist.get_rank() == src_rank else bytearray(count)
    return _broadcast(torch.frombuffer(own, dtype=torch.uint8), src_rank).numpy().tobytes() if count else b""


def broadcast_model(model: torch.nn.Module, src_rank: int) -> None:
    """Copy the parameters and buffers of the model on this rank to the models of the other ranks."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src_rank)


def _broadcast(tensor: torch.Tensor, src_rank: int) -> torch.Tensor:
    tensor = tensor.to(_device())
    dist.broadcast(tensor, src_rank)
    return tensor.cpu()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
