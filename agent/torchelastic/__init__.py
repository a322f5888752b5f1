"""torchelastic: elastic training for PyTorch.

For training programs (see :mod:`torchelastic.training`; without an agent, they report nothing):

* :func:`heartbeat`, :func:`ask_for_notice`, :func:`notice`, :func:`answer_notice`,
  :func:`is_round_current`,
  :class:`NonRetryableException`, :func:`step` and :func:`report_checkpoint`;
* :func:`elastic` and :class:`TorchState` for training that survives changes of its world, in place;
* :class:`ElasticSampler`, whose batches are the same for any number of ranks;
* :class:`Checkpointer` saves the state of the training, and loads the newest checkpoint of all ranks;
* :class:`State`, :func:`train` and :class:`StopException`: the same without an agent, as in torchelastic 0.1.

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
    from torchelastic.inprocess.coordinator import Coordinator, StopException
    from torchelastic.inprocess.state import State
    from torchelastic.inprocess.train_loop import train
    from torchelastic.inprocess.worker_stats import SimpleWorkerStats, WorkerStats
    from torchelastic.launcher.api import LaunchConfig, elastic_launch
    from torchelastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torchelastic.training.checkpointer import Checkpointer
    from torchelastic.training.elastic import elastic
    from torchelastic.training.errors import NonRetryableException
    from torchelastic.training.notices import Notice, answer_notice, ask_for_notice, is_round_current, notice
    from torchelastic.training.progress import CheckpointReport, heartbeat, report_checkpoint, step
    from torchelastic.training.sampler import ElasticSampler
    from torchelastic.training.state import TorchState
    from torchelastic.version import __version__

__all__ = [
    "CheckpointReport",
    "Checkpointer",
    "Coordinator",
    "ElasticSampler",
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
    "TorchState",
    "WorkerSpec",
    "WorkerState",
    "WorkerStats",
    "__version__",
    "answer_notice",
    "ask_for_notice",
    "elastic",
    "elastic_launch",
    "heartbeat",
    "is_round_current",
    "notice",
    "report_checkpoint",
    "step",
    "train",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "torchelastic.agent.server.api": "RunResult WorkerSpec WorkerState",
        "torchelastic.agent.server.local_elastic_agent": "LocalElasticAgent",
        "torchelastic.inprocess.coordinator": "Coordinator StopException",
        "torchelastic.launcher.api": "LaunchConfig elastic_launch",
        "torchelastic.rendezvous.api": "RendezvousHandler RendezvousInfo RendezvousParameters",
        "torchelastic.inprocess.state": "State",
        "torchelastic.inprocess.train_loop": "train",
        "torchelastic.training.checkpointer": "Checkpointer",
        "torchelastic.training.elastic": "elastic",
        "torchelastic.training.errors": "NonRetryableException",
        "torchelastic.training.notices": "Notice answer_notice ask_for_notice is_round_current notice",
        "torchelastic.training.progress": "CheckpointReport heartbeat report_checkpoint step",
        "torchelastic.training.sampler": "ElasticSampler",
        "torchelastic.training.state": "TorchState",
        "torchelastic.version": "__version__",
        "torchelastic.inprocess.worker_stats": "SimpleWorkerStats WorkerStats",
    },
)
install()


def __dir__() -> list[str]:
    return __all__
