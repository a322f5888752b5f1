"""Launching a function, or a command, with one call: ``elastic_launch(LaunchConfig(…), fn)(*args)``.

The names are torch's, and what they mean is, too; what runs is our agent, and by default our rendezvous.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchelastic.agent.server.api import WorkerSpec
from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent
from torchelastic.output import DEFAULT_ROLE
from torchelastic.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

logger = logging.getLogger(__name__)


@dataclass
class LaunchConfig:
    """How a function is launched on this node.

    Attributes:
        min_nodes: fewer do not train.
        max_nodes: more do not train.
        nproc_per_node: workers on this node.
        logs_specs: torch's word for where output goes: its folder is taken, where ``log_dir`` is not given.
        run_id: nodes with the same one train together; may be left out where there is one node.
        role: of the workers.
        rdzv_endpoint: where the nodes meet; for our rendezvous an etcd, and needed where there are several nodes.
        rdzv_backend: "torchelastic" (or "etcd") is ours; c10d, static and whatever else torch knows are torch's.
        rdzv_configs: more about the meeting, with the keys of ``--rdzv-conf``.
        rdzv_timeout: seconds for which too few nodes wait for more; -1 to leave that to ``rdzv_configs``.
        max_restarts: how many failures of workers the run may have.
        monitor_interval: seconds after which a rendezvous that is not ours is asked for changes.
        start_method: see :class:`~torchelastic.agent.server.LocalElasticAgent`.
        metrics_cfg: for :func:`torchelastic.metrics.initialize_metrics`.
        local_addr: where the other nodes reach this one; None to have it found out.
        log_dir: a folder for the workers' output; None for no files.
        redirects: see :class:`~torchelastic.agent.server.WorkerSpec`.
        tee: likewise.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when workers are ended because this node leaves.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = DEFAULT_ROLE
    rdzv_endpoint: str = ""
    rdzv_backend: str = "torchelastic"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: float = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "fork-server"
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    log_dir: str | os.PathLike[str] | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    shutdown_timeout: float = 5.0


class elastic_launch:  # noqa: N801 - torch's name
    """What launches a function or a command when it is called with its arguments.

    Called, it returns what the function returned by global rank, of the workers of this node.

    Args:
        config: how.
        entrypoint: the function; or the name of a command, whose arguments are then given.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:  # noqa: ANN401 - whatever the function takes
        """Launch it; see :func:`launch_agent`."""
        return launch_agent(self._config, self._entrypoint, args)


def launch_agent(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> dict[int, Any]:
    """Launch a function or a command on this node, and wait for the end of the run.

    Args:
        config: how.
        entrypoint: the function, or the name of a command.
        args: its arguments.

    Returns:
        What the function returned, by global rank, of the workers of this node; None for commands. Empty where this
        node was not needed, or has left the run.

    Raises:
        ChildFailedError: the run has failed; torch's exception, with the root cause as its first failure.
        RendezvousError: this node cannot meet the others.
        SettingsError: what is asked for cannot be; the message says what to change.
    """
    from torchelastic import metrics

    handler = rendezvous_handler_registry.create_handler(_parameters(config))
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=tuple(args),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        redirects=config.redirects,
        tee=config.tee,
    )
    agent = LocalElasticAgent(
        spec,
        start_method=config.start_method,
        log_dir=config.log_dir,
        logs_specs=config.logs_specs,
        shutdown_timeout=config.shutdown_timeout,
    )
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    with _closing(handler):
        result = agent.run(config.role)
        if result.is_failed():
            from torchelastic.launcher.failing import child_failed

            raise child_failed(spec.get_entrypoint_name(), result.failures)
    return result.return_values


def _parameters(config: LaunchConfig) -> RendezvousParameters:
    options = dict(config.rdzv_configs)
    if config.rdzv_timeout != -1:
        options["timeout"] = config.rdzv_timeout
    # A handler of torch's needs one in any case; ours asks for one where there can be a second node.
    alone = config.max_nodes == 1
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id or (uuid.uuid4().hex if alone else ""),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **options,
    )


@contextlib.contextmanager
def _closing(handler: RendezvousHandler) -> Iterator[None]:
    """Let a handler that is not ours go of everything, unless this node only leaves a run that goes on.

    torch's handlers close the rendezvous for all nodes then.
    """
    try:
        yield
    except Exception:
        _shut_down(handler)
        raise
    _shut_down(handler)


def _shut_down(handler: RendezvousHandler) -> None:
    try:
        handler.shutdown()
    except Exception:
        logger.exception("the rendezvous handler could not be shut down")
