"""torchelastic: elastic training for PyTorch.

For training programs (see :mod:`torchelastic.training`; without an agent, they report nothing):

* :func:`heartbeat`, :func:`ask_for_notice`, :func:`notice`, :func:`saved`, :func:`round_stands`,
  :class:`NonRetryableException`, :func:`step` and :func:`report_checkpoint`;
* :class:`State`, :func:`train` and :class:`StopException` for training that survives changes of its world.

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
    from torchelastic.coordinator import Coordinator, StopException
    from torchelastic.launcher.api import LaunchConfig, elastic_launch
    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torchelastic.state import State
    from torchelastic.train_loop import train
    from torchelastic.training import (
        CheckpointReport,
        NonRetryableException,
        Notice,
        ask_for_notice,
        heartbeat,
        notice,
        report_checkpoint,
        round_stands,
        saved,
        step,
    )
    from torchelastic.version import __version__
    from torchelastic.worker_stats import SimpleWorkerStats, WorkerStats

__all__ = [
    "CheckpointReport",
    "Coordinator",
    "LaunchConfig",
    "LocalElasticAgent",
    "NonRetryableException",
    "Notice",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousParameters",
    "RunResult",
    "SimpleWorkerStats",
    "State",
    "StopException",
    "WorkerSpec",
    "WorkerState",
    "WorkerStats",
    "__version__",
    "ask_for_notice",
    "elastic_launch",
    "heartbeat",
    "notice",
    "report_checkpoint",
    "round_stands",
    "saved",
    "step",
    "train",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "torchelastic.agent.server.api": "RunResult WorkerSpec WorkerState",
        "torchelastic.agent.server.local_elastic_agent": "LocalElasticAgent",
        "torchelastic.coordinator": "Coordinator StopException",
        "torchelastic.launcher.api": "LaunchConfig elastic_launch",
        "torchelastic.rendezvous.api": "RendezvousHandler RendezvousInfo RendezvousParameters",
        "torchelastic.state": "State",
        "torchelastic.train_loop": "train",
        "torchelastic.training": (
            "CheckpointReport NonRetryableException Notice ask_for_notice heartbeat notice report_checkpoint "
            "round_stands saved step"
        ),
        "torchelastic.version": "__version__",
        "torchelastic.worker_stats": "SimpleWorkerStats WorkerStats",
    },
)
install()


def __dir__() -> list[str]:
    return __all__
