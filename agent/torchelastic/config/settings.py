"""What an agent is asked to do; :mod:`torchelastic.config.main` makes it from the command line and the environment."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchelastic.output import DEFAULT_ROLE
from torchelastic.protocol import RUN_LEASE_TTL, ResumeRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torchelastic.protocol import SizeRecord
    from torchelastic.store.api import StoreSettings


class ProgramKind(enum.StrEnum):
    """What a worker is: a Python file, a Python module, or any other command."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


class StartMethod(enum.StrEnum):
    """How a Python program becomes a worker: forked from a process that has torch imported, or a new interpreter."""

    FORK_SERVER = "fork-server"
    EXEC = "exec"

    @classmethod
    def named(cls, text: str) -> StartMethod | None:
        """The method of this name, which may be torch's name; None if there is none."""
        name = text.strip().lower().replace("_", "-")
        name = {"forkserver": "fork-server", "fork": "fork-server", "spawn": "exec"}.get(name, name)
        return cls(name) if name in set(cls) else None


class Streams(enum.IntFlag):
    """Standard streams of a worker, as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Program:
    """What every worker runs.

    Attributes:
        kind: script, module or command.
        argv: the script, module or command, and its arguments.
        start_method: how it is started; a command is always executed.
        preload: modules that the fork server imports beside torch.
    """

    kind: ProgramKind
    argv: tuple[str, ...]
    start_method: StartMethod = StartMethod.FORK_SERVER
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the workers' output goes.

    Attributes:
        directory: files are made in ``round_E/rank_R/`` below it; None for no files.
        redirects: by local rank, streams that go to ``stdout.log`` and ``stderr.log`` only. If neither this nor
            ``tee`` names a rank, both go into one file ``output.log``.
        tee: by local rank, streams that go to files and to the agent's own streams, each line with its rank.
    """

    directory: Path | None = None
    redirects: Mapping[int, Streams] = field(default_factory=dict)
    tee: Mapping[int, Streams] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports to listen on, the first and the last one included."""

    first: int
    last: int

    def after(self, port: int) -> Iterator[int]:
        """All other ports, each once, beginning after this one."""
        start = port + 1 if self.first <= port <= self.last else self.first
        around = (*range(start, self.last + 1), *range(self.first, start))
        return (each for each in around if each != port)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """How the nodes of a run meet.

    Attributes:
        run_id: nodes with the same id in the same store train together.
        size: how many nodes there may and should be.
        unique_run: the id is never used again: an outcome found in the store is this run's.
        max_restarts: how many failures of workers the whole run may have.
        last_call_timeout: seconds for which the first round waits for nodes above the minimum.
        join_debounce: seconds for which joins are collected into one change.
        join_timeout: seconds for which too few nodes wait for more before the run fails.
        lease: seconds after which a silent node counts as lost.
        run_lease: seconds after which the store forgets a run without nodes.
        crash_loop_limit: failures in a row, each within ``crash_loop_seconds`` of its start, after which the run fails.
        crash_loop_seconds: see ``crash_loop_limit``.
        notice: seconds that workers get at most to save before a planned change.
        ports: the ports on which this node listens for other nodes and serves the stores of rounds; None for any.
        resume: what this node knows of the run from the start.
    """

    run_id: str
    size: SizeRecord
    unique_run: bool = False
    max_restarts: int = 100
    last_call_timeout: float = 10.0
    join_debounce: float = 0.05
    join_timeout: float = 600.0
    lease: float = 5.0
    run_lease: float = RUN_LEASE_TTL
    crash_loop_limit: int = 3
    crash_loop_seconds: float = 10.0
    notice: float = 30.0
    ports: PortRange | None = None
    resume: ResumeRecord = field(default_factory=ResumeRecord)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All that an agent is asked to do.

    Attributes:
        rendezvous: how it meets its peers.
        store: where they meet; None for a run of one node that needs no etcd.
        node_name: the name of this node for users and the operator.
        address: where its peers reach it; also MASTER_ADDR if it serves the store.
        program: what its workers run.
        workers: how many of them.
        role: their role, as torchrun's --role.
        logs: where their output goes.
        stop_grace: seconds between SIGTERM and SIGKILL when workers are ended because this node leaves.
        stop_timeout: seconds between SIGTERM and SIGKILL when workers are ended because the round is.
        heartbeat_timeout: seconds without a sign of life after which a worker counts as hung; None for no such limit.
        final_exit_codes: exit codes of workers after which the run fails at once; 128 + n for signal n.
        free_exit_codes: exit codes of workers, likewise, that are not charged to the budget of restarts.
        place: nodes with the same one get neighbouring ranks; empty for none.
        interface: the network interface that gloo and NCCL are told to use; empty if they find it themselves.
        metrics_port: of /metrics; 0 for any free one; None for no /metrics.
        termination_log: the file that gets the termination message.
        job: namespace and name of the job; without a job, empty and the run's id.
        job_created: when it was created, in seconds since 1970; None if that is unknown.
    """

    rendezvous: RendezvousSettings
    store: StoreSettings | None
    node_name: str
    address: str
    program: Program
    workers: int = 1
    role: str = DEFAULT_ROLE
    logs: LogSettings = field(default_factory=LogSettings)
    stop_grace: float = 5.0
    stop_timeout: float = 0.0
    heartbeat_timeout: float | None = None
    final_exit_codes: frozenset[int] = frozenset()
    free_exit_codes: frozenset[int] = frozenset()
    place: str = ""
    interface: str = ""
    metrics_port: int | None = None
    termination_log: Path | None = None
    job: tuple[str, str] = ("", "")
    job_created: float | None = None

    def __post_init__(self) -> None:
        if self.job == ("", ""):
            object.__setattr__(self, "job", ("", self.rendezvous.run_id))
