"""Who would be in the next epoch, and in which order: the ranks.

Whom it takes goes by rank and then by seniority: members first, then whoever came first. The order among those that are
taken goes by place: a newcomer stands behind the last member of its own place, so that neighbours have neighbouring
ranks, and newcomers of one place stay together. Survivors never change their order, whatever their places are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchelastic.contract import CONTRACT_VERSION, NodePhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.rendezvous.view import Peer, View


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes that could be in the next epoch.

    Attributes:
        ordered: all of them, by their claim to be in it.
        target: how many of them it takes.
        chosen: those that it takes, in rank order.
    """

    ordered: tuple[Peer, ...]
    target: int
    chosen: tuple[Peer, ...]


def candidates(view: View) -> Candidates:
    """Who could be in the next epoch now."""
    ranks = view.ranks
    fit = [peer for peer in view.peers.values() if (peer.answers or peer.id in ranks) and may_join(peer, view)]
    last = len(ranks)
    fit.sort(key=lambda peer: (ranks.get(peer.id, last), peer.joined, peer.id))
    target = view.size.target
    return Candidates(tuple(fit), target, _arranged(fit[:target], ranks))


def may_join(peer: Peer, view: View) -> bool:
    """Whether nothing that is known of a node keeps it from the next epoch, if it is alive."""
    record = peer.record
    return (
        peer.id not in view.dead
        and record.phase is not NodePhase.LEAVING
        and record.name not in view.size.going
        and record.contract == CONTRACT_VERSION
    )


def _arranged(chosen: Sequence[Peer], ranks: Mapping[str, int]) -> tuple[Peer, ...]:
    """The same nodes with newcomers beside those of their own place; survivors stand first, in rank order."""
    survivors = [peer for peer in chosen if peer.id in ranks]
    newcomers: dict[str, list[Peer]] = {}
    for peer in chosen[len(survivors) :]:
        newcomers.setdefault(peer.record.place or f"\0{peer.id}", []).append(peer)
    last_of = {peer.record.place: peer for peer in survivors}
    arranged: list[Peer] = []
    for peer in survivors:
        arranged.append(peer)
        if last_of[peer.record.place] is peer:
            arranged += newcomers.pop(peer.record.place, ())
    for group in newcomers.values():
        arranged += group
    return tuple(arranged)
