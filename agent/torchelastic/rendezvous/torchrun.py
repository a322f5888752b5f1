"""The entry point of ``torchrun --rdzv-backend=torchelastic``.

torch loads this entry point while it imports its own rendezvous, so this module does not import torch or other slow
modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def get_handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that torch registers under the entry point's name."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create a handler; it and its results have the methods and attributes of torch's types.

    Args:
        parameters: of torch's type, which has the attributes of ours.

    Raises:
        SettingsError: a parameter is invalid; the message says what to change.
    """
    from torchelastic.rendezvous.handler import ElasticRendezvousHandler

    return ElasticRendezvousHandler(parameters)
