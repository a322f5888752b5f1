"""The launcher where torch has it, ``torch.distributed.launcher.api``."""

from __future__ import annotations

from torchelastic.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
