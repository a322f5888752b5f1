"""The nested values of a state: dicts, lists, tuples and sets of tensors and plain values.

``torch.load(weights_only=True)`` can load them.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import hashlib
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import torch

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_SMALL: Final = 2**20
"""Number of bytes of tensors up to which a checksum is computed."""

_MAPPINGS: Final = (dict, collections.OrderedDict, collections.Counter)


def map_tensors(
    value: Any,  # noqa: ANN401 - nested values
    change: Callable[[torch.Tensor, str], torch.Tensor],
    name: str = "state",
) -> Any:  # noqa: ANN401 - likewise
    """Return a copy of nested values with each tensor replaced, in a fixed order.

    Args:
        value: the values.
        change: a function that gets a tensor, which may be a DTensor, and its name, such as ``state['weight']``, and
            returns another tensor. It is called once for a tensor that occurs several times, such as a weight that
            layers share.
        name: the name of the values.

    Raises:
        TypeError: a value could not be loaded again; the message has its name.
    """
    import torch

    changed: dict[Hashable, torch.Tensor] = {}

    def mapped(value: Any, name: str) -> Any:  # noqa: ANN401 - likewise
        kind = type(value)
        if isinstance(value, torch.Tensor):
            plain = value.detach()
            local = plain.to_local() if is_sharded(plain) else plain  # type: ignore[attr-defined] # a DTensor
            if type(local) is not torch.Tensor:
                raise TypeError(
                    f"{name} is a {kind.__name__}: save tensors of this kind with torch.distributed.checkpoint."
                )
            identity: tuple[Hashable, ...] = (id(value),)
            if is_dense(local) and local.data_ptr():
                identity = (local.data_ptr(), plain.shape, plain.stride(), plain.dtype, plain.device)
            if identity not in changed:
                changed[identity] = change(plain, name)
            return changed[identity]
        if kind in (*_PLAIN, torch.Size, torch.device, torch.dtype):
            return value
        if kind in _MAPPINGS:
            copied = copy.copy(value)  # keeps the attributes of a module's state_dict()
            for key, item in value.items():
                if type(key) not in _PLAIN:
                    raise TypeError(f"{name} has the key {key!r}, which a checkpoint cannot contain: use str or int.")
                copied[key] = mapped(item, f"{name}[{key!r}]")
            return copied
        if kind in (list, tuple, set):
            return kind(mapped(item, f"{name}[{position}]") for position, item in enumerate(value))
        raise TypeError(
            f"{name} is a {kind.__qualname__}, which a checkpoint cannot contain: use tensors and plain values."
        )

    return mapped(value, name)


class _NotSmallError(Exception):
    """A value has no checksum."""


def checksum(state: Any) -> int | None:  # noqa: ANN401 - nested values
    """Return a number of 56 bits that differs if nested values differ; None if they are not small, or not on the CPU.

    Values that are alike may have different numbers, for example sets of strings in different processes.

    Raises:
        TypeError: as :func:`map_tensors`.
    """
    digest, size = hashlib.blake2b(digest_size=7), 0

    def add(tensor: Any, name: str) -> Any:  # noqa: ANN401 - a tensor, and what stands for it
        nonlocal size
        if is_sharded(tensor) or not is_dense(tensor) or tensor.device.type != "cpu":
            raise _NotSmallError
        if (size := size + tensor.nbytes) > _SMALL:
            raise _NotSmallError
        content = tensor.resolve_conj().resolve_neg().contiguous()
        digest.update(ctypes.string_at(content.data_ptr(), content.nbytes))
        return name, tensor.dtype, tensor.shape

    try:
        digest.update(repr(map_tensors(state, add)).encode())
    except _NotSmallError:
        return None
    return int.from_bytes(digest.digest())


class HostCopies:
    """Copies states to the memory of the host, each time to the same memory: new memory takes much longer to write."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, state: Any) -> Any:  # noqa: ANN401 - nested values
        """Return a copy, which the next call overwrites.

        Raises:
            TypeError: the state could not be loaded again; the message names the value.
        """
        import torch

        buffers, self._buffers = self._buffers, {}

        def copied(tensor: torch.Tensor, name: str) -> torch.Tensor:
            if tensor.is_meta:  # a part of a form
                return tensor
            if is_sharded(tensor):
                raise TypeError(f"{name} is sharded: pass the state to load(), too, on all ranks.")
            if not is_dense(tensor):
                return tensor.to("cpu", copy=True)
            buffer = buffers.get(name)
            if buffer is None or not is_alike(buffer, tensor):
                buffer = torch.empty_like(tensor, device="cpu")
            self._buffers[name] = buffer.copy_(tensor)
            return buffer

        return map_tensors(state, copied)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # imported by a program that shards
    return module is not None and isinstance(tensor, module.DTensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither sparse nor quantized."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_quantized


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and type, and the same order in memory."""
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
