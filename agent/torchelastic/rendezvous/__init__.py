"""How the nodes of a run agree on who trains together.

One node leads. It watches the others and commits numbered rounds by compare-and-swap; every node watches the
committed round. :mod:`.policy` holds the rules as pure functions, :mod:`.leader` carries them out, :mod:`.node` is what
every node does, :mod:`.peer_connection` detects a death within milliseconds, and :mod:`.worker_environment` computes
the ranks.

For launchers: :mod:`.api` has the interface of handlers, :mod:`.registry` chooses one by name, :mod:`.handler` is ours
for callers that block, and :mod:`.torchrun` is that one with torch's types.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.rendezvous.api import *  # noqa: F403
    from torchelastic.rendezvous.registry import (
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        rendezvous_handler_registry,
    )

__all__ = [  # noqa: F405 - see above
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

_OF_THE_REGISTRY = {"RendezvousHandlerCreator", "RendezvousHandlerRegistry", "rendezvous_handler_registry"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "registry" if name in _OF_THE_REGISTRY else "api"
    return getattr(import_module(f"{__name__}.{module}"), name)
