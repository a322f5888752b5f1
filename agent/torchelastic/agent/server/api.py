"""The specification and the results of an agent's workers, with the class names of torch."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchelastic.config import parsers
from torchelastic.config.parsers import RawValue
from torchelastic.errors import SettingsError
from torchelastic.lazy import lazy_attributes
from torchelastic.protocol.log_format import DEFAULT_ROLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.numa.binding import NumaOptions

    from torchelastic.rendezvous.api import RendezvousHandler

__all__ = ["RunResult", "WorkerSpec", "WorkerState"]

__getattr__ = lazy_attributes(
    __name__,
    {"torch.distributed.elastic.agent.server.api": "ElasticAgent ProcessFailure SimpleElasticAgent Worker WorkerGroup"},
)


@dataclass
class WorkerSpec:
    """The workers of a node.

    Attributes:
        role: the role of the workers; the prefix of their output contains it unless it is the default role.
        local_world_size: the number of workers on this node.
        rdzv_handler: the rendezvous handler; None for a run of one node.
        fn: the function that each worker calls; a deprecated alias of ``entrypoint``.
        entrypoint: the function, or a command. cloudpickle serializes the function and its arguments, so the function
            may be a lambda or defined in ``__main__``.
        args: the arguments, the same for all workers.
        max_restarts: maximum number of worker failures in the run that count against the restart budget.
        monitor_interval: with a custom handler, seconds between polls of workers and handler.
        master_port: with a custom handler, the port of the workers' TCPStore; None for any free port.
        master_addr: with a custom handler, the host of the workers' TCPStore; None for the address of the first node.
        local_addr: the address at which other nodes reach this node; None to detect it.
        event_log_handler: with a custom handler, the name of torch's handler of events; else "null".
        numa_options: torch's options for binding each worker to the CPUs near its GPU; None for no binding.
        duplicate_stdout_filters: texts; lines of standard output in ``tee`` that contain one of them are also written
            to the file ``filtered_stdout.log``.
        duplicate_stderr_filters: likewise for standard error and ``filtered_stderr.log``.
        virtual_local_rank: whether each worker has ``LOCAL_RANK`` 0 and sees only its own GPU.
        redirects: streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or a mapping from local ranks to
            these numbers.
        tee: streams that go to files and to the console, in the same format.
        non_retryable_exit_codes: exit codes of workers after which the run fails at once, even if restarts are left.
        heartbeat_timeout: seconds without a heartbeat after which a worker counts as hung; None for no limit.

    Raises:
        SettingsError: a value is invalid; the message states what to change.
    """

    role: str = DEFAULT_ROLE
    local_world_size: int = 1
    rdzv_handler: RendezvousHandler | None = None
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str = ""
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    non_retryable_exit_codes: tuple[int, ...] = ()
    heartbeat_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.fn and self.entrypoint and self.fn != self.entrypoint:
            raise SettingsError("WorkerSpec has both fn and entrypoint, which have the same meaning: remove fn.")
        self.entrypoint = self.entrypoint or self.fn or ""
        if not self.entrypoint:
            raise SettingsError("WorkerSpec.entrypoint is not set: set it to a function or a command.")
        if self.local_world_size < 1:
            raise SettingsError(f"WorkerSpec.local_world_size={self.local_world_size}: at least one worker is needed.")
        for name in ("monitor_interval", "heartbeat_timeout"):
            if (value := getattr(self, name)) is not None:
                parsers.seconds()(RawValue(f"WorkerSpec.{name}", f"{value}"))

    def get_entrypoint_name(self) -> str:
        """Return the name of the function or command."""
        if isinstance(self.entrypoint, str):
            return Path(self.entrypoint).name
        return str(getattr(self.entrypoint, "__qualname__", type(self.entrypoint).__qualname__))


def common_fields(kind: type, source: object) -> dict[str, Any]:
    """Return the fields of a dataclass that an object has as attributes, by name."""
    return {each.name: getattr(source, each.name) for each in dataclasses.fields(kind) if hasattr(source, each.name)}


class WorkerState(enum.StrEnum):
    """The combined state of a node's workers."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether workers run in this state."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run on this node.

    Attributes:
        state: SUCCEEDED, FAILED, or STOPPED (this node has left the run, or was not needed).
        return_values: the return values of this node's workers, by global rank; None for commands.
        failures: the failed workers by global rank; the first entry is the root cause, which may be on another node.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return whether the run has failed."""
        return self.state == WorkerState.FAILED
