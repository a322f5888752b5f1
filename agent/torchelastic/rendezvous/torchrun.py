"""Our rendezvous as torch finds it: ``torchrun --rdzv-backend=torchelastic``.

torch looks for handlers in the entry-point group ``torchrun.handlers`` while it imports its own rendezvous, so this
module imports nothing of torch's, and nothing that takes time. The budget for restarts is torchrun's own then, kept by
each of its agents: whatever they restart, the run goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch registers under the entry point's name."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """A handler of torch's type.

    Args:
        parameters: as torch has them.

    Raises:
        SettingsError: they cannot be honoured; the message says what to change.
    """
    from torchelastic.rendezvous.torch_handler import handler_type

    return handler_type()(parameters)
