"""Rendezvous handlers, their parameters, results and exceptions.

The names have the same meaning as in torch, but a custom handler has to implement only one method. This module does not
import torch.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchelastic.errors import RendezvousClosedError, RendezvousError
from torchelastic.lazy import lazy_attributes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store  # type: ignore[attr-defined] # not listed in its __all__
    from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

__all__ = [
    "RendezvousClosedError",
    "RendezvousClosedException",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousException",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousNonRetryableError",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RendezvousTimeoutException",
]

__getattr__ = lazy_attributes(  # torch's module has these names, too
    __name__,
    {
        "torchelastic.rendezvous.registry": (
            "RendezvousHandlerCreator RendezvousHandlerFactory RendezvousHandlerRegistry rendezvous_handler_registry"
        ),
        "torch.distributed.elastic.rendezvous": "RendezvousStoreInfo",
    },
)


class RendezvousConnectionError(RendezvousError):
    """The store of the rendezvous cannot be reached, or refuses this node."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous is invalid."""


class RendezvousTimeoutError(RendezvousError):
    """Too few nodes joined in time."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed and exits without a failure."""


# The names of torchelastic 0.1 and 0.2.
RendezvousClosedException = RendezvousClosedError
RendezvousException = RendezvousNonRetryableError = RendezvousError
RendezvousTimeoutException = RendezvousTimeoutError


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """The result of a rendezvous. Iterating over it yields ``store``, ``rank`` and ``world_size``.

    Attributes:
        store: the store that the agents share.
        rank: the rank of this node, from 0.
        world_size: the number of nodes.
        bootstrap_store_info: the store for the workers' process group; None if the agents choose one.
    """

    store: Store
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.store, self.rank, self.world_size))


class RendezvousHandler(abc.ABC):
    """The base class of rendezvous handlers; a subclass has to implement only :meth:`next_rendezvous`.

    An agent calls all methods in one thread.
    """

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo | tuple[Store, int, int]:
        """Wait for the rendezvous; return a store, this node's rank and the number of nodes.

        The agent calls this method again after a worker has failed, or when :meth:`num_nodes_waiting` is above 0.

        Raises:
            RendezvousError: the rendezvous failed.
        """

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return type(self).__name__

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return "none"

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait for the next rendezvous. An agent polls this while workers run."""
        return 0

    def is_closed(self) -> bool:
        """Return whether the run is closed, so that no node can join it."""
        return False

    def set_closed(self) -> None:  # noqa: B027 - optional
        """Close the run."""

    def shutdown(self) -> bool:
        """Release all resources at the end; return whether that succeeded."""
        return True

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers may use, for their process group, the store that :meth:`next_rendezvous` returns."""
        return False


class RendezvousParameters:
    """The parameters of a handler.

    Args:
        backend: the handler's name.
        endpoint: the address of the store.
        run_id: the id of the run.
        min_nodes: the minimum number of nodes.
        max_nodes: the maximum number of nodes.
        local_addr: the address at which other nodes reach this node; None to detect it.
        kwargs: the handler's other parameters, from ``--rdzv-conf``; available as ``config``.

    Raises:
        ValueError: the name is empty, or the numbers of nodes are invalid.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,  # noqa: ANN401 - torch's signature
    ) -> None:
        if not backend:
            raise ValueError("The name of the rendezvous (backend) is empty.")
        if min_nodes < 1:
            raise ValueError(f"min_nodes={min_nodes}: at least one node is needed.")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes={max_nodes} is below min_nodes={min_nodes}.")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - the type of the default
        """Return a parameter of ``config`` by its name."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a parameter of ``config`` as a bool; raise ValueError if it is not a bool."""
        value = self.get(key, default)
        text = f"{value}".lower()
        if text in {"1", "true", "t", "yes", "y"}:
            return True
        if text in {"0", "false", "f", "no", "n"}:
            return False
        if value is None:
            return None
        raise ValueError(f"The rendezvous parameter {key}={value!r} must be true or false.")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return a parameter of ``config`` as an int; raise ValueError if it is not an int."""
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise ValueError(f"The rendezvous parameter {key}={value!r} must be a whole number.") from None
