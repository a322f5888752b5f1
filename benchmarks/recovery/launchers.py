"""The launchers that are compared: torchelastic-run, and torchrun with favorable and with default settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER: Final = Path(__file__).with_name("worker.py")
_READY: Final = "benchmarks.recovery.ready"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher with its settings.

    Attributes:
        name: the launcher's name in a report.
        conf: the settings for ``--rdzv-conf``.
        environment: additional environment variables of the agents.
        is_ours: whether the launcher is torchelastic-run; otherwise it is torchrun.
    """

    name: str
    conf: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False

    def command(
        self, *, node: str, address: str, endpoint: str, run_id: str, nnodes: str, first: bool, reports_ready: bool
    ) -> list[str]:
        """Return the command of an agent with one worker.

        Args:
            node: the agent's name.
            address: the agent's address for other agents.
            endpoint: host:port of the rendezvous.
            run_id: the id of the run.
            nnodes: the value of ``--nnodes``.
            first: whether the agent is the run's first, which hosts torchrun's store.
            reports_ready: whether the agent writes the time at which torch is imported (``ready.py``).
        """
        rendezvous = (f"--nnodes={nnodes}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}")
        common = (*rendezvous, f"--local-addr={address}", "--max-restarts=100")
        if self.is_ours:
            conf: Mapping[str, float] = self.conf
            program = "torchelastic.run"
            more = [f"--node-name={node}", *([f"--preload={_READY}"] if reports_ready else [])]
        else:
            conf = {**self.conf, "is_host": int(first)}
            program = _READY if reports_ready else "torch.distributed.run"
            more = ["--rdzv-backend=c10d", "--monitor-interval=0.1"]
        if conf:
            more.append("--rdzv-conf=" + ",".join(f"{key}={value:g}" for key, value in conf.items()))
        return [sys.executable, "-m", program, *common, *more, str(WORKER)]


OURS: Final = Launcher("torchelastic-run", is_ours=True)

_LAST_CALL: Final = {"last_call_timeout": 1}
"""A last call of 1 s. By default, torchrun waits 30 s for more nodes if it has fewer than the maximum."""
_NOT_SHARED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each round gets its own store. By default (torch 2.15), all rounds share one store. Restarted workers may then find
keys of the previous round and wait for that round, and an agent that joins later never gets the store's address."""

TORCHRUN: Final = Launcher("torchrun", _LAST_CALL, _NOT_SHARED)
TORCHRUN_FAST_LOSS: Final = Launcher(
    "torchrun that detects lost nodes after 5 s",
    {**_LAST_CALL, "keep_alive_interval": 1, "keep_alive_max_attempt": 5},
    _NOT_SHARED,
)
"""A node without heartbeats for 5 s counts as lost, as with torchelastic's lease. The default is 15 s."""
TORCHRUN_DEFAULTS: Final = Launcher("torchrun with its defaults")
