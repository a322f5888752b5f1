"""What the leader knows at one moment, and what it can decide to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torchelastic.contract import NodePhase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchelastic.contract import EpochRecord, NodeRecord, NoticeRecord, OutcomeRecord, SizeRecord

COUNT_LIMIT: Final = 10**12
"""No run has so many epochs, or notices; a larger number in a node's record is nonsense."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as the leader sees it.

    Attributes:
        id: the node's id.
        record: what it says of itself.
        joined: when it first came, as a revision of the store: seniority among newcomers.
        arrived: when the leader first saw it; seconds of the leader's clock.
        answers: whether it is known to be alive beyond its key: it holds its link, or has had time enough to.
        failed_at: the revision at which it reported its failure: the store's order of events; 0 where it reports none.
    """

    id: str
    record: NodeRecord
    joined: int
    arrived: float
    answers: bool = True
    failed_at: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """All that the leader knows at one moment.

    Attributes:
        now: seconds of the leader's clock.
        peers: the nodes whose keys stand in the store, the leader's own included.
        size: how many nodes there should be.
        epoch: the epoch that stands in the store.
        since: the store's revision at which that epoch was committed.
        remembered: the last epoch that the leader itself has seen; more than ``epoch`` only in a store that lost data.
        outcome: the run's outcome.
        notice: the last notice that was given.
        noticed_at: when this leader first saw that notice.
        silent: members without a key that still hold their link: their lease ended, they did not.
        patient_until: until when no change is made without members that are on their way back to a store that was away.
        dead: nodes whose death is certain though their key may still stand.
        left: nodes that had said that they leave, and whose key is gone.
        done: members that were seen done with this epoch, also if they are gone by now.
        known: the highest epoch that any node was seen to know of, though it may be gone now; what the nodes know that
            are there is added to it. A number that could not be counted on from is nobody's knowledge.
        missing: nodes of the last epoch that had members which are not there now.
        changed_at: when the epoch in the store was first seen.
        failed_since: when the first failure of this epoch was first seen; None where there is none.
        gave_way: whether this leader has given way before to nodes that know more.
        ranks: the standing epoch's members with their ranks, from ``epoch``.
    """

    now: float
    peers: Mapping[str, Peer]
    size: SizeRecord
    epoch: EpochRecord | None = None
    since: int = 0
    remembered: EpochRecord | None = None
    outcome: OutcomeRecord | None = None
    notice: NoticeRecord | None = None
    noticed_at: float = 0.0
    silent: frozenset[str] = frozenset()
    patient_until: float = 0.0
    dead: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    known: int = 0
    missing: tuple[str, ...] = ()
    changed_at: float = 0.0
    failed_since: float | None = None
    gave_way: bool = False
    ranks: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = () if self.epoch is None else self.epoch.nodes
        object.__setattr__(self, "ranks", {node: rank for rank, node in enumerate(nodes)})
        numbers = (peer.record.epoch for peer in self.peers.values())
        object.__setattr__(self, "known", max((n for n in numbers if self.known < n < COUNT_LIMIT), default=self.known))

    @property
    def incomplete(self) -> bool:
        """Whether a member has no key though it is not known to be gone."""
        return not self.silent.isdisjoint(self.ranks)

    def leaves(self, node: str) -> bool:
        """Whether the node is on its way out, or gone after having said so."""
        peer = self.peers.get(node)
        return node in self.left if peer is None else peer.record.phase is NodePhase.LEAVING

    def cut_off(self, node: str) -> bool:
        """Whether the node has stopped its workers because it reached nobody."""
        peer = self.peers.get(node)
        number = 0 if self.epoch is None else self.epoch.number
        return peer is not None and peer.record.phase is NodePhase.CUT_OFF and peer.record.epoch >= number

    def finishing(self, node: str) -> bool:
        """Whether workers of the node have ended with 0."""
        peer = self.peers.get(node)
        return node in self.done or (peer is not None and peer.record.phase in (NodePhase.FINISHING, NodePhase.DONE))


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing, until something changes or the time has come.

    Attributes:
        until: when to ask again though nothing changed; None for never.
        why: in words, for the log; empty where all is well.
    """

    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class FormEpoch:
    """Commit this epoch in the place of the one that stands."""

    record: EpochRecord


@dataclass(frozen=True, slots=True)
class GiveNotice:
    """Say that the standing epoch is about to change, or (with 0 seconds) that it is not after all."""

    record: NoticeRecord


@dataclass(frozen=True, slots=True)
class EndRun:
    """Commit this outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Give the lead to a node that knows more, for a lease's time.

    Attributes:
        why: in words, for the log.
    """

    why: str


Decision = Hold | FormEpoch | GiveNotice | EndRun | GiveWay
