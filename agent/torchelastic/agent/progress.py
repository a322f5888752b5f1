"""How far the program is, by its own word: what its worker of rank 0 tells goes into this node's record.

It goes there without any detour, also while workers are being ended: the leader is to know it before the next epoch.
However much is told, it is written once in a second.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from torchelastic.contract import EpochRecord

INTERVAL: Final = 1.0
"""Seconds between two reports at least."""


class Reporting(Protocol):
    """A node, as far as this module needs it."""

    node: str

    def report(self, epoch: int, **changes: Any) -> None:  # noqa: ANN401 - any field of its record
        """Say how the node fares in an epoch."""


class Progress:
    """What is known of the present epoch.

    Args:
        node: this node in the rendezvous.

    Attributes:
        stepped: when the program began its first step, in seconds since the Unix epoch; 0 where it has not said so.
        kept: when the last checkpoint was begun that the program has written, likewise.
    """

    def __init__(self, node: Reporting) -> None:
        self._node = node
        self._epoch = 0
        self._speaker: int | None = None
        self._began = 0.0
        self._reported = 0.0, 0.0
        self._due = 0.0
        self._later: asyncio.TimerHandle | None = None
        self.stepped = 0.0
        self.kept = 0.0

    def begin(self, epoch: EpochRecord) -> None:
        """An epoch begins, of which nobody has said anything yet."""
        first = next((member.node for member in epoch.members if member.workers), None)
        self._epoch = epoch.number
        self._speaker = 0 if first == self._node.node else None  # the local rank of the worker with rank 0
        self._began = time.time()
        self.stepped = self.kept = 0.0
        self._reported = 0.0, 0.0
        self._forget_later()

    def told(self, local_rank: int, *, stepped: float = 0.0, kept: float = 0.0) -> None:
        """A worker of the epoch says how far it is. What cannot be is not believed.

        Args:
            local_rank: the worker's.
            stepped: when it began its first step; the first word counts.
            kept: when it began to write a checkpoint; the latest one counts.
        """
        if local_rank != self._speaker:
            return
        now = time.time()
        if not self.stepped and stepped >= self._began:
            self.stepped = min(stepped, now)
        if kept >= self._began:
            self.kept = max(self.kept, min(kept, now))
        if self._reported == (self.stepped, self.kept) or self._later is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._later = loop.call_at(self._due, self.report)
        else:
            self.report()

    def report(self) -> None:
        """Say what is known, at once: the epoch may be about to end."""
        self._forget_later()
        known = self.stepped, self.kept
        if known != self._reported:
            self._reported = known
            self._due = asyncio.get_running_loop().time() + INTERVAL
            self._node.report(self._epoch, stepped=round(self.stepped, 3), kept=round(self.kept, 3))

    def _forget_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
