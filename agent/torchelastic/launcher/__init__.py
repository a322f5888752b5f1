"""Launch a function or a command from Python: see :mod:`torchelastic.launcher.api`."""

from torchelastic.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
