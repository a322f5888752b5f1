"""The leader's view of the run, the candidates of the next round, and the possible decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchelastic.protocol import PROTOCOL_VERSION, NodePhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.protocol import NodeRecord, NoticeRecord, OutcomeRecord, RoundRecord, SizeRecord


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as the leader sees it.

    Attributes:
        id: the node's id.
        record: its own record.
        joined: when it first joined, as a revision of the store: its seniority.
        arrived: when the leader first saw it, on the leader's clock.
        answers: whether it is known to be alive: it is connected, or has had time enough to connect.
        failed_at: the revision at which it reported its failure: the store's order of events; 0 without a failure.
    """

    id: str
    record: NodeRecord
    joined: int
    arrived: float
    answers: bool = True
    failed_at: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The leader's view of the run at one moment.

    Attributes:
        now: the leader's clock, in seconds.
        peers: the nodes that have a key in the store, including the leader.
        size: how many nodes there should be.
        round: the round in the store.
        since: the store's revision at which that round was committed.
        remembered: the last round that the leader itself has seen; later than ``round`` if the store lost data.
        outcome: the run's outcome.
        notice: the last notice.
        noticed_at: when this leader first saw that notice.
        silent: members without a key that still answer: their lease expired, but they live.
        patient_until: until when the leader waits for members that return to a store that was away.
        dead: nodes that are certainly dead, though they may still have a key.
        left: nodes that announced that they leave, and whose key is gone.
        done: members that were seen done with this round, including those that are gone.
        highest_round_seen: the highest round number that any node has known.
        missing: members of the last round with members that are not present now.
        changed_at: when the leader first saw the round in the store.
        failed_since: when the first failure of this round was first seen; None without a failure.
        gave_way: whether this leader has yielded to nodes that know more.
        ranks: the members of ``round`` with their ranks.
    """

    now: float
    peers: Mapping[str, Peer]
    size: SizeRecord
    round: RoundRecord | None = None
    since: int = 0
    remembered: RoundRecord | None = None
    outcome: OutcomeRecord | None = None
    notice: NoticeRecord | None = None
    noticed_at: float = 0.0
    silent: frozenset[str] = frozenset()
    patient_until: float = 0.0
    dead: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    highest_round_seen: int = 0
    missing: tuple[str, ...] = ()
    changed_at: float = 0.0
    failed_since: float | None = None
    gave_way: bool = False
    ranks: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = () if self.round is None else self.round.nodes
        object.__setattr__(self, "ranks", {node: rank for rank, node in enumerate(nodes)})
        highest = max((peer.record.round for peer in self.peers.values()), default=0)
        object.__setattr__(self, "highest_round_seen", max(self.highest_round_seen, highest))

    @property
    def number(self) -> int:
        """The number of the round in the store; 0 without one."""
        return 0 if self.round is None else self.round.number

    @property
    def incomplete(self) -> bool:
        """Whether a member has no key although it is not known to be gone."""
        return not self.silent.isdisjoint(self.ranks)

    def is_present(self, node: str) -> bool:
        """Return whether the node has a key and is not known to be dead."""
        return node in self.peers and node not in self.dead

    def is_leaving(self, node: str) -> bool:
        """Return whether the node is leaving, or is gone after it announced that."""
        peer = self.peers.get(node)
        return node in self.left if peer is None else peer.record.phase is NodePhase.LEAVING

    def is_partitioned(self, node: str) -> bool:
        """Return whether the node has stopped its workers because it reached neither the store nor a peer."""
        peer = self.peers.get(node)
        return peer is not None and peer.record.phase is NodePhase.PARTITIONED and peer.record.round >= self.number

    def is_finishing(self, node: str) -> bool:
        """Return whether workers of the node have exited with 0."""
        peer = self.peers.get(node)
        return node in self.done or (peer is not None and peer.record.phase in (NodePhase.FINISHING, NodePhase.DONE))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes that could be in the next round.

    Attributes:
        ordered: all of them, by their claim to a place.
        target: how many of them the round takes.
        chosen: those that it takes, in rank order.
    """

    ordered: tuple[Peer, ...]
    target: int
    chosen: tuple[Peer, ...]


def candidates(snapshot: Snapshot) -> Candidates:
    """Return the nodes that could be in the next round now."""
    ranks = snapshot.ranks
    fit = [peer for peer in snapshot.peers.values() if (peer.answers or peer.id in ranks) and may_join(peer, snapshot)]
    last = len(ranks)
    fit.sort(key=lambda peer: (ranks.get(peer.id, last), peer.joined, peer.id))
    target = snapshot.size.target
    return Candidates(tuple(fit), target, _in_rank_order(fit[:target], ranks))


def may_join(peer: Peer, snapshot: Snapshot) -> bool:
    """Return whether nothing that is known of a node excludes it from the next round."""
    record = peer.record
    return (
        peer.id not in snapshot.dead
        and record.phase is not NodePhase.LEAVING
        and record.name not in snapshot.size.draining
        and record.protocol == PROTOCOL_VERSION
    )


def _in_rank_order(chosen: Sequence[Peer], ranks: Mapping[str, int]) -> tuple[Peer, ...]:
    """Members in rank order; a newcomer behind the last member with its topology key, or else behind all members."""
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
    return tuple(ordered)


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing until something changes.

    Attributes:
        until: when to decide again even without a change; None for never.
        why: the reason, for the log; empty if all is well.
    """

    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class FormRound:
    """Commit this round as the current one."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class GiveNotice:
    """Give notice that the current round is about to change, or (with 0 seconds) withdraw the notice."""

    record: NoticeRecord


@dataclass(frozen=True, slots=True)
class EndRun:
    """Commit this outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Give up the lead for one lease, in favour of nodes that know a later round.

    Attributes:
        why: the reason, for the log.
    """

    why: str


Decision = Hold | FormRound | GiveNotice | EndRun | GiveWay
