"""The launcher under the path that it has in torch, ``torch.distributed.launcher.api``."""

from torchelastic.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
