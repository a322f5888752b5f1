"""Copies of the state of a training in the memory of the host, if ``torch.load(weights_only=True)`` can load them."""

from __future__ import annotations

import collections
import copy
from typing import Any, Final

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_MAPPINGS: Final = (dict, collections.OrderedDict, collections.Counter)


def copy_to_host(value: Any, name: str) -> Any:  # noqa: ANN401 - a state has values of any plain type
    """Return a copy in the memory of the host, without other copies of the program's tensors.

    Raises:
        TypeError: the value could not be loaded again; the message has its name.
    """
    import torch

    kind = type(value)
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if type(plain) is torch.Tensor:
            return plain.to("cpu", copy=True)
        raise TypeError(f"{name} is a {kind.__name__}: save tensors of this kind with torch.distributed.checkpoint.")
    if kind in (*_PLAIN, torch.Size, torch.device, torch.dtype):
        return value
    if kind in _MAPPINGS:
        copied = copy.copy(value)  # keeps the attributes of a module's state_dict()
        for key, item in value.items():
            if type(key) not in _PLAIN:
                raise TypeError(f"{name} has the key {key!r}, which a checkpoint cannot contain: use str or int.")
            copied[key] = copy_to_host(item, f"{name}[{key!r}]")
        return copied
    if kind in (list, tuple, set):
        return kind(copy_to_host(item, f"{name}[{position}]") for position, item in enumerate(value))
    raise TypeError(
        f"{name} is a {kind.__qualname__}, which a checkpoint cannot contain: use tensors and plain values."
    )
