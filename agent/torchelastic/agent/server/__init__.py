"""The agent for Python launchers, with its specs and results."""

from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent
from torchelastic.lazy import lazy_attributes

__all__ = ["LocalElasticAgent", "RunResult", "WorkerSpec", "WorkerState"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "torch.distributed.elastic.agent.server": (
            "ElasticAgent SimpleElasticAgent TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE Worker WorkerGroup"
        ),
        "torch.distributed.elastic.multiprocessing.errors": "ProcessFailure",
    },
)
