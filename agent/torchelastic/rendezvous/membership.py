"""The nodes as one leader sees them, from their keys and connections: the source of its snapshots."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from torchelastic.errors import MalformedRecord
from torchelastic.protocol import PROTOCOL_VERSION, NodePhase, NodeRecord, decode
from torchelastic.rendezvous.policy.snapshot import Peer, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchelastic.protocol import NoticeRecord, RoundRecord, SizeRecord
    from torchelastic.rendezvous.run_state import RunStateWatch
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)


class Membership:
    """The nodes of a run. Nothing is awaited here, and the caller passes the time.

    Args:
        run: the run, as the leader knows it.
        dead: nodes that are known to be dead from the start.
    """

    def __init__(self, run: RunStateWatch, dead: Iterable[str] = ()) -> None:
        self._run = run
        self._peers: dict[str, Peer] = {}
        self._dead = set(dead)
        self._silent: dict[str, Peer] = {}
        self._left: set[str] = set()
        self._done: set[str] = set()
        self._warned: set[str] = set()
        self._round: RoundRecord | None = None
        self._members: frozenset[str] = frozenset()
        self._last_members: tuple[str, ...] = ()
        self._changed_at: float | None = None
        self._failed_since: float | None = None
        self._highest_round_seen = 0
        self._notice: NoticeRecord | None = None
        self._noticed_at = 0.0

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The nodes that have a key in the store."""
        return self._peers

    @property
    def silent(self) -> Mapping[str, Peer]:
        """The nodes without a key that count as alive."""
        return self._silent

    def is_member(self, node: str, *, now: float) -> bool:
        """Return whether a node is in the current round."""
        self._update_round(now)
        return node in self._members

    def is_present(self, node: str) -> bool:
        """Return whether a node has a key and is not known to be dead."""
        return node in self._peers and node not in self._dead

    def is_departure_expected(self, node: str) -> bool:
        """Return whether a node announced that it leaves, is done, or the run is over."""
        peer = self._peers.get(node)
        leaves = node in self._left or (peer is not None and peer.record.phase is NodePhase.LEAVING)
        return leaves or node in self._done or self._run.outcome is not None

    # -- observations

    def saw(self, entry: Entry, *, now: float, answers: bool) -> Peer | None:
        """Note a node's key.

        Args:
            entry: the key.
            now: the leader's clock.
            answers: whether the node is connected.

        Returns:
            The node, if it was not known before.
        """
        self._update_round(now)
        node = entry.key.removeprefix(self._run.keys.nodes)
        try:
            record = decode(entry.value, NodeRecord)
        except MalformedRecord as error:
            if node not in self._warned:
                self._warned.add(node)
                logger.warning("ignoring the node %s: %s", node, error)
            self.gone(node)
            return None
        before = self._peers.get(node)
        failed_at = entry.modified if record.failure else 0
        if before is not None and record.failure == before.record.failure:
            failed_at = before.failed_at
        self._silent.pop(node, None)
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
        """Note that a node's key is gone; return the node if it may still be alive."""
        peer = self._peers.pop(node, None)
        if peer is not None and peer.record.phase is NodePhase.LEAVING:
            self._left.add(node)
            return None
        return None if node in self._dead else peer

    def keep_silent(self, peer: Peer) -> None:
        """Count a node without a key as alive until more is known."""
        self._silent[peer.id] = peer

    def end_silence(self, node: str) -> None:
        """Note that a node without a key does not answer."""
        self._silent.pop(node, None)

    def answers(self, node: str) -> bool:
        """Note that a node is alive; return whether that is new."""
        peer = self._peers.get(node)
        new = node in self._dead or (peer is not None and not peer.answers)
        self._dead.discard(node)
        if peer is not None and not peer.answers:
            self._peers[node] = replace(peer, answers=True)
        return new

    def died(self, node: str) -> None:
        """Note that a node is certainly dead."""
        self._dead.add(node)

    # -- the snapshot

    def snapshot(
        self, *, now: float, patient_until: float, remembered: RoundRecord | None, gave_way: bool = False
    ) -> Snapshot:
        """Return a snapshot; see :class:`Snapshot` for the arguments."""
        self._update_round(now)
        members = self._members
        silent = frozenset(self._silent)
        if now < patient_until and (self._run.node in members or not members.isdisjoint(self._peers)):
            # Members without a key may be reconnecting to a store that was unavailable. A new node that leads has
            # already waited for them.
            silent = silent | (members - self._peers.keys() - self._left - self._dead)
        return Snapshot(
            now=now,
            peers=self._peers.copy(),
            size=self._wanted_size(),
            round=self._run.round,
            since=self._run.state.modified,
            outcome=self._run.outcome,
            notice=self._notice,
            noticed_at=self._noticed_at,
            silent=silent,
            patient_until=patient_until,
            dead=frozenset(self._dead),
            left=frozenset(self._left),
            done=frozenset(self._done),
            highest_round_seen=self._highest_round_seen,
            missing=() if members else tuple(node for node in self._last_members if not self.is_present(node)),
            changed_at=now if self._changed_at is None else self._changed_at,
            failed_since=self._failed_since,
            remembered=remembered,
            gave_way=gave_way,
        )

    def _update_round(self, now: float) -> None:
        """Note a new round or notice."""
        round, notice = self._run.round, self._run.notice.record
        if notice is not None and notice != self._notice:
            self._notice, self._noticed_at = notice, now
        if self._changed_at is not None and round is self._round:
            return
        before, self._round = self._round, round
        if self._changed_at is not None and round == before:
            return
        self._changed_at = now
        self._members = frozenset(() if round is None else round.nodes)
        if round is not None and round.members:
            self._last_members = round.nodes
        self._left &= self._members
        self._failed_since = None
        self._done = set()
        for peer in self._peers.values():
            self._note(peer, now)

    def _note(self, peer: Peer, now: float) -> None:
        """Remember a node's report about the current round, because its key may disappear."""
        record = peer.record
        self._highest_round_seen = max(self._highest_round_seen, record.round)
        number = 0 if self._round is None else self._round.number
        if record.phase is NodePhase.DONE and record.round == number:
            self._done.add(peer.id)
        if record.failure is not None and record.failure.round == number and self._failed_since is None:
            self._failed_since = now

    def _wanted_size(self) -> SizeRecord:
        """Return the size of the highest generation: in the store, or in a node's record."""
        best = self._run.size
        for peer in self._peers.values():
            size = peer.record.size
            if (best is None or size.generation > best.generation) and peer.record.protocol == PROTOCOL_VERSION:
                best = size
        return self._run.settings.size if best is None else best
