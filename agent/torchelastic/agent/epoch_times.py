"""What it costs a node to get from one epoch into the next, told under torchelastic's names for the steps.

There an agent asks for a rendezvous and waits until it is given one. Ours waits from when it has nothing to train until
an epoch stands that has it as a member; where its workers have trained until then, it has not waited at all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchelastic.metrics.agent import AgentMetrics

_RENDEZVOUS: Final = "SimpleElasticAgent._rendezvous"
_INITIALIZE: Final = "SimpleElasticAgent._initialize_workers"
_RESTART: Final = "SimpleElasticAgent._restart_workers"


class EpochTimes:
    """The times of one node.

    Args:
        metrics: are told.
    """

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics
        self._waits_since: float | None = None
        self._without_since = 0.0

    def waits(self) -> None:
        """This node has nothing to train from now on, if it had before."""
        if self._waits_since is None:
            self._waits_since = time.monotonic()

    def begun(self) -> None:
        """An epoch stands that has this node as a member."""
        now = time.monotonic()
        self._without_since, self._waits_since = now if self._waits_since is None else self._waits_since, None
        self._metrics.took(_RENDEZVOUS, now - self._without_since, succeeded=True)

    def failed(self) -> None:
        """No epoch will come."""
        if self._waits_since is not None:
            self._metrics.took(_RENDEZVOUS, time.monotonic() - self._waits_since, succeeded=False)
            self._waits_since = None

    def started(self, broken_at: float | None, *, succeeded: bool) -> None:
        """The workers of the epoch were started, or cannot be.

        Args:
            broken_at: when the end of the epoch before was seen, by the monotonic clock; None where there was none.
            succeeded: how it ended.
        """
        now = time.monotonic()
        self._metrics.took(_INITIALIZE, now - self._without_since, succeeded=succeeded)
        if broken_at is not None:
            self._metrics.took(_RESTART, now - broken_at, succeeded=succeeded)
