"""How the nodes of a run agree on who trains together.

One node leads. It alone watches the others and commits numbered epochs by compare-and-swap; everybody watches the
committed epoch. :mod:`.decide` holds the rules as pure functions, :mod:`.leader` carries them out, :mod:`.node` is what
every node does, :mod:`.link` tells a death within milliseconds, and :mod:`.ranks` turns an epoch into ranks.

For launchers, and for torch's own: :mod:`.api` has handlers and their registry, :mod:`.handler` is ours for callers
that block, :mod:`.torchrun` what torchrun finds of it, and :mod:`.polled` puts a handler that is not ours in the place
of our node.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStateError,
        RendezvousStoreInfo,
        RendezvousTimeoutError,
        rendezvous_handler_registry,
    )

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("torchelastic.rendezvous.api"), name)
