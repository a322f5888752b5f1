"""What a launcher's author works with: handlers, what they give out, and how they are chosen by name.

The names are torch's, and so is their meaning; what differs is what has to be there. A handler of somebody's own needs
one method. Nothing here imports torch: its store is handed through as it comes.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torchelastic.errors import RendezvousClosedError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store  # type: ignore[attr-defined] # not listed in its __all__

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


class RendezvousConnectionError(RendezvousError):
    """The place where the nodes meet cannot be reached, or refuses this one."""


class RendezvousStateError(RendezvousError):
    """What stands in the place where the nodes meet cannot be understood."""


class RendezvousTimeoutError(RendezvousError):
    """The nodes did not come together in time."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed, and goes; no failure of anything."""


@dataclass(frozen=True, slots=True)
class RendezvousStoreInfo:
    """Where workers find the store in which they meet.

    Attributes:
        master_addr: its host.
        master_port: its port.
    """

    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """What a rendezvous has come to. It can be taken apart like the tuple of its first three fields.

    Attributes:
        store: in which the agents meet.
        rank: of this node, from 0.
        world_size: how many nodes there are.
        bootstrap_store_info: where workers meet; None where it is for the agents to agree on that.
    """

    store: Store
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.store, self.rank, self.world_size))


class RendezvousHandler(abc.ABC):
    """What brings the nodes together; a subclass has to write :meth:`next_rendezvous` and nothing else.

    The agent calls all of it from one thread, which is its own.
    """

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo | tuple[Store, int, int]:
        """Wait until the nodes have come together.

        Called again whenever workers have failed, or :meth:`num_nodes_waiting` says that somebody waits.

        Returns:
            The store of this meeting, this node's rank, and how many nodes there are; or the same as a
            :class:`RendezvousInfo`.

        Raises:
            RendezvousError: they do not come together.
        """

    def get_backend(self) -> str:
        """The name under which it is chosen."""
        return type(self).__name__

    def get_run_id(self) -> str:
        """The id that the nodes of a run have in common."""
        return "none"

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next rendezvous; asked again and again while the workers run."""
        return 0

    def is_closed(self) -> bool:
        """Whether nobody can meet any more."""
        return False

    def set_closed(self) -> None:  # noqa: B027 - nothing that every handler has to be able to do
        """See to it that nobody can meet any more."""

    def shutdown(self) -> bool:
        """Let go of everything; called when all is over.

        Returns:
            Whether that worked.
        """
        return True

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers may meet in the store that :meth:`next_rendezvous` gives out.

        Of no matter to our agent, which serves one for each epoch.
        """
        return False


class RendezvousParameters:
    """What a handler is made from.

    Args:
        backend: its name.
        endpoint: where the nodes meet.
        run_id: what they have in common.
        min_nodes: fewer do not train.
        max_nodes: more do not train.
        local_addr: under which address the others reach this node; None to have it found out.
        kwargs: what the handler of that name understands beside this, as ``--rdzv-conf`` gives it.

    Attributes:
        config: those.

    Raises:
        ValueError: there is no name, or the numbers make no sense.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,  # noqa: ANN401 - as torch has it
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

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - whatever was given
        """What was given beside the fixed parameters, under this name."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The same, as on or off.

        Raises:
            ValueError: it is neither.
        """
        match self.get(key, default):
            case None | bool() as value:
                return value
            case 0 | 1 as number:
                return bool(number)
            case str() as text if text.lower() in {"1", "true", "t", "yes", "y"}:
                return True
            case str() as text if text.lower() in {"0", "false", "f", "no", "n"}:
                return False
            case other:
                raise ValueError(f"The rendezvous' {key}={other!r} is neither true nor false.")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The same, as a whole number.

        Raises:
            ValueError: it is none.
        """
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise ValueError(f"The rendezvous' {key}={value!r} is no whole number.") from None


RendezvousHandlerCreator: TypeAlias = "Callable[[RendezvousParameters], RendezvousHandler]"
"""What makes a handler of one name."""


class RendezvousHandlerRegistry:
    """Handlers by name: what a program registers, ours, and whatever torch knows."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Let a handler be chosen by name.

        Args:
            backend: the name.
            creator: makes it from its parameters.

        Raises:
            ValueError: the name is empty, or that of another handler.
        """
        if not backend:
            raise ValueError("The name of the rendezvous (backend) is empty.")
        if self._creators.setdefault(backend, creator) is not creator:
            raise ValueError(f"There is another rendezvous handler with the name {backend}; choose another name.")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make the handler that the parameters name.

        Raises:
            ValueError: nobody knows that name.
            SettingsError: ours is named, and cannot be what is asked for.
        """
        from torchelastic.rendezvous import known

        creator = self._creators.get(params.backend) or known.creator_of(params.backend)
        return creator(params)


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""The handlers of this process."""
