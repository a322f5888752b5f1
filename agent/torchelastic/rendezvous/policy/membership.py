"""The run and its nodes as the leader sees them, and their descriptions in messages."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from torchelastic.errors import MalformedRecord
from torchelastic.protocol.codec import LogLimit, decode
from torchelastic.protocol.records import NUMBER_STEP, PROTOCOL_VERSION, NodePhase, NodeRecord, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchelastic.protocol.records import FailureRecord, NoticeRecord, OutcomeRecord, RoundRecord, SizeRecord
    from torchelastic.rendezvous.run_watch import RunWatch
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)

MAX_NAMES: Final = 8
"""Maximum number of nodes that a message names; if there are more, it gives their number."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as the leader sees it.

    Attributes:
        id: the node's id.
        record: the node's record.
        joined_revision: the store's revision at which the node first joined, which defines its seniority.
        arrived: when the leader first saw that the node can start workers, on the leader's clock.
        answers: whether the node counts as alive: it was connected, or has had enough time to connect.
        failed_at: the revision at which the node reported its failure, which orders failures; 0 without a failure.
    """

    id: str
    record: NodeRecord
    joined_revision: int
    arrived: float
    answers: bool = True
    failed_at: int = 0


@dataclass
class Membership:
    """The run and its nodes as the leader sees them, from the nodes' keys and connections.

    The methods do not wait for anything, and the caller passes the time.

    Attributes:
        size: the desired number of nodes and its limits.
        peers: the nodes that have a key in the store, including the leader.
        now: the leader's clock, in seconds.
        round: the round in the store.
        since: the store's revision at which ``round`` or ``outcome`` was committed.
        remembered: the last round that the leader itself has seen; later than ``round`` if the store lost data.
        outcome: the run's outcome.
        notice: the last notice.
        noticed_at: when this leader first saw ``notice``.
        expired: nodes without a key that still answer: their lease expired, but they are alive.
        awaited: members without a key that may still reconnect after the store was unreachable.
        wait_until: the time until which the leader waits for the awaited members.
        dead: nodes that are known to be dead, although they may still have a key.
        left: nodes that announced that they leave, and whose key is gone.
        done: members that have reported the phase DONE in this round, including those that are gone.
        highest_round_seen: the highest round number that any node has reported.
        last_members: the members of the last round that had members.
        changed_at: when the leader first saw the round in the store.
        failed_since: when the leader saw the first failure of this round; None without a failure.
        appeared_at: when the leader last saw a new node, which may still be starting.
        resigned: whether this leader has yielded to nodes that know a later round.
        ranks: the members of ``round`` with their ranks.
    """

    size: SizeRecord
    peers: dict[str, Peer] = field(default_factory=dict)
    now: float = 0.0
    round: RoundRecord | None = None
    since: int = 0
    remembered: RoundRecord | None = None
    outcome: OutcomeRecord | None = None
    notice: NoticeRecord | None = None
    noticed_at: float = 0.0
    expired: dict[str, Peer] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    wait_until: float = 0.0
    dead: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    highest_round_seen: int = 0
    last_members: tuple[str, ...] = ()
    changed_at: float = 0.0
    failed_since: float | None = None
    appeared_at: float = 0.0
    resigned: bool = False
    ranks: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ranks = _ranks(self.round)
        self._warned: set[str] = set()
        self._log_limit = LogLimit()

    @property
    def number(self) -> int:
        """The number of the round in the store; 0 without one."""
        return 0 if self.round is None else self.round.number

    @property
    def current_notice(self) -> NoticeRecord | None:
        """The notice of the current round, if one was given and not withdrawn."""
        notice = self.notice
        return notice if notice is not None and notice.round == self.number and notice.seconds > 0 else None

    def is_present(self, node: str) -> bool:
        """Return whether the node has a key and is not known to be dead."""
        return node in self.peers and node not in self.dead

    @property
    def incomplete(self) -> bool:
        """Whether a member without a key may still be alive."""
        return not (self.ranks.keys().isdisjoint(self.expired) and self.ranks.keys().isdisjoint(self.awaited))

    def may_return(self, node: str) -> bool:
        """Return whether the node has no key, but counts as alive."""
        return node in self.expired or node in self.awaited

    def is_lost(self, node: str) -> bool:
        """Return whether a member cannot continue. A lease that expired while its node answers is not a loss."""
        if node in self.dead or self.is_partitioned(node):
            return True
        return node not in self.peers and not self.may_return(node)

    def may_join(self, peer: Peer) -> bool:
        """Return whether the node is eligible for the next round."""
        record = peer.record
        return (
            peer.id not in self.dead
            and not record.starting
            and record.phase is not NodePhase.LEAVING
            and record.name not in self.size.draining
            and record.protocol == PROTOCOL_VERSION
        )

    def is_leaving(self, node: str) -> bool:
        """Return whether the node is leaving, or is gone after it announced that it leaves."""
        peer = self.peers.get(node)
        return node in self.left if peer is None else peer.record.phase is NodePhase.LEAVING

    def is_departure_expected(self, node: str) -> bool:
        """Return whether a node announced that it leaves, or is done, or whether the run is over."""
        return self.is_leaving(node) or node in self.done or self.outcome is not None

    def is_partitioned(self, node: str) -> bool:
        """Return whether the node has stopped its workers because it reached neither the store nor a peer."""
        peer = self.peers.get(node)
        return peer is not None and peer.record.phase is NodePhase.PARTITIONED and peer.record.round >= self.number

    def is_finishing(self, node: str) -> bool:
        """Return whether workers of the node have exited with 0."""
        peer = self.peers.get(node)
        return node in self.done or (peer is not None and peer.record.phase in (NodePhase.FINISHING, NodePhase.DONE))

    # -- observations

    def update(
        self,
        run: RunWatch,
        *,
        now: float,
        wait_until: float,
        remembered: RoundRecord | None,
        resigned: bool = False,
    ) -> None:
        """Note the state of the run and what the leader knows, before a decision."""
        self.note_run(run, now=now)
        self.wait_until, self.remembered, self.resigned = wait_until, remembered, resigned
        self.size = self._wanted_size(run)
        members = self.ranks.keys()
        # Members may still be reconnecting to the store. If none has returned, a leader that is not a member has waited
        # for them before it took the lead.
        waits = now < wait_until and (run.node in members or not members.isdisjoint(self.peers))
        self.awaited = members - self.peers.keys() - self.left - self.dead if waits else set()

    def note_run(self, run: RunWatch, *, now: float) -> None:
        """Note a new round or notice, and an outcome."""
        round, notice = run.round, run.notice.record
        self.now, self.since, self.outcome = now, run.state.mod_revision, run.outcome
        if notice is not None and notice != self.notice:
            self.notice, self.noticed_at = notice, now
        if round is self.round or round == self.round:
            return
        self.round, self.changed_at, self.failed_since = round, now, None
        self.ranks = _ranks(round)
        if self.ranks:
            self.last_members = tuple(self.ranks)
        self.left &= self.ranks.keys()
        self.done = set()
        for peer in self.peers.values():
            self._note(peer)

    def note_key(self, node: str, entry: Entry, *, answers: bool) -> Peer | None:
        """Note a node's key, and whether the node is connected; return the node if it is new.

        Call :meth:`note_run` first.
        """
        try:
            record = decode(entry.value, NodeRecord)
        except MalformedRecord as error:
            if node not in self._warned and self._log_limit.allows():
                self._warned.add(node)
                logger.warning("ignoring the node %s: %s", node, error)
            self.note_deleted_key(node)
            return None
        before = self.peers.get(node)
        failed_at = entry.mod_revision if record.failure else 0
        if before is not None and record.failure == before.record.failure:
            failed_at = before.failed_at
        self.expired.pop(node, None)
        self.left.discard(node)
        if before is None:
            self.appeared_at = self.now
        peer = self.peers[node] = Peer(
            id=node,
            record=record,
            joined_revision=record.joined_revision or entry.create_revision,
            arrived=self.now if before is None or before.record.starting else before.arrived,
            answers=answers or (before is not None and before.answers),
            failed_at=failed_at,
        )
        self._note(peer)
        return peer if before is None else None

    def note_deleted_key(self, node: str) -> Peer | None:
        """Note that a node's key is gone; return the node if it may still be alive."""
        peer = self.peers.pop(node, None)
        if peer is not None and peer.record.phase is NodePhase.LEAVING:
            self.left.add(node)
            return None
        return None if node in self.dead else peer

    def note_alive(self, node: str) -> bool:
        """Note that a node is alive; return whether that is new."""
        peer = self.peers.get(node)
        new = node in self.dead or (peer is not None and not peer.answers)
        self.dead.discard(node)
        if peer is not None and not peer.answers:
            self.peers[node] = replace(peer, answers=True)
        return new

    def _note(self, peer: Peer) -> None:
        """Remember a node's report about the current round, because its key may disappear."""
        record = peer.record
        if record.round <= self.number + NUMBER_STEP:
            self.highest_round_seen = max(self.highest_round_seen, record.round)
        if record.phase is NodePhase.DONE and record.round == self.number:
            self.done.add(peer.id)
        if record.failure is not None and record.failure.round == self.number and self.failed_since is None:
            self.failed_since = self.now

    def _wanted_size(self, run: RunWatch) -> SizeRecord:
        """Return the size with the highest generation of those in the store and in the nodes' records."""
        best, highest = run.size, run.settings.size.generation + NUMBER_STEP
        for peer in self.peers.values():
            size = peer.record.size
            if peer.record.protocol != PROTOCOL_VERSION or size.generation > highest:
                continue
            if best is None or size.generation > best.generation:
                best = size
        return run.settings.size if best is None else best


