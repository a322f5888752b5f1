"""Notices on one node: what its workers ask for goes to the leader, and what the leader says goes to them.

A node that leaves gives its workers notice by itself, at once; the leader's word on the same change then is no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.contract import EpochReason

if TYPE_CHECKING:
    from torchelastic.agent.worker_channel import WorkerChannel
    from torchelastic.contract import NoticeRecord
    from torchelastic.rendezvous.node import RendezvousNode


class Notices:
    """The notices of the present epoch.

    Args:
        channel: to the workers.
        node: this node in the rendezvous.
        limit: seconds that workers get at most, however much they ask for.
    """

    def __init__(self, channel: WorkerChannel, node: RendezvousNode, *, limit: float) -> None:
        self._channel = channel
        self._node = node
        self._limit = limit
        self._epoch = 0
        self._serial = 0
        self._leaving = False

    def begin(self, epoch: int) -> None:
        """An epoch begins, of which nobody has said anything yet."""
        self._epoch = epoch
        self._serial = 0
        self._channel.expect(epoch)

    @property
    def stands(self) -> bool:
        """Whether the leader has given notice that the epoch is about to change."""
        return self._serial != 0

    @property
    def answered(self) -> bool:
        """Whether no worker of this node is left that asked for a notice and has not answered the one that stands."""
        return self._channel.answered

    def told(self, record: NoticeRecord) -> None:
        """The leader says that the epoch is about to change, or no longer is."""
        if record.epoch != self._epoch:
            return
        if record.seconds > 0:
            if not self._leaving and record.serial != self._serial:
                self._channel.tell(record.seconds, reason=record.reason, cause=record.cause)
            self._serial = record.serial
        elif not self._leaving:
            self._serial = 0
            self._channel.take_back()
        self.report()

    def leave(self, cause: str) -> None:
        """This node leaves."""
        self._leaving = True
        if (asked := self._asked()) > 0:
            self._channel.tell(asked, reason=EpochReason.NODE_LEFT, cause=cause)

    def report(self) -> None:
        """Tell the leader what the workers ask for, and that they have answered where all have."""
        asked = self._asked()
        self._node.report(self._epoch, notice=asked)
        if asked > 0 and self._serial and self._channel.answered:
            self._node.report(self._epoch, saved=self._serial)

    def _asked(self) -> float:
        return min(self._channel.asked, self._limit)
