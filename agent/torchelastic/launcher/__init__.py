"""Launch functions and commands from Python.

:mod:`torchelastic.launcher.launcher` calls a function on many workers of this machine or of several hosts, and has the
names of torchrunx. :mod:`torchelastic.launcher.api` has the names of ``torch.distributed.launcher``.
"""

from torchelastic.lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "torchelastic.launcher.api": "LaunchConfig elastic_launch launch_agent",
        "torchelastic.launcher.launcher": "DEFAULT_ENV_VARS LaunchResult Launcher attach launch",
        "torchelastic.launcher.head": "AgentFailedError WorkerFailedError",
        "torchelastic.launcher.log_handlers": "add_filter_to_handler default_handlers file_handler stream_handler",
    },
)

__all__ = [
    "DEFAULT_ENV_VARS",
    "AgentFailedError",
    "LaunchConfig",
    "LaunchResult",
    "Launcher",
    "WorkerFailedError",
    "add_filter_to_handler",
    "attach",
    "default_handlers",
    "elastic_launch",
    "file_handler",
    "launch",
    "launch_agent",
    "stream_handler",
]
