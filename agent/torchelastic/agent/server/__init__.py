"""The agent for Python launchers, with its specs and results."""

from torchelastic.agent.server.api import ProcessFailure, RunResult, WorkerSpec, WorkerState
from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent

__all__ = ["LocalElasticAgent", "ProcessFailure", "RunResult", "WorkerSpec", "WorkerState"]
