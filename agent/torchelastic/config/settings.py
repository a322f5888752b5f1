"""The settings of an agent. :mod:`torchelastic.config.parse` parses them from the command line and the environment.

A field that its class does not describe has the meaning of its flag (:data:`torchelastic.config.flags.FLAGS`). None and
empty values stand for a flag that is not set.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchelastic.protocol.keys import RUN_LEASE_TTL
from torchelastic.protocol.log_format import DEFAULT_ROLE
from torchelastic.protocol.records import NodeRecord, ResumeRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from torchelastic.protocol.records import SizeRecord
    from torchelastic.store.api import StoreSettings


class ProgramKind(enum.StrEnum):
    """The kind of a worker's program: a Python file, a Python module, or any other command."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


class StartMethod(enum.StrEnum):
    """How a Python worker is started: forked from a process that has imported torch, or as a new interpreter."""

    FORK_SERVER = "fork-server"
    EXEC = "exec"


class Streams(enum.IntFlag):
    """Standard streams of a worker, as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Program:
    """The program of the workers.

    Attributes:
        kind: script, module or command.
        argv: the script, module or command, and its arguments.
        start_method: how a Python program is started; a command is always executed.
        preload: modules that the fork server imports in addition to torch.
        learns: whether the fork server also imports what workers have imported.
    """

    kind: ProgramKind
    argv: tuple[str, ...]
    start_method: StartMethod = StartMethod.FORK_SERVER
    preload: tuple[str, ...] = ()
    learns: bool = True


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The destinations of the workers' output.

    Attributes:
        directory: the folder for files in ``round_N/rank_R/``; None for no files, or for a temporary folder if
            ``redirects`` or ``tee`` names a rank.
        redirects: by local rank, streams that go only to ``stdout.log`` and ``stderr.log``.
        tee: by local rank, streams that go to these files and, with a prefix before each line, to the agent's own
            streams. Workers inherit the agent's streams if they are in neither of the two mappings.
        combined: whether both streams of a worker without ``redirects`` and ``tee`` go to one file ``output.log``.
        specs: the user's object that chooses the files and streams instead of all settings above but ``prefix``.
    """

    directory: Path | None = None
    redirects: Mapping[int, Streams] = field(default_factory=dict)
    tee: Mapping[int, Streams] = field(default_factory=dict)
    combined: bool = False
    prefix: bool = False
    local_ranks_filter: frozenset[int] | None = None
    log_line_prefix_template: str = ""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    specs: LogsSpecs | None = None


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports to listen on, including the first and the last port."""

    first: int
    last: int

    def after(self, port: int) -> Iterator[int]:
        """Return an iterator over all other ports, which starts after this port and wraps around."""
        start = port + 1 if self.first <= port <= self.last else self.first
        around = (*range(start, self.last + 1), *range(self.first, start))
        return (each for each in around if each != port)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The settings of the rendezvous.

    Attributes:
        run_id: the id of the run; nodes with the same id in the same store train together.
        size: the minimum, maximum and desired number of nodes.
        unique_run: whether the id is never reused; if so, an outcome in the store belongs to this run.
        last_call_timeout: seconds without a further node after which the first round begins with the minimum; None for
            the default, which depends on whether the desired size is known.
        join_debounce: seconds during which joins are combined into one new round.
        join_timeout: seconds that a run below the minimum waits for nodes before it fails.
        lease: seconds without a renewal of its lease after which a node counts as lost.
        run_lease: seconds after which the store removes the keys of a run without nodes.
        crash_loop_limit: number of consecutive early failures of workers after which the run fails.
        crash_loop_seconds: uptime in seconds below which a failure counts toward ``crash_loop_limit``.
        ports: the ports on which this node listens for other nodes and serves TCPStores; None for any port.
        resume: the state of the run before it was suspended.
    """

    run_id: str
    size: SizeRecord
    unique_run: bool = False
    max_restarts: int = 0
    last_call_timeout: float | None = None
    join_debounce: float = 0.05
    join_timeout: float = 600.0
    lease: float = 5.0
    run_lease: float = RUN_LEASE_TTL
    crash_loop_limit: int = 3
    crash_loop_seconds: float = 10.0
    notice: float = 30.0
    ports: PortRange | None = None
    resume: ResumeRecord = field(default_factory=ResumeRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings of a node in the rendezvous.

    Attributes:
        store: the store; None for a run of one node, which needs no etcd.
        etcd_addresses: the addresses on which this node serves the store, if torch's backends let it do so.
        node_name: the name of this node for users and the operator.
        address: the address at which peers reach this node; also MASTER_ADDR if this node serves the TCPStore.
        interface: the network interface for gloo and NCCL; empty if they choose it themselves.
    """

    rendezvous: RendezvousSettings
    store: StoreSettings | None
    node_name: str
    address: str
    interface: str = ""
    topology_key: str = ""
    etcd_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(NodeSettings):
    """The settings of an agent.

    Attributes:
        node_rank: this node's place among the nodes; None for a place after those that have one.
        signals: the signals on which this node leaves the run, and which its workers then get.
        warm_spare: whether the workers of a spare node start, and wait in :func:`torchelastic.elastic`.
        job: namespace and name of the job; without a job, an empty namespace and the run's id.
        job_created: the creation time of the job, in seconds since the Unix epoch; 0 if unknown.
    """

    program: Program
    workers: int = 1
    node_rank: int | None = None
    role: str = DEFAULT_ROLE
    logs: LogSettings = field(default_factory=LogSettings)
    shutdown_timeout: float = 30.0
    stop_timeout: float = 5.0
    rejoin_timeout: float = 10.0
    signals: frozenset[signal.Signals] = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
    virtual_local_rank: bool = False
    numa_binding: str = ""
    heartbeat_timeout: float | None = None
    warm_spare: bool = False
    non_retryable_exit_codes: frozenset[int] = frozenset()
    uncharged_exit_codes: frozenset[int] = frozenset()
    metrics_port: int | None = None
    termination_log: Path | None = None
    job: tuple[str, str] = ("", "")
    job_created: float = 0.0

    def node_record(self, metrics_port: int) -> NodeRecord:
        """Return the record of a node with these settings that cannot start workers yet."""
        return NodeRecord(
            name=self.node_name,
            address=self.address,
            workers=self.workers,
            size=self.rendezvous.size,
            metrics=metrics_port,
            topology_key=self.topology_key,
            role=self.role,
            node_rank=self.node_rank,
            starting=True,
        )
