"""What an agent is asked to do: frozen, complete, and handed in; nothing below reads flags or the environment.

:mod:`torchelastic.arguments` makes these from the command line.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchelastic.contract import RUN_LEASE_TTL, ResumeRecord
from torchelastic.output import DEFAULT_ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torchelastic.contract import SizeRecord
    from torchelastic.store.api import StoreSettings


class ProgramKind(enum.StrEnum):
    """What a worker is."""

    SCRIPT = "script"
    """A Python file: ``python FILE ARGS…``."""
    MODULE = "module"
    """A Python module: ``python -m MODULE ARGS…``."""
    COMMAND = "command"
    """Anything else, executed plainly."""


class StartMethod(enum.StrEnum):
    """How a Python program becomes a worker."""

    FORK_SERVER = "fork-server"
    """Forked from a process that has torch imported."""
    EXEC = "exec"
    """By a new interpreter, which imports everything anew."""

    @classmethod
    def named(cls, text: str) -> StartMethod | None:
        """The method that is meant by one of our names or of torch's; None where there is none of that name."""
        match text.strip().lower().replace("_", "-"):
            case "fork-server" | "forkserver" | "fork":
                return cls.FORK_SERVER
            case "exec" | "spawn":
                return cls.EXEC
            case _:
                return None


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
        directory: where files are made, ``epoch_E/rank_R/`` below it; None for no files.
        redirects: by local rank, streams that go to ``stdout.log`` and ``stderr.log`` and not to the agent's own
            streams. Where a directory is given and neither ``redirects`` nor ``tee`` names a rank, both streams go
            into one file ``output.log``, in the order in which they were written.
        tee: by local rank, streams that go to files and to the agent's own streams, each line with its rank.
    """

    directory: Path | None = None
    redirects: Mapping[int, Streams] = field(default_factory=dict)
    tee: Mapping[int, Streams] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports to listen on.

    Attributes:
        first: the lowest of them.
        last: the highest of them.
    """

    first: int
    last: int

    def after(self, port: int) -> Iterator[int]:
        """All of them but this one, each once, from the one that follows it; from the first one where it is none."""
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
        joining_window: seconds for which the first epoch waits for more nodes where the wanted ones are not all there.
        gather: seconds for which joins are gathered, so that nodes that arrive together join in one change.
        join_timeout: seconds for which too few nodes wait for more before the run fails.
        lease: seconds after which a silent node counts as lost.
        run_lease: seconds after which nothing is left in the store of a run that everybody has abandoned.
        early_failures: failures in a row, each within ``early_seconds`` of its start, after which the run fails.
        early_seconds: see ``early_failures``.
        notice: seconds that workers get at most to save before a planned change, however much they ask for.
        ports: the only ports on which this node listens for others and serves the stores of epochs; None for any.
        resume: what this node knows of the run from the start.
    """

    run_id: str
    size: SizeRecord
    unique_run: bool = False
    max_restarts: int = 100
    joining_window: float = 10.0
    gather: float = 0.05
    join_timeout: float = 600.0
    lease: float = 5.0
    run_lease: float = RUN_LEASE_TTL
    early_failures: int = 3
    early_seconds: float = 10.0
    notice: float = 30.0
    ports: PortRange | None = None
    resume: ResumeRecord = field(default_factory=ResumeRecord)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All that an agent is asked to do.

    Attributes:
        rendezvous: how it meets its peers.
        store: where; None for ``--standalone``, a run of one node that needs no etcd.
        node_name: how the operator, or the user, knows this node.
        address: where its peers reach it; also MASTER_ADDR where it serves the store.
        program: what its workers run.
        workers: how many of them.
        role: their role, as torchrun's --role.
        logs: where their output goes.
        stop_grace: seconds between SIGTERM and SIGKILL when workers are ended because this node leaves.
        stop_timeout: seconds between SIGTERM and SIGKILL when workers are ended because the epoch is.
        heartbeat_timeout: seconds without a sign of life after which a worker counts as hung; None for no such limit.
        final_exit_codes: exit codes of workers after which trying again is no use; 128 + n for signal n.
        free_exit_codes: exit codes of workers, likewise, that are charged to nobody.
        place: nodes with the same one are neighbours, and get neighbouring ranks; empty for none.
        interface: the network interface that gloo and NCCL are told to use; empty where that is theirs to find out.
        metrics_port: of /metrics; 0 for any free one; None for no /metrics.
        termination_log: the file that gets the termination message.
        job: namespace and name of the job; empty, and the run's id, where nobody has said them.
        job_created: when it was made, in seconds since the Unix epoch; None where nobody has said it.
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