def _ranks(round: RoundRecord | None) -> dict[str, int]:
    return {} if round is None else {node: rank for rank, node in enumerate(round.nodes)}


def in_rank_order(chosen: Sequence[Peer], ranks: Mapping[str, int]) -> list[Peer]:
    """Return the nodes in rank order; a newcomer follows the last member with its topology key, or else all members.

    Nodes with ``--node-rank`` come first, in the order of their numbers; nodes with equal numbers keep their order.
    ``ranks`` are those of the current round, whose members come first in ``chosen``, in rank order.
    """
    survivors = [peer for peer in chosen if peer.id in ranks]
    newcomers: dict[str, list[Peer]] = {}
    for peer in chosen[len(survivors) :]:
        newcomers.setdefault(peer.record.topology_key or f"\0{peer.id}", []).append(peer)
    last_of = {peer.record.topology_key: peer for peer in survivors}
    ordered: list[Peer] = []
    for peer in survivors:
        ordered.append(peer)
        if last_of[peer.record.topology_key] is peer:
            ordered += newcomers.pop(peer.record.topology_key, ())
    for group in newcomers.values():
        ordered += group
    return sorted(ordered, key=lambda peer: math.inf if peer.record.node_rank is None else peer.record.node_rank)


# -- messages


def departures(nodes: Iterable[str], membership: Membership) -> str:
    """Return how members left: "a and b left and c died"."""
    by_fate: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        by_fate.setdefault(_reason_and_verb(node, membership), []).append(node)
    return listed(f"{named(some)} {fate[len(some) > 1]}" for fate, some in by_fate.items())


def _reason_and_verb(node: str, membership: Membership) -> tuple[str, str]:
    if membership.is_leaving(node):
        return "left", "left"
    if membership.is_partitioned(node):
        return "was cut off", "were cut off"
    return ("died", "died") if node in membership.dead else ("is gone", "are gone")


def joined(newcomers: Sequence[Peer]) -> str:
    """Return which nodes joined."""
    return f"{named([peer.id for peer in newcomers])} joined"


def describe(failure: FailureRecord) -> str:
    """Describe a failure: "rank 3 on digits-2: ValueError: …"."""
    return f"rank {failure.rank} on {name_of(failure.node)}: {failure.message or f'exit code {failure.exit_code}'}"


def named(nodes: Sequence[str]) -> str:
    """Return the nodes' names, or their number if they are many."""
    return count(len(nodes), "node") if len(nodes) > MAX_NAMES else listed(map(name_of, nodes))


def listed(parts: Iterable[str]) -> str:
    """Join the parts of a list: "a, b and c"."""
    *items, last = parts
    return f"{', '.join(items)} and {last}" if items else last


def count(number: int, noun: str) -> str:
    """Return a number of things: "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """Return "is" or "are", the verb for this number."""
    return "is" if number == 1 else "are"
