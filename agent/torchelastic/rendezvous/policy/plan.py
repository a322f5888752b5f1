"""The leader's decision, as a pure function of a snapshot.

The leader calls :func:`plan` after every change and carries out the result. The rules, in order:

1. A run that has an outcome is over.
2. A store that lost data is restored.
3. All workers of all members exited with 0: the run has succeeded.
4. A worker failed in a way that is configured as non-retryable: the run has failed.
5. A member is lost, or a worker failed: the next round forms at once with the nodes that are present. A failure is
   charged to the run's restarts; a change of membership is free, and so is a failure that a lost member explains or
   whose exit code is configured as uncharged.
6. A member leaves, the size has changed, or a node joins: the next round forms when the newcomers have been gathered
   and those who asked for notice have had it. It takes the desired number of nodes; others wait as spares.
7. Too few nodes are left: a round without members says so, and all wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.protocol import (
    FailureKind,
    FailureRecord,
    Member,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
    bracketed,
    shorten,
)
from torchelastic.rendezvous.policy.messages import (
    are,
    count,
    departures,
    describe,
    joined,
    named,
    times,
    waiting_for,
)
from torchelastic.rendezvous.policy.notices import after_notice, current_notice, requested_seconds, withdraw_notice
from torchelastic.rendezvous.policy.snapshot import (
    Candidates,
    Decision,
    EndRun,
    FormRound,
    GiveWay,
    Hold,
    Peer,
    Snapshot,
    candidates,
    may_join,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchelastic.config.settings import RendezvousSettings

CAUSE_WINDOW: Final = 0.1
"""Seconds that a failure that looks like a consequence waits for its cause: a peer's death may be reported a few
milliseconds after the broken collective that it causes."""

REPORT_WINDOW: Final = 1.0
"""Seconds that a run that is about to fail waits for members that have not reported their failure yet."""

MAX_KEPT_MESSAGE: Final = 1024
"""Characters of a failure's message that later rounds carry."""

MAX_SENTENCE: Final = 12_000
"""Characters of a cause or an outcome's message."""

MAX_DEBOUNCE_FACTOR: Final = 10
"""Upper bound on join debouncing, as a multiple of ``join_debounce``."""

STORE_LOST_ROUND: Final = "the store had lost a round that nodes still know"


def plan(snapshot: Snapshot, settings: RendezvousSettings) -> Decision:
    """Return what the leader should do now."""
    if snapshot.outcome is not None:
        return Hold()
    round = _recover(snapshot, settings)
    if not isinstance(round, RoundRecord):
        return round
    if snapshot.round is None:
        return _form_first(snapshot, round, settings)
    if round.number > snapshot.number:
        # No node has restored the lost round, so form a later one with all nodes.
        return _form_or_pause(snapshot, round, candidates(snapshot), RoundReason.NODE_LOST, STORE_LOST_ROUND)
    if snapshot.now - snapshot.changed_at >= settings.crash_loop_seconds:
        round = msgspec.structs.replace(round, early_failures=0)
    if not round.members:
        return _leave_pause(snapshot, round, settings)
    if all(node in snapshot.done for node in snapshot.ranks):
        return EndRun(OutcomeRecord(OutcomeState.SUCCEEDED, round.number, round.restarts))
    return _continue(snapshot, round, settings)


def _recover(snapshot: Snapshot, settings: RendezvousSettings) -> Decision | RoundRecord:
    """Return the round from which the run continues, or the decision that restores a round that the store has lost.

    A node's key holds the highest round number and the restart counts that it knows. A leader that remembers the lost
    round commits it again. A leader that does not yields for one lease to a node that may remember it. If no node does,
    the leader continues from the highest number and counts that any node knows.
    """
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


