"""Recovery of a store that has lost data: agree on what was, before the leader decides as always.

A node's key holds the highest round number and the restart counts that it knows. A leader that remembers the lost
round commits it again, and nothing else happens. A leader that does not yields for one lease to a node that may
remember it. If no node does, the leader continues from the highest number and counts that any node knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchelastic.protocol import RoundRecord
from torchelastic.rendezvous.policy.snapshot import FormRound, GiveWay

if TYPE_CHECKING:
    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.rendezvous.policy.snapshot import Decision, Snapshot


def recover(snapshot: Snapshot, settings: RendezvousSettings) -> Decision | RoundRecord:
    """Return the round from which the run continues, or the decision that restores a round that the store has lost."""
    round, remembered, highest = snapshot.round, snapshot.remembered, snapshot.highest_round_seen
    if remembered is not None and remembered.number > snapshot.number and remembered.number >= highest:
        return FormRound(remembered)
    if round is not None and highest <= round.number:
        return round
    if highest > settings.resume.round and not snapshot.gave_way:
        return GiveWay("the store has lost a round; yielding the lead to a node that can restore it")
    resume = settings.resume
    known = round or RoundRecord(resume.round, restarts=resume.restarts, uncharged_restarts=resume.uncharged_restarts)
    records = [peer.record for peer in snapshot.peers.values()]
    return msgspec.structs.replace(
        known,
        number=max(known.number, highest),
        restarts=max([known.restarts, *(record.restarts for record in records)]),
        uncharged_restarts=max([known.uncharged_restarts, *(record.uncharged_restarts for record in records)]),
    )
