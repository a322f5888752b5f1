"""The handlers that need no registration: ours, and those that torch knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousHandlerCreator, RendezvousParameters

OURS: Final = ("torchelastic", "etcd", "etcd-v3", "etcd-v2")
"""The names of our rendezvous; the last two say which of etcd's APIs to use."""


def creator_of(backend: str) -> RendezvousHandlerCreator:
    """What makes the handler of this name."""
    return _ours if backend.replace("_", "-") in OURS else _torchs


def _ours(params: RendezvousParameters) -> RendezvousHandler:
    from torchelastic.rendezvous.handler import ElasticRendezvousHandler

    return ElasticRendezvousHandler(params)


def _torchs(params: RendezvousParameters) -> RendezvousHandler:
    """What torch has (c10d, static), what was registered there, and what other packages bring for torchrun.

    Raises:
        ValueError: torch does not know the name either.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    config: dict[str, Any] = params.config
    handler = get_rendezvous_handler(
        TorchParameters(
            backend=params.backend,
            endpoint=params.endpoint,
            run_id=params.run_id,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            local_addr=params.local_addr,
            **config,
        )
    )
    return cast("RendezvousHandler", handler)  # it has all the methods, and is no subclass
