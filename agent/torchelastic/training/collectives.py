"""What ranks do together with numbers and states."""

from __future__ import annotations

import collections
import io
import os
from typing import TYPE_CHECKING, Any, Final

from torchelastic.errors import SettingsError
from torchelastic.training.nccl import is_chosen
from torchelastic.training.nested import is_alike, is_dense, is_sharded, map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed import ProcessGroup

_BUCKET: Final = 16 * 2**20
_SMALL: Final = 256 * 2**10
"""Number of bytes that one broadcast sends, and of a tensor that is sent together with others."""

_CONCURRENT: Final = 8
"""Number of broadcasts that are under way at the same time."""


class Ranks:
    """The ranks of a process group, which exchange data; only this process without a process group.

    Args:
        group: the process group; by default, the default one.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks.

    Raises:
        SettingsError: this process is one of several, and there is no process group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch
        import torch.distributed as dist

        self._group, self._device = group, torch.device("cpu")
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if torch.cuda.is_available() and "nccl" in f"{dist.get_backend_config(group)}":
                self._device = torch.device("cuda", torch.cuda.current_device())
        elif os.environ.get("WORLD_SIZE", "1") != "1":
            raise SettingsError("The ranks load a checkpoint together: call init_process_group() before load().")

    @classmethod
    def on_host(cls) -> Ranks:
        """Return the ranks, which exchange data in the memory of the host; call :meth:`close` at the end."""
        import torch
        import torch.distributed as dist

        ranks = cls()
        if ranks._device.type == "cpu":
            return ranks
        if is_chosen() and "cpu:gloo" in f"{dist.get_backend_config()}":  # a new group would have to be formed
            ranks._device = torch.device("cpu")
            return ranks
        group: Any = dist.new_group(backend="gloo")
        return cls(group)

    def close(self) -> None:
        """Destroy the process group, if it is not the default one."""
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._group)

    def gather(self, *values: int) -> list[tuple[int, ...]]:
        """Return the values that each rank passes, in the order of the ranks."""
        if self.size == 1:
            return [values]
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        found = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, self._group)
        return [tuple(each.tolist()) for each in found]

    def broadcast(self, state: Any, source: int) -> Any:  # noqa: ANN401 - nested values
        """Return the state of one rank.

        Args:
            state: nested values. On the other ranks than the source, the tensors that have the same name and form are
                overwritten, and returned; None for no such tensors. Each rank keeps its own sharded tensors.
            source: the rank.

        Raises:
            TypeError: the source's state contains a value that cannot be sent; on the source.
        """
        if self.size == 1:
            return state
        import torch

        own: dict[str, torch.Tensor] = {}
        sharded: dict[str, torch.Tensor] = {}

        def form_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
            if is_sharded(tensor):
                sharded[name] = tensor
                return torch.empty(0)
            if not is_dense(tensor):
                return tensor  # sent with the form
            own[name] = tensor
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        form, content = map_tensors(state, form_of), io.BytesIO()
        if self.rank == source:
            torch.save(form, content)
        ((size,), *_) = self.gather(content.tell())[source : source + 1]
        on_host = torch.frombuffer(saved := bytearray(content.getvalue() or size), dtype=torch.uint8)
        self._send([data := on_host.to(self._device)], source)
        if self.rank == source:
            self._send((tensor.to(self._device) for tensor in own.values()), source)
            return state
        on_host.copy_(data)
        received: list[torch.Tensor] = []

        def place(form: torch.Tensor, name: str) -> torch.Tensor:
            if name in sharded:
                return sharded[name]
            if not form.is_meta:
                return form.to(self._device)
            tensor = own.get(name)
            if tensor is None or not (is_alike(tensor, form) and tensor.device == self._device):
                tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
            received.append(tensor)
            return tensor

        state = map_tensors(torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True), place)
        self._send(received, source)
        return state

    def _send(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Broadcast the content of tensors to tensors of the same sizes."""
        import torch
        import torch.distributed as dist

        sending: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()  # the tensors must stay in memory
        bucket = torch.empty(_BUCKET, dtype=torch.uint8, device=self._device)
        small: list[torch.Tensor] = []
        size = 0

        def send_small() -> None:
            if small:
                packed = bucket[:size]
                if self.rank == source:
                    torch.cat(small, out=packed)
                dist.broadcast(packed, source, self._group)
                if self.rank != source:
                    parts = packed.split_with_sizes([len(each) for each in small])
                    for each, part in zip(small, parts, strict=True):
                        each.copy_(part)
                small.clear()

        for tensor in tensors:
            # Not all backends send tensors of each type.
            data = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            if len(data) > _SMALL:
                for start in range(0, len(data), _BUCKET):
                    part = data[start : start + _BUCKET]
                    sending.append((dist.broadcast(part, source, self._group, async_op=True), part))
                    if len(sending) > _CONCURRENT:
                        sending.popleft()[0].wait()
                continue
            if size + len(data) > _BUCKET:
                send_small()
                size = 0
            small.append(data)
            size += len(data)
        send_small()
        for work, _ in sending:
            work.wait()
