"""The agent for launchers in Python: what to run, and the agent that runs it.

:mod:`.api` has what goes in and what comes out, :mod:`.local_elastic_agent` the agent.
"""

from __future__ import annotations

from torchelastic.agent.server.api import ProcessFailure, RunResult, WorkerSpec, WorkerState
from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent

__all__ = ["LocalElasticAgent", "ProcessFailure", "RunResult", "WorkerSpec", "WorkerState"]
