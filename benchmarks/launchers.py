"""How agents are started that are to be compared: ours, and torchrun with settings that are good for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER: Final = Path(__file__).parent / "programs" / "worker.py"
READY: Final = "benchmarks.ready"

FLATTERED: Final = {"last_call_timeout": 1}
"""It waits 30 s for more nodes by default, whenever there are fewer than the most."""

TUNED: Final = {**FLATTERED, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}
"""A node that is silent for 5 s counts as lost, as with our lease; by default it is 15 s."""

UNSHARED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each round gets a store of its own. By default (torch 2.15) all rounds share one: workers that are restarted may meet
what the round before has left there, and wait for it; and an agent that joins later is never told its address."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an agent is started.

    Attributes:
        run_id: of its run.
        name: how it is called.
        address: under which the others reach it.
        meeting: host:port at which the agents of the run meet.
        first: whether it is the run's first one.
        tells: whether it tells when it has torch imported (:mod:`benchmarks.ready`).
    """

    run_id: str
    name: str
    address: str
    meeting: str
    first: bool
    tells: bool = False


class System(Protocol):
    """What starts workers."""

    @property
    def name(self) -> str:
        """How it is called in a report."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What its agents have in theirs."""

    def command(self, spot: Spot, nnodes: str) -> list[str]:
        """The command of an agent with one worker.

        Args:
            spot: where it is started.
            nnodes: as in ``--nnodes``.
        """


@dataclass(frozen=True, slots=True)
class Ours:
    """This project's agent.

    Attributes:
        conf: for ``--rdzv-conf``.
        environment: see :class:`System`.
    """

    conf: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See :class:`System`."""
        return "torchelastic-run"

    def command(self, spot: Spot, nnodes: str) -> list[str]:
        """See :class:`System`."""
        return [
            *(sys.executable, "-m", "torchelastic.run", f"--nnodes={nnodes}", f"--node-name={spot.name}"),
            *(f"--rdzv-endpoint={spot.meeting}", f"--rdzv-id={spot.run_id}", f"--local-addr={spot.address}"),
            *_conf(self.conf),
            *([f"--preload={READY}"] if spot.tells else []),
            str(WORKER),
        ]


@dataclass(frozen=True, slots=True)
class Torchrun:
    """torch's agent with its c10d rendezvous, whose store is hosted by the first agent.

    Attributes:
        name: how it is called in a report.
        conf: for ``--rdzv-conf``.
        environment: see :class:`System`.
    """

    name: str = "torchrun"
    conf: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, spot: Spot, nnodes: str) -> list[str]:
        """See :class:`System`."""
        program = READY if spot.tells else "torch.distributed.run"
        return [
            *(sys.executable, "-m", program, f"--nnodes={nnodes}", "--max-restarts=100"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={spot.meeting}", f"--rdzv-id={spot.run_id}"),
            *(f"--local-addr={spot.address}", "--monitor-interval=0.1"),
            *_conf({**self.conf, "is_host": int(spot.first)}),
            str(WORKER),
        ]


def _conf(conf: Mapping[str, float]) -> list[str]:
    return ["--rdzv-conf=" + ",".join(f"{key}={value:g}" for key, value in conf.items())] if conf else []
