"""Collectives for :meth:`torchelastic.State.sync`: which rank is the most advanced, and its values on all ranks.

All ranks of the default process group call the same function. With the backend "nccl", tensors of these functions are
on the current CUDA device. Without a process group, each function returns the value of its caller.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
    if not dist.is_initialized():
        return 0, value
    values = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=_device())
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    found = values.tolist()
    return found.index(max(found)), max(found)


def broadcast_long(value: int, src_rank: int) -> int:
    """Return the value of this rank."""
    if not dist.is_initialized():
        return value
    return int(_broadcast(torch.tensor([value], dtype=torch.int64), src_rank).item())


def broadcast_bool(value: bool, src_rank: int) -> bool:
    """Return the value of this rank."""
    return bool(broadcast_long(int(value), src_rank))


def broadcast_float_list(float_list: Sequence[float], src_rank: int) -> list[float]:
    """Return the values of this rank, in double precision; the other ranks may pass any number of values."""
    if not dist.is_initialized():
        return list(float_list)
    count = broadcast_long(len(float_list), src_rank)
    own = list(float_list) if dist.get_rank() == src_rank else [0.0] * count
    return _broadcast(torch.tensor(own, dtype=torch.float64), src_rank).tolist()


def broadcast_binary(data: Any, src_rank: int) -> Any:  # noqa: ANN401 - bytes, or an array of numpy
    """Return the bytes, or the array of numpy, of this rank; the other ranks may pass None."""
    if not dist.is_initialized():
        return data
    array = json.dumps([data.dtype.str, data.shape]) if hasattr(data, "dtype") else ""
    array = _broadcast_bytes(array.encode(), src_rank).decode()
    found = _broadcast_bytes(b"" if data is None else bytes(data), src_rank)
    if not array:
        return bytes(found)
    import numpy as np

    kind, shape = json.loads(array)
    return np.frombuffer(found, kind).reshape(shape)


def broadcast_model(src_rank: int, model: torch.nn.Module) -> None:
    """Copy the parameters and buffers of the model on this rank to the models of the other ranks."""
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src_rank)


def _broadcast_bytes(data: bytes, src_rank: int) -> bytearray:
    count = broadcast_long(len(data), src_rank)
    own = bytearray(data if dist.get_rank() == src_rank else count)
    if count:
        tensor = torch.frombuffer(own, dtype=torch.uint8)  # shares the memory
        tensor.copy_(_broadcast(tensor, src_rank))
    return own


def _broadcast(tensor: torch.Tensor, src_rank: int) -> torch.Tensor:
    tensor = tensor.to(_device())
    dist.broadcast(tensor, src_rank)
    return tensor.cpu()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
