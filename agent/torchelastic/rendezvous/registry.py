"""The registry of rendezvous handlers by name: torchelastic's own, those that a program registers, and torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = [
    "RendezvousHandlerCreator",
    "RendezvousHandlerFactory",
    "RendezvousHandlerRegistry",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

RendezvousHandlerCreator: TypeAlias = "Callable[[RendezvousParameters], RendezvousHandler]"


class RendezvousHandlerRegistry:
    """Handlers by name: those that a program registers, torchelastic's own, and torch's."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a handler under a name; raise ValueError if the name is empty or that of another handler."""
        if not backend:
            raise ValueError("The name of the rendezvous (backend) is empty.")
        if self._creators.setdefault(backend, creator) is not creator:
            raise ValueError(f"There is another rendezvous handler with the name {backend}; choose another name.")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create the handler that the parameters name.

        Raises:
            ValueError: there is no handler of that name.
            SettingsError: torchelastic's handler does not support the parameters.
        """
        if (creator := self._creators.get(params.backend)) is not None:
            return creator(params)
        from torchelastic.config.parse import BACKENDS

        if params.backend.replace("_", "-") in BACKENDS:
            from torchelastic.rendezvous.handler import ElasticRendezvousHandler

            return ElasticRendezvousHandler(params)
        # torch's own handlers (c10d, static), and those registered with torch. The casts are safe, because the types
        # have the same methods.
        from torch.distributed.elastic.rendezvous import registry

        return cast("RendezvousHandler", registry.get_rendezvous_handler(cast("Any", params)))


RendezvousHandlerFactory = RendezvousHandlerRegistry
"""The name of the registry in torchelastic 0.2."""

rendezvous_handler_registry = RendezvousHandlerRegistry()
"""The handlers of this process."""


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler that the parameters name: see :meth:`RendezvousHandlerRegistry.create_handler`."""
    return rendezvous_handler_registry.create_handler(params)
