"""Launch a function or a command: ``elastic_launch(LaunchConfig(…), fn)(*args)``.

The names have the same meaning as in torch; the agent and the default rendezvous are torchelastic's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torchelastic.agent.server.api import WorkerSpec, common_fields
from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent
from torchelastic.config import parsers
from torchelastic.config.parsers import RawValue
from torchelastic.protocol.log_format import LAUNCH_ROLE
from torchelastic.rendezvous.api import RendezvousParameters
from torchelastic.rendezvous.registry import rendezvous_handler_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.numa.binding import NumaOptions

    from torchelastic.rendezvous.api import RendezvousHandler

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

logger = logging.getLogger(__name__)


@dataclass
class LaunchConfig:
    """The configuration for launching a function or a command on this node.

    Attributes that are not listed have the same meaning in :class:`~torchelastic.agent.server.WorkerSpec` or
    :class:`~torchelastic.agent.server.LocalElasticAgent`.

    Attributes:
        min_nodes: the minimum number of nodes.
        max_nodes: the maximum number of nodes.
        nproc_per_node: number of workers on this node.
        run_id: the id of the run; nodes with the same id train together. Optional for one node.
        rdzv_endpoint: the address of the rendezvous: by default, the endpoints of an etcd. Required if the run has more
            than one node.
        rdzv_backend: "torchelastic" (or "etcd"), or a backend of torch, such as "c10d" or "static".
        rdzv_configs: more settings of the rendezvous, with the keys of ``--rdzv-conf``.
        rdzv_timeout: seconds to wait for the minimum number of nodes; -1 to use ``rdzv_configs``.
        monitor_interval: seconds between polls; used only with torch's backends.
        log_line_prefix_template: the text before each line of the streams in ``tee`` on the console, with
            ``${role_name}``, ``${local_rank}``, ``${rank}`` and ``${hostname}``; None for torch's default.
        metrics_cfg: the parameters of :func:`torchelastic.metrics.initialize_metrics`.
        signals_to_handle: the names of signals, separated by commas. If the program neither handles nor ignores such a
            signal and launches in its main thread, this node leaves the run on the signal.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when this node leaves the run; None for
            ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, or 30.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = LAUNCH_ROLE
    rdzv_endpoint: str = ""
    rdzv_backend: str = "torchelastic"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: float = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "fork-server"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    log_dir: str | os.PathLike[str] | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0

    def __post_init__(self) -> None:
        if self.shutdown_timeout is None:
            name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
            self.shutdown_timeout = parsers.seconds(zero=True)(RawValue(name, os.environ.get(name, "30")))


@dataclass
class elastic_launch:  # noqa: N801 - torch's name
    """A callable that launches a function or a command with the arguments of the call; see :func:`launch_agent`."""

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    health_check_server: HealthCheckServer | None = None

    def __call__(self, *args: Any) -> dict[int, Any]:  # noqa: ANN401 - the function's own arguments
        """Launch the function or command with these arguments."""
        return launch_agent(self.config, self.entrypoint, args, self.health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Launch a function or a command on this node, and wait for the end of the run.

    Args:
        config: the launch configuration.
        entrypoint: the function, or the name of a command.
        args: the arguments of the function or command.
        health_check_server: see :class:`~torchelastic.agent.server.LocalElasticAgent`.

    Returns:
        The return values of this node's workers by global rank; None for commands. The dictionary is empty if this
        node was not needed, or has left the run.

    Raises:
        ChildFailedError: the run has failed; torch's exception, with the root cause as its first failure.
        RendezvousError: this node cannot join the run.
        SettingsError: a setting is invalid; the message states what to change.
        SignalException: this node has left the run on one of ``signals_to_handle``; torch's exception.
    """
    from torchelastic import metrics

    options = {} if config.rdzv_timeout == -1 else {"timeout": config.rdzv_timeout}
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        # torch's handlers always need an id; torchelastic's needs one if the run may have several nodes.
        run_id=config.run_id or (uuid.uuid4().hex if config.max_nodes == 1 else ""),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs | options,
    )
    handler = rendezvous_handler_registry.create_handler(parameters)
    spec = WorkerSpec(
        **common_fields(WorkerSpec, config),
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=tuple(args),
    )
    agent = LocalElasticAgent(
        spec,
        config.logs_specs,
        config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=cast("float", config.shutdown_timeout),
        health_check_server=health_check_server,
        log_dir=config.log_dir,
    )
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    try:
        with _raising(parsers.signals(RawValue("signals_to_handle", config.signals_to_handle))):
            result = agent.run(config.role)
    except Exception as error:
        from torch.distributed.elastic.multiprocessing import SignalException

        if not isinstance(error, SignalException):
            _shut_down(handler)
        raise
    # No shutdown after a signal: torch's handlers would close the run, but the run continues on other nodes.
    _shut_down(handler)
    if result.is_failed():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        raise ChildFailedError(spec.get_entrypoint_name(), result.failures)
    return result.return_values


@contextlib.contextmanager
def _raising(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Raise torch's exception on the signals that this program neither handles nor ignores."""

    def leave(number: int, _: object) -> NoReturn:
        from torch.distributed.elastic.multiprocessing import SignalException

        raise SignalException(f"Process {os.getpid()} got signal {number}", signal.Signals(number))

    main = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in signals if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _shut_down(handler: RendezvousHandler) -> None:
    try:
        handler.shutdown()
    except Exception:
        logger.exception("the rendezvous handler could not be shut down")
