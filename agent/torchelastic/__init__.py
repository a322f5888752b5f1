"""torchelastic: elastic training for PyTorch.

For training programs (see :mod:`torchelastic.training`; without an agent, they report nothing):

* :func:`heartbeat`, :func:`ask_for_notice`, :func:`notice`, :func:`saved`, :func:`round_stands`,
  :class:`NonRetryableException`, :func:`step` and :func:`checkpoint`.

For launchers in Python:

* :func:`elastic_launch` and :class:`LaunchConfig` launch a function with one call, see :mod:`torchelastic.launcher`;
* :class:`LocalElasticAgent` runs a :class:`WorkerSpec` and returns a :class:`RunResult`, see
  :mod:`torchelastic.agent.server`; the spec contains a :class:`RendezvousHandler`, see
  :mod:`torchelastic.rendezvous`.

:mod:`torchelastic.metrics` is imported separately. Modules of :mod:`torch.distributed.elastic` that torchelastic does
not replace can be imported under torchelastic's names, see :mod:`torchelastic.lazy`. Each name above is imported at its
first use, so ``import torchelastic`` is fast and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy import install, lazy_attributes

if TYPE_CHECKING:
    from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState
    from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torchelastic.launcher.api import LaunchConfig, elastic_launch
    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torchelastic.training import (
        Checkpoint,
        NonRetryableException,
        Notice,
        ask_for_notice,
        checkpoint,
        heartbeat,
        notice,
        round_stands,
        saved,
        step,
    )
    from torchelastic.version import __version__

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
    "__version__",
    "ask_for_notice",
    "checkpoint",
    "elastic_launch",
    "heartbeat",
    "notice",
    "round_stands",
    "saved",
    "step",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "torchelastic.agent.server.api": "RunResult WorkerSpec WorkerState",
        "torchelastic.agent.server.local_elastic_agent": "LocalElasticAgent",
        "torchelastic.launcher.api": "LaunchConfig elastic_launch",
        "torchelastic.rendezvous.api": "RendezvousHandler RendezvousInfo RendezvousParameters",
        "torchelastic.training": (
            "Checkpoint NonRetryableException Notice ask_for_notice checkpoint heartbeat notice round_stands saved step"
        ),
        "torchelastic.version": "__version__",
    },
)
install()


def __dir__() -> list[str]:
    return __all__
