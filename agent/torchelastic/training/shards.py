"""Sharded tensors in a state: the DTensors of FSDP2, of which each rank has a part.

A state is split into its form, in which a tensor on the meta device stands for each sharded one, and the parts of this
rank. It is joined for ranks of any number: each takes from the saved parts what overlaps with its own.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torchelastic.training.nested import is_sharded, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.distributed.tensor import DTensor


class Part(NamedTuple):
    """A rectangular part of a tensor: where it begins in each dimension, and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: Part) -> Part | None:
        """Return the part that both contain; None if there is none."""
        starts = [*map(max, self.offsets, other.offsets)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Part(tuple(starts), sizes) if all(size > 0 for size in sizes) else None

    def of(self, whole: torch.Tensor, at: Part) -> torch.Tensor:
        """Return this part of a tensor that is itself the part `at`."""
        for dimension, (start, first, size) in enumerate(zip(self.offsets, at.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dimension, start - first, size)
        return whole


def sharded_tensors(state: Any) -> dict[str, DTensor]:  # noqa: ANN401 - nested values
    """Return the sharded tensors of a state by name."""
    found: dict[str, Any] = {}
    if "torch.distributed.tensor" in sys.modules:
        map_tensors(state, lambda tensor, name: found.setdefault(name, tensor) if is_sharded(tensor) else tensor)
    return found


def split(state: Any) -> tuple[Any, dict[str, Part], dict[str, torch.Tensor]]:  # noqa: ANN401 - nested values
    """Return the form of a state, and this rank's parts: their places and their content, by name.

    A part that several ranks have, as in hybrid sharding, is returned on one of them.
    """
    import torch

    places: dict[str, Part] = {}
    contents: dict[str, torch.Tensor] = {}

    def form_of(tensor: Any, name: str) -> torch.Tensor:  # noqa: ANN401 - a tensor or a DTensor
        if not is_sharded(tensor):
            plain: torch.Tensor = tensor
            return plain
        at = tensor.device_mesh.get_coordinate()
        is_first = at is not None and all(
            coordinate == 0 or not placement.is_replicate()
            for coordinate, placement in zip(at, tensor.placements, strict=True)
        )
        place, content = _part_of(tensor), tensor.to_local()
        if is_first and content.numel():
            places[name], contents[name] = place, content
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return map_tensors(state, form_of), places, contents


def join(
    form: Any,  # noqa: ANN401 - nested values
    saved: Sequence[Mapping[str, Part]],
    read: Callable[[int, str], torch.Tensor],
    own: Mapping[str, DTensor],
) -> Any:  # noqa: ANN401 - likewise
    """Return a state from its form and the parts of all ranks that saved it.

    Args:
        form: the form; its plain tensors are copied.
        saved: the places of the parts of each rank, by name.
        read: returns the content of a rank's part.
        own: the sharded tensors of the program by name: these are overwritten, and returned. A tensor that is not
            among them, such as the state of an optimizer before its first step, gets the layout of one with the same
            shape and the same parts; if there is none, it is returned whole, on the CPU.

    Raises:
        ValueError: a part is missing, or a tensor has another shape; the message names it.
    """
    import torch
    from torch.distributed.tensor import DTensor

    def places(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
        return tuple(shape), *(parts.get(name) for parts in saved)

    alike = {places(name, tensor.shape): tensor for name, tensor in own.items()}

    def joined(meta: torch.Tensor, name: str) -> Any:  # noqa: ANN401 - a tensor or a DTensor
        if not meta.is_meta:
            return meta.clone()
        tensor, like = own.get(name), alike.get(places(name, meta.shape))
        if tensor is not None and tensor.shape != meta.shape:
            raise ValueError(f"{name} has the shape {(*meta.shape,)} in it, and {(*tensor.shape,)} in the program")
        if tensor is None and like is not None:
            local = torch.empty_like(like.to_local(), dtype=meta.dtype)
            tensor = DTensor.from_local(
                local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
        target = torch.empty(meta.shape, dtype=meta.dtype) if tensor is None else tensor.to_local()
        wanted = Part((0,) * meta.dim(), tuple(meta.shape)) if tensor is None else _part_of(tensor)
        missing = target.numel()
        for rank, parts in enumerate(saved):
            if name in parts and (both := wanted.overlap(parts[name])) is not None:
                both.of(target, wanted).copy_(both.of(read(rank, name), parts[name]))
                missing -= math.prod(both.sizes)
        if missing:
            raise ValueError(f"{name} is incomplete in it")
        return target if tensor is None else tensor

    with torch.no_grad():
        return map_tensors(form, joined)


def _part_of(tensor: Any) -> Part:  # noqa: ANN401 - a DTensor, whose protocol for checkpoints has no types
    (chunk,) = tensor.__create_chunk_list__()
    return Part(tuple(chunk.offsets), tuple(chunk.sizes))
