"""The entry point of ``torchrun --rdzv-backend=torchelastic``.

torch loads this entry point while it imports its own rendezvous, so this module does not import torch or other slow
modules.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters


def get_handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that torch registers under the entry point's name."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create a handler of torch's type.

    Raises:
        SettingsError: a parameter is invalid; the message says what to change.
    """
    return _handler_type()(parameters)


@functools.cache
def _handler_type() -> Callable[[Any], RendezvousHandler]:
    """Return the handler class with torch's base class, return types and exceptions."""
    from torch.distributed.elastic import rendezvous as torchs

    from torchelastic.errors import RendezvousError
    from torchelastic.rendezvous.handler import ElasticRendezvousHandler

    class TorchRendezvousHandler(ElasticRendezvousHandler, torchs.RendezvousHandler):
        """A node of a run, for torch's agent."""

        def next_rendezvous(self) -> RendezvousInfo:  # type: ignore[override] # torch's, in place of ours
            try:
                info = super().next_rendezvous()
            except RendezvousError as error:  # torch's exceptions have the same names
                raise getattr(torchs, type(error).__name__)(f"{error}") from None
            where = torchs.RendezvousStoreInfo(*self.meeting_point)
            return torchs.RendezvousInfo(info.store, info.rank, info.world_size, where)

    return TorchRendezvousHandler
