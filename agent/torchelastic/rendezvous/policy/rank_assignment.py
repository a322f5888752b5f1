"""Which nodes the next round takes, and their ranks.

Members come first in rank order, then newcomers by seniority. A newcomer is placed behind the last member with its own
topology key, so that neighbours have neighbouring ranks. Survivors never change their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchelastic.protocol import PROTOCOL_VERSION, NodePhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.rendezvous.policy.snapshot import Peer, Snapshot


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
    """Whether nothing that is known of a node excludes it from the next round."""
    record = peer.record
    return (
        peer.id not in snapshot.dead
        and record.phase is not NodePhase.LEAVING
        and record.name not in snapshot.size.draining
        and record.protocol == PROTOCOL_VERSION
    )


def _in_rank_order(chosen: Sequence[Peer], ranks: Mapping[str, int]) -> tuple[Peer, ...]:
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
