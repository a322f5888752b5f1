"""Launch functions and commands from Python.

:mod:`torchelastic.launcher.launcher` calls a function on many workers of this machine or of several hosts, and has the
names of torchrunx. :mod:`torchelastic.launcher.api` has the names of ``torch.distributed.launcher``.
"""

from torchelastic.lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "torchelastic.launcher.api": "LaunchConfig elastic_launch launch_agent",
        "torchelastic.launcher.launcher": "DEFAULT_ENV_VARS_FOR_COPY LaunchResult Launcher attach launch",
        "torchelastic.launcher.head": "AgentFailedError WorkerFailedError",
        "torchelastic.launcher.log_handlers": "RedirectHandler add_filter_to_handler default_handlers file_handler "
        "file_handlers get_handler_filter stream_handler",
        "torchelastic.launcher.arguments": "add_torchrunx_argument_group launcher_from_args",
        "torchelastic.launcher.lightning": "TorchrunxClusterEnvironment",  # not in __all__: it needs Lightning
    },
)

__all__ = [
    "DEFAULT_ENV_VARS_FOR_COPY",
    "AgentFailedError",
    "LaunchConfig",
    "LaunchResult",
    "Launcher",
    "RedirectHandler",
    "WorkerFailedError",
    "add_filter_to_handler",
    "add_torchrunx_argument_group",
    "attach",
    "default_handlers",
    "elastic_launch",
    "file_handler",
    "file_handlers",
    "get_handler_filter",
    "launch",
    "launch_agent",
    "launcher_from_args",
    "stream_handler",
]
