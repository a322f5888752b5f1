"""What comes of a decision: the next epoch, an epoch without members, or the end of a run that has waited in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchelastic.contract import EpochReason, EpochRecord, Member, OutcomeRecord, OutcomeState, bracketed, shorten
from torchelastic.rendezvous.view import Decision, EndRun, FormEpoch, Hold
from torchelastic.rendezvous.words import waiting_for

if TYPE_CHECKING:
    from torchelastic.rendezvous.placing import Candidates
    from torchelastic.rendezvous.view import View
    from torchelastic.settings import RendezvousSettings

LONGEST_SENTENCE: Final = 12_000
"""Characters of a cause or a message: the texts within it were bounded one by one."""


def too_few(view: View, before: EpochRecord, them: Candidates, since: float, settings: RendezvousSettings) -> Decision:
    """Wait for more nodes, and say for whom; after the join timeout, end the run with that sentence.

    Args:
        view: what the leader knows.
        before: the last epoch.
        them: who is there.
        since: when the waiting began.
        settings: the rules.
    """
    why = waiting_for(view, them, view.missing)
    if view.now < since + settings.join_timeout:
        return Hold(since + settings.join_timeout, why)
    return EndRun(
        OutcomeRecord(
            state=OutcomeState.FAILED,
            epoch=before.number,
            restarts=before.restarts,
            message=f"no more nodes came within {settings.join_timeout:g} s: {why}",
        )
    )


def pause(view: View, before: EpochRecord, them: Candidates, reason: EpochReason, cause: str) -> Decision:
    """An epoch without members: those that are left stop their workers and wait."""
    return FormEpoch(
        EpochRecord(
            number=_next_number(view, before),
            restarts=before.restarts,
            early=before.early,
            free=before.free,
            wanted=view.size.wanted,
            reason=reason,
            cause=shorten(f"{cause}; {waiting_for(view, them)}", LONGEST_SENTENCE),
            failure=before.failure,
        )
    )


def _next_number(view: View, before: EpochRecord) -> int:
    return max(before.number, view.known) + 1


def _starts_anew_for_free(before: EpochRecord, reason: EpochReason) -> bool:
    """Whether workers that ran before start anew, and no failure did it: what that costs was settled when it came."""
    failed = reason is EpochReason.WORKER_FAILED or (
        before.reason is EpochReason.WORKER_FAILED and not before.members  # too few were left to go on at once
    )
    return before.number > 0 and not failed


def form(view: View, before: EpochRecord, them: Candidates, reason: EpochReason, cause: str) -> Decision:
    """The next epoch with the chosen nodes, its store on one of them whose port no epoch is known to use."""
    # Who has said that it knows the standing epoch has renewed its offer since.
    standing = 0 if view.epoch is None else view.epoch.number
    hosts = [peer for peer in them.chosen if peer.record.store and peer.record.epoch >= standing]
    # Of an epoch that the store has lost, one that was never told may have been the host: workers would still look for
    # that epoch's store at its port. So whoever knows the latest epoch comes first.
    host = max(hosts, key=lambda peer: min(peer.record.epoch, view.known), default=None)
    if host is None:
        return Hold(why="waiting for a node that can serve the next epoch's store")
    return FormEpoch(
        EpochRecord(
            number=_next_number(view, before),
            members=tuple(Member(peer.id, peer.record.address, peer.record.workers) for peer in them.chosen),
            store=f"{bracketed(host.record.address)}:{host.record.store}",
            restarts=before.restarts,
            early=before.early,
            free=before.free + _starts_anew_for_free(before, reason),
            wanted=view.size.wanted,
            reason=reason,
            cause=shorten(cause, LONGEST_SENTENCE),
            failure=before.failure,
        )
    )
