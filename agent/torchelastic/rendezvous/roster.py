"""What a leader has seen of the nodes, put together from their keys and their links: the view on which it decides.

Nothing is awaited here. Whoever feeds it says what time it is, so what it makes of a sequence of events can be tested
without a store, a network or a clock.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from torchelastic.contract import CONTRACT_VERSION, NodePhase, NodeRecord, decode
from torchelastic.errors import MalformedRecord
from torchelastic.rendezvous.view import COUNT_LIMIT, Peer, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchelastic.contract import EpochRecord, NoticeRecord, RunKeys, SizeRecord
    from torchelastic.rendezvous.control import Control
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)


class Roster:
    """The nodes as one leader sees them.

    Args:
        node: the leader's own id.
        control: the view of the keys that everybody watches.
        keys: the run's keys.
        size: how many nodes there should be, as far as this leader was told.
        dead: nodes that are known to be dead from the start.
    """

    def __init__(self, node: str, control: Control, keys: RunKeys, size: SizeRecord, dead: Iterable[str] = ()) -> None:
        self._node = node
        self._control = control
        self._keys = keys
        self._size = size
        self._peers: dict[str, Peer] = {}
        self._dead = set(dead)
        self._silent: set[str] = set()
        self._left: set[str] = set()
        self._done: set[str] = set()
        self._warned: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._last_members: tuple[str, ...] = ()
        self._epoch: EpochRecord | None = None
        self._changed_at: float | None = None
        self._failed_since: float | None = None
        self._known = 0
        self._notice: NoticeRecord | None = None
        self._noticed_at = 0.0

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The nodes whose keys stand in the store."""
        return self._peers

    def is_silent(self, node: str) -> bool:
        """Whether a node without a key is taken to be alive."""
        return node in self._silent

    def is_member(self, node: str, *, now: float) -> bool:
        """Whether a node is in the standing epoch."""
        self._look_up(now)
        return node in self._members

    def is_there(self, node: str) -> bool:
        """Whether a node's key stands, and it is not known to be dead."""
        return node in self._peers and node not in self._dead

    def said_goodbye(self, node: str) -> bool:
        """Whether nobody wonders that a node is gone."""
        peer = self._peers.get(node)
        leaves = node in self._left or (peer is not None and peer.record.phase is NodePhase.LEAVING)
        return leaves or node in self._done or self._control.outcome.record is not None

    # -- what is seen

    def saw(self, entry: Entry, *, now: float, answers: bool) -> Peer | None:
        """A node's key, as it stands now.

        Args:
            entry: the key.
            now: the leader's clock.
            answers: whether the node holds a link; what was known of that before stays known.

        Returns:
            The node, where it was not known before.
        """
        self._look_up(now)
        node = entry.key.removeprefix(self._keys.nodes)
        try:
            record = decode(entry.value, NodeRecord)
        except MalformedRecord as error:
            self._warn(node, error)
            self.gone(node)
            return None
        before = self._peers.get(node)
        known = before is not None and record.failure == before.record.failure
        failed_at = before.failed_at if before is not None and known else entry.modified if record.failure else 0
        self._silent.discard(node)
        self._left.discard(node)
        peer = Peer(
            id=node,
            record=record,
            joined=record.joined or entry.created,
            arrived=now if before is None else before.arrived,
            answers=answers or (before is not None and before.answers),
            failed_at=failed_at,
        )
        self._peers[node] = peer
        self._note(peer, now)
        return peer if before is None else None

    def gone(self, node: str) -> Peer | None:
        """A node's key is gone; returns the node where it may live all the same, and nobody has said otherwise."""
        peer = self._peers.pop(node, None)
        if peer is not None and peer.record.phase is NodePhase.LEAVING:
            self._left.add(node)
            return None
        return None if node in self._dead else peer

    def keep_silent(self, node: str) -> None:
        """A node without a key is taken to be alive until more is known."""
        self._silent.add(node)

    def end_silence(self, node: str) -> None:
        """A node without a key does not answer: it is gone."""
        self._silent.discard(node)

    def answers(self, node: str) -> bool:
        """A node is alive, whatever was thought of it; returns whether that is news."""
        peer = self._peers.get(node)
        news = node in self._dead or (peer is not None and not peer.answers)
        self._dead.discard(node)
        if peer is not None and not peer.answers:
            self._peers[node] = replace(peer, answers=True)
        return news

    def died(self, node: str) -> None:
        """A node's death is certain."""
        self._dead.add(node)

    # -- what follows from it

    def view(
        self, *, now: float, patient_until: float, remembered: EpochRecord | None = None, gave_way: bool = False
    ) -> View:
        """All that the leader knows.

        Args:
            now: the leader's clock.
            patient_until: until when members without a key are waited for, because the store itself was away before.
            remembered: the last epoch that this node has seen.
            gave_way: whether it has given way before to nodes that know more.
        """
        self._look_up(now)
        silent = self._silent | self._returning() if now < patient_until else self._silent
        return View(
            now=now,
            peers=self._peers.copy(),
            size=self._wanted_size(),
            epoch=self._control.epoch.record,
            since=self._control.epoch.modified,
            outcome=self._control.outcome.record,
            notice=self._notice,
            noticed_at=self._noticed_at,
            silent=frozenset(silent),
            patient_until=patient_until,
            dead=frozenset(self._dead),
            left=frozenset(self._left),
            done=frozenset(self._done),
            known=self._known,
            missing=self._missing(),
            changed_at=now if self._changed_at is None else self._changed_at,
            failed_since=self._failed_since,
            remembered=remembered,
            gave_way=gave_way,
        )

    def _returning(self) -> frozenset[str]:
        """Members without a key of which nobody knows more: they may be on their way back."""
        if self._node not in self._members and self._members.isdisjoint(self._peers):
            return frozenset()  # a newcomer has waited for them before it took the lead, and none has come
        return self._members - self._peers.keys() - self._left - self._dead

    def _look_up(self, now: float) -> None:
        """Take note of another epoch, or another notice."""
        epoch, notice = self._control.epoch.record, self._control.notice.record
        if notice is not None and notice != self._notice:
            self._notice, self._noticed_at = notice, now
        if self._changed_at is not None and epoch is self._epoch:
            return
        before, self._epoch = self._epoch, epoch
        if self._changed_at is not None and epoch == before:
            return
        self._changed_at = now
        self._members = frozenset(epoch.nodes if epoch is not None else ())
        if epoch is not None and epoch.members:
            self._last_members = epoch.nodes
        self._left &= self._members
        self._failed_since = None
        self._done = set()
        for peer in self._peers.values():
            self._note(peer, now)

    def _note(self, peer: Peer, now: float) -> None:
        """Remember what a node has told of the standing epoch: it may be gone the next moment."""
        record = peer.record
        if self._known < record.epoch < COUNT_LIMIT:
            self._known = record.epoch
        number = 0 if self._epoch is None else self._epoch.number
        if record.phase is NodePhase.DONE and record.epoch == number:
            self._done.add(peer.id)
        if record.failure is not None and record.failure.epoch == number and self._failed_since is None:
            self._failed_since = now

    def _wanted_size(self) -> SizeRecord:
        """The size of the highest generation: in the store, or brought along by a node."""
        best = self._control.size.record
        for peer in self._peers.values():
            size = peer.record.size
            if (best is None or size.generation > best.generation) and peer.record.contract == CONTRACT_VERSION:
                best = size
        return self._size if best is None else best

    def _missing(self) -> tuple[str, ...]:
        if self._members:
            return ()
        return tuple(node for node in self._last_members if node not in self._peers or node in self._dead)

    def _warn(self, node: str, error: MalformedRecord) -> None:
        """Say once that a node's key cannot be read."""
        if node not in self._warned:
            self._warned.add(node)
            logger.warning("ignoring the node %s: %s", node, error)
