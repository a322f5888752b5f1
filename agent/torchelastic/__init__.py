"""torchelastic: elastic training for PyTorch.

What a program that runs as a worker uses, all of which does nothing where no agent has started it:

* :func:`heartbeat`, :func:`ask_for_notice`, :func:`notice`, :func:`saved`, :func:`epoch_stands` and
  :class:`NonRetryableException`: see :mod:`torchelastic.worker`;
* :func:`step` and :func:`checkpoint`, which say how far training is: see :mod:`torchelastic.progress`.

What a launcher in Python uses:

* :func:`elastic_launch` and :class:`LaunchConfig` launch a function with one call: see :mod:`torchelastic.launcher`.
* :class:`LocalElasticAgent` runs what a :class:`WorkerSpec` says and gives back a :class:`RunResult`: see
  :mod:`torchelastic.agent.server`. Its nodes meet through a :class:`RendezvousHandler`: see
  :mod:`torchelastic.rendezvous`.

:mod:`torchelastic.metrics` is a module of its own. Everything is imported when it is first used: the import of
``torchelastic`` costs next to nothing, and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState
    from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torchelastic.launcher.api import LaunchConfig, elastic_launch
    from torchelastic.progress import Checkpoint, checkpoint, step
    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torchelastic.worker import (
        NonRetryableException,
        Notice,
        ask_for_notice,
        epoch_stands,
        heartbeat,
        notice,
        saved,
    )

__all__ = [
    "Checkpoint",
    "LaunchConfig",
    "LocalElasticAgent",
    "NonRetryableException",
    "Notice",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousParameters",
    "RunResult",
    "WorkerSpec",
    "WorkerState",
    "ask_for_notice",
    "checkpoint",
    "elastic_launch",
    "epoch_stands",
    "heartbeat",
    "notice",
    "saved",
    "step",
]

_HOMES: Final = {
    "torchelastic.agent.server.api": ("RunResult", "WorkerSpec", "WorkerState"),
    "torchelastic.agent.server.local_elastic_agent": ("LocalElasticAgent",),
    "torchelastic.launcher.api": ("LaunchConfig", "elastic_launch"),
    "torchelastic.progress": ("Checkpoint", "checkpoint", "step"),
    "torchelastic.rendezvous.api": ("RendezvousHandler", "RendezvousInfo", "RendezvousParameters"),
    "torchelastic.worker": (
        "NonRetryableException",
        "Notice",
        "ask_for_notice",
        "epoch_stands",
        "heartbeat",
        "notice",
        "saved",
    ),
}
_HOME: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(
        import_module(_HOME[name]), name
    )  # from then on it is there: some are called often
    return found


def __dir__() -> list[str]:
    return __all__