def _continue(snapshot: Snapshot, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Decide about a round that trains, or trained until just now."""
    failures = _failures(snapshot, snapshot.ranks)
    if any(failure.non_retryable and failure.kind is FailureKind.PROGRAM for _, failure in failures):
        return _after_failure(snapshot, round, failures, settings)
    needed = [node for node in snapshot.ranks if not _is_dispensable(node, snapshot, round)]
    lost = [node for node in needed if _is_lost(node, snapshot)]
    leaving = [node for node in needed if snapshot.is_present(node) and snapshot.is_leaving(node)]
    if (lost or leaving or failures) and snapshot.incomplete and snapshot.now < snapshot.patient_until:
        # Without them the round would lose live members that may know a later round than the store.
        return Hold(snapshot.patient_until, "the store was away; waiting for the members to come back to it")
    if lost:
        return _continue_without(snapshot, round, [*lost, *leaving], settings)
    if leaving:
        staying = _failures(snapshot, set(snapshot.ranks).difference(leaving))
        if staying and current_notice(snapshot) is not None and root_cause(staying).kind is FailureKind.PROGRAM:
            return _after_failure(snapshot, round, staying, settings)  # the leaving members had not stopped yet
        if failures:
            return _continue_without(snapshot, round, leaving, settings)
        return _after_departure(snapshot, round, leaving, settings)
    if failures:
        return _after_failure(snapshot, round, failures, settings)
    return _change_membership(snapshot, round, settings)


def root_cause(failures: Iterable[tuple[int, FailureRecord]]) -> FailureRecord:
    """Return the failure that explains the others: by kind, then non-retryable first, then by the store's order.

    Args:
        failures: at least one, each with the revision at which it was reported.
    """
    kinds = list(FailureKind)
    return min(failures, key=lambda each: (kinds.index(each[1].kind), not each[1].non_retryable, each[0]))[1]


def _is_dispensable(node: str, snapshot: Snapshot, round: RoundRecord) -> bool:
    """Return whether a member may leave without a loss: its workers have exited and it does not serve the TCPStore."""
    host = round.store.rpartition(":")[0]
    return node in snapshot.done and host != bracketed(round.members[snapshot.ranks[node]].address)


def _is_lost(node: str, snapshot: Snapshot) -> bool:
    """Return whether a member cannot go on. A lease that expired while its node answers is not a loss."""
    if node in snapshot.dead or snapshot.is_partitioned(node):
        return True
    return node not in snapshot.peers and node not in snapshot.silent


def _failures(snapshot: Snapshot, members: Iterable[str]) -> list[tuple[int, FailureRecord]]:
    """Return these members' failures in this round, each with its position in the store's order."""
    peers = (snapshot.peers[node] for node in members if node in snapshot.peers)
    return [
        (peer.failed_at, peer.record.failure)
        for peer in peers
        if peer.record.failure is not None and peer.record.failure.round == snapshot.number
    ]


# -- beginnings


def _form_first(snapshot: Snapshot, before: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Form a round without survivors: of all desired nodes, or after the last call of those that are present."""
    them = candidates(snapshot)
    since = min((peer.arrived for peer in them.ordered), default=snapshot.now)
    here = len(them.ordered)
    if here >= them.target:
        return _form(snapshot, before, them, RoundReason.NODE_JOINED, joined(them.chosen))
    # Nodes that know a round that the store has lost may be on their way back for one lease.
    window = settings.last_call_timeout if snapshot.round else max(settings.last_call_timeout, settings.lease)
    if here < snapshot.size.min:
        is_lost = snapshot.round is None and snapshot.highest_round_seen > settings.resume.round
        if not is_lost or not here:
            return _too_few(snapshot, before, them, since, settings)
        if snapshot.now < since + window:
            return Hold(since + window, waiting_for(snapshot, them))
        # Workers of an older round than the lost one may still run.
        return _pause(snapshot, before, them, RoundReason.NODE_LOST, STORE_LOST_ROUND)
    if snapshot.now >= since + window:
        return _form(snapshot, before, them, RoundReason.NODE_JOINED, joined(them.chosen))
    return Hold(
        since + window,
        f"{count(here, 'node')} of {them.target} {are(here)} there; waiting for more until the last call ends",
    )


def _start_over(snapshot: Snapshot, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Form a round as at the start of the run, because no member is left.

    If the run id may be reused, this is another run with its whole budget; the round numbers continue.
    """
    round = msgspec.structs.replace(round, early_failures=0)
    if settings.unique_run:
        return _form_first(snapshot, round, settings)
    change = _form_first(snapshot, msgspec.structs.replace(round, restarts=0, failure=None), settings)
    if isinstance(change, FormRound):
        return FormRound(msgspec.structs.replace(change.record, uncharged_restarts=0))
    return change


def _leave_pause(snapshot: Snapshot, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Form a round with members as soon as enough nodes are present."""
    them = candidates(snapshot)
    if all(peer.joined > snapshot.since for peer in them.ordered):
        return _start_over(snapshot, round, settings)  # the waiting nodes are gone
    if len(them.ordered) < snapshot.size.min:
        return _too_few(snapshot, round, them, snapshot.changed_at, settings)
    return _debounced(snapshot, round, them, them.ordered, settings)


# -- losses and failures


def _continue_without(
    snapshot: Snapshot, round: RoundRecord, going: Sequence[str], settings: RendezvousSettings
) -> Decision:
    """Continue with the present nodes after members are lost or leave, without waiting for a replacement."""
    them = candidates(snapshot)
    if _nobody_stays(snapshot):
        return _start_over(snapshot, round, settings)
    if snapshot.now < (until := _wait_for_spares(snapshot, round, them, settings)):
        return Hold(until)
    reason = RoundReason.NODE_LEFT if all(map(snapshot.is_leaving, going)) else RoundReason.NODE_LOST
    return _form_or_pause(snapshot, round, them, reason, departures(going, snapshot))


def _wait_for_spares(snapshot: Snapshot, round: RoundRecord, them: Candidates, settings: RendezvousSettings) -> float:
    """Return how long to wait for spares that have not connected to a new leader yet, which avoids a second change."""
    if len(them.ordered) >= them.target:
        return 0.0
    mute = (peer for peer in snapshot.peers.values() if not peer.answers and peer.id not in snapshot.ranks)
    known = [peer.arrived for peer in mute if peer.record.round == round.number and may_join(peer, snapshot)]
    return max(known) + MAX_DEBOUNCE_FACTOR * settings.join_debounce if known else 0.0


def _nobody_stays(snapshot: Snapshot) -> bool:
    """Return whether no member of the round is present any more, except those that leave."""
    return not any(
        node in snapshot.silent or (snapshot.is_present(node) and not snapshot.is_leaving(node))
        for node in snapshot.ranks
    )


def _after_failure(
    snapshot: Snapshot, round: RoundRecord, failures: Sequence[tuple[int, FailureRecord]], settings: RendezvousSettings
) -> Decision:
    """Charge a worker's failure unless it is uncharged, and restart the workers or end the run."""
    failure = root_cause(failures)
    since = snapshot.now if snapshot.failed_since is None else snapshot.failed_since
    all_reported = len(failures) == len(round.members)
    if failure.kind is not FailureKind.PROGRAM and snapshot.now < since + CAUSE_WINDOW and not all_reported:
        return Hold(since + CAUSE_WINDOW)
    early = round.early_failures + 1 if failure.uptime < settings.crash_loop_seconds else 0
    if why := _why_run_ends(failure, round, early, settings):
        explained = failure.non_retryable and failure.kind is FailureKind.PROGRAM
        if not explained and not all_reported and snapshot.now < since + REPORT_WINDOW:
            return Hold(since + REPORT_WINDOW)
        message = shorten(f"{describe(failure)}; {why}", MAX_SENTENCE)
        return EndRun(OutcomeRecord(OutcomeState.FAILED, round.number, round.restarts, message, failure))
    kept = msgspec.structs.replace(failure, message=shorten(failure.message, MAX_KEPT_MESSAGE))
    charged = msgspec.structs.replace(
        round,
        restarts=round.restarts + (not failure.uncharged),
        early_failures=early,
        uncharged_restarts=round.uncharged_restarts + failure.uncharged,
        failure=round.failure if failure.uncharged else kept,
    )
    return _form_or_pause(snapshot, charged, candidates(snapshot), RoundReason.WORKER_FAILED, describe(failure))


def _why_run_ends(failure: FailureRecord, round: RoundRecord, early: int, settings: RendezvousSettings) -> str:
    """Return why the run ends with this failure; empty if it restarts."""
    if failure.non_retryable:
        return "this failure is declared final, so the run is not tried again, whatever is left of its restarts"
    spent = round.restarts >= settings.max_restarts and not failure.uncharged
    if spent and settings.max_restarts == 0:
        return "it may not restart"
    if early >= settings.crash_loop_limit:
        return f"its workers failed {times(early)} in a row within {settings.crash_loop_seconds:g} s of their start"
    return f"no restart is left of the {settings.max_restarts} that it may have" if spent else ""


# -- planned changes


def _after_departure(
    snapshot: Snapshot, round: RoundRecord, leaving: Sequence[str], settings: RendezvousSettings
) -> Decision:
    """Continue without the leaving members, after all members that asked for notice had it."""
    change = _continue_without(snapshot, round, leaving, settings)
    noticed = current_notice(snapshot) is not None or requested_seconds(snapshot, settings) > 0
    if not isinstance(change, FormRound) and noticed and _nobody_stays(snapshot):
        # No node needs another round, but the leaving nodes wait for the end of this one.
        change = _pause(snapshot, round, candidates(snapshot), RoundReason.NODE_LEFT, departures(leaving, snapshot))
    return after_notice(snapshot, change, settings)


def _change_membership(snapshot: Snapshot, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Change the members of a healthy round if the size or the present nodes have changed."""
    them = candidates(snapshot)
    chosen = {peer.id for peer in them.chosen}
    # A member without a key stays, and so does a finished member that has left; a smaller size removes them.
    staying = [node for node in snapshot.ranks if node in chosen or node in snapshot.silent or node in snapshot.done]
    joining = [peer for peer in them.chosen if peer.id not in snapshot.ranks]
    finishing = any(map(snapshot.is_finishing, snapshot.ranks))
    if len(staying) < len(snapshot.ranks):
        away = [node for node in snapshot.ranks if node not in staying]
        cause = f"{named(away)} {are(len(away))} taken away"
        return after_notice(snapshot, _form_or_pause(snapshot, round, them, RoundReason.RESIZED, cause), settings)
    if len({peer.id for peer in them.ordered}.union(staying)) < snapshot.size.min and not finishing:
        cause = f"at least {count(snapshot.size.min, 'node')} {are(snapshot.size.min)} wanted now"
        return after_notice(snapshot, _pause(snapshot, round, them, RoundReason.RESIZED, cause), settings)
    if not joining or them.target <= len(snapshot.ranks):
        return withdraw_notice(snapshot, Hold())
    if finishing:
        return withdraw_notice(snapshot, Hold(why="the run is about to finish; new nodes wait"))
    if snapshot.incomplete:
        return Hold(why="a member's key is on its way back; new nodes wait")
    if any(not snapshot.peers[node].answers for node in snapshot.ranks if node in snapshot.peers):
        return Hold(why="a member has not connected to its new leader yet; new nodes wait")
    return after_notice(snapshot, _debounced(snapshot, round, them, joining, settings), settings)


def _debounced(
    snapshot: Snapshot, round: RoundRecord, them: Candidates, joining: Sequence[Peer], settings: RendezvousSettings
) -> Decision:
    """Add new nodes: at once if all desired nodes are present, otherwise after ``join_debounce`` without new ones."""
    if len(them.ordered) < them.target:
        until = _debounce_until(snapshot, joining, settings.join_debounce)
        if snapshot.now < until:
            return Hold(until)
    newcomers = [peer for peer in them.chosen if peer.id not in snapshot.ranks]
    return _form(snapshot, round, them, RoundReason.NODE_JOINED, joined(newcomers or them.chosen))


def _debounce_until(snapshot: Snapshot, joining: Sequence[Peer], debounce: float) -> float:
    """Return the time until which new nodes wait for more new nodes."""
    limit = MAX_DEBOUNCE_FACTOR * debounce
    # A new node may not have connected yet; a dead node never will.
    mute = [peer.arrived for peer in snapshot.peers.values() if not peer.answers and may_join(peer, snapshot)]
    arrivals = sorted([peer.arrived for peer in joining] + mute)
    first = last = arrivals[-1]
    for arrived in reversed(arrivals):
        if first - arrived > debounce:
            break
        first = arrived
    return first + limit if any(arrived >= first for arrived in mute) else min(last + debounce, first + limit)


# -- round building


def _too_few(
    snapshot: Snapshot, before: RoundRecord, them: Candidates, since: float, settings: RendezvousSettings
) -> Decision:
    """Wait for more nodes; after the join timeout, end the run."""
    why = waiting_for(snapshot, them, snapshot.missing)
    if snapshot.now < since + settings.join_timeout:
        return Hold(since + settings.join_timeout, why)
    message = f"no more nodes came within {settings.join_timeout:g} s: {why}"
    return EndRun(OutcomeRecord(OutcomeState.FAILED, before.number, before.restarts, message))


def _form_or_pause(
    snapshot: Snapshot, before: RoundRecord, them: Candidates, reason: RoundReason, cause: str
) -> Decision:
    """Return the next round with the present nodes, or without members if there are too few nodes."""
    return (_pause if len(them.ordered) < snapshot.size.min else _form)(snapshot, before, them, reason, cause)


def _pause(snapshot: Snapshot, before: RoundRecord, them: Candidates, reason: RoundReason, cause: str) -> Decision:
    """Form a round without members: the remaining nodes stop their workers and wait."""
    cause = f"{cause}; {waiting_for(snapshot, them)}"
    return FormRound(_next_round(snapshot, before, reason, cause, before.uncharged_restarts))


def _form(snapshot: Snapshot, before: RoundRecord, them: Candidates, reason: RoundReason, cause: str) -> Decision:
    """Return the next round with these nodes; its TCPStore is on a node with an unused port."""
    # A node that knows the current round has offered another port since.
    host = next((peer for peer in them.chosen if peer.record.store and peer.record.round >= snapshot.number), None)
    if host is None:
        return Hold(why="waiting for a node that can serve the next round's TCPStore")
    failed = reason is RoundReason.WORKER_FAILED or (
        before.reason is RoundReason.WORKER_FAILED
        and not before.members  # too few nodes were left for an immediate restart
    )
    uncharged = before.uncharged_restarts + (before.number > 0 and not failed)
    return FormRound(
        msgspec.structs.replace(
            _next_round(snapshot, before, reason, cause, uncharged),
            members=tuple(Member(peer.id, peer.record.address, peer.record.workers) for peer in them.chosen),
            store=f"{bracketed(host.record.address)}:{host.record.store}",
        )
    )


def _next_round(
    snapshot: Snapshot, before: RoundRecord, reason: RoundReason, cause: str, uncharged_restarts: int
) -> RoundRecord:
    return RoundRecord(
        number=max(before.number, snapshot.highest_round_seen) + 1,
        restarts=before.restarts,
        early_failures=before.early_failures,
        uncharged_restarts=uncharged_restarts,
        desired=snapshot.size.desired,
        reason=reason,
        cause=shorten(cause, MAX_SENTENCE),
        failure=before.failure,
    )
