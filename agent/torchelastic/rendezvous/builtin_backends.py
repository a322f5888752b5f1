"""The handlers that need no registration: ours, and those that torch knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torchelastic.config.rendezvous import BACKENDS

if TYPE_CHECKING:
    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler that the parameters name.

    Raises:
        ValueError: torch does not know the name either.
        SettingsError: ours cannot honour the parameters.
    """
    if params.backend.replace("_", "-") in BACKENDS:
        from torchelastic.rendezvous.handler import ElasticRendezvousHandler

        return ElasticRendezvousHandler(params)
    # What torch has (c10d, static), what is registered there, and what other packages bring for torchrun.
    from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    given = TorchParameters(
        params.backend,
        params.endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        **params.config,
    )
    return cast("RendezvousHandler", get_rendezvous_handler(given))  # it has all the methods, and is no subclass
