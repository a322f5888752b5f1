"""The entry point of ``torchrun --rdzv-backend=torchelastic``.

torch loads this entry point while it imports its own rendezvous, so this module does not import torch or other slow
modules.
"""

from torchelastic.rendezvous.registry import RendezvousHandlerCreator, rendezvous_handler_registry


def get_handler_creator() -> RendezvousHandlerCreator:
    """Return the function that creates torchelastic's handler; the function also accepts torch's parameters."""
    return rendezvous_handler_registry.create_handler
