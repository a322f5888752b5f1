"""Our handler with torch's types: what torch's agent calls, gets back and catches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torchelastic.rendezvous import api
from torchelastic.rendezvous.handler import ElasticRendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from torchelastic.rendezvous.handler_settings import Parameters


@functools.cache
def handler_type() -> Callable[[Parameters], RendezvousHandler]:
    """The class; made when it is first asked for, since torch has to be imported for it."""
    from torch.distributed.elastic import rendezvous as torchs

    errors: dict[type[Exception], type[Exception]] = {
        api.RendezvousClosedError: torchs.RendezvousClosedError,
        api.RendezvousTimeoutError: torchs.RendezvousTimeoutError,
        api.RendezvousConnectionError: torchs.RendezvousConnectionError,
    }

    class TorchRendezvousHandler(ElasticRendezvousHandler, torchs.RendezvousHandler):
        """A node of a run, for torch's agent."""

        def next_rendezvous(self) -> RendezvousInfo:  # type: ignore[override] # torch's, in place of ours
            try:
                info = super().next_rendezvous()
            except tuple(errors) as error:
                raise errors[type(error)](str(error)) from None
            host, port = self.meeting_point
            return torchs.RendezvousInfo(info.store, info.rank, info.world_size, torchs.RendezvousStoreInfo(host, port))

    return TorchRendezvousHandler
